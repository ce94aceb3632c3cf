"""`View`: an analysis and its figure under one name."""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from amp_core.store.run import Run

if TYPE_CHECKING:
    import plotly.graph_objects as go  # noqa: TID251 - for type annotations

F = TypeVar("F")

Ask = Callable[..., Any]
"""Calls `ask(function, run, *args, **options)`: `uncached`, or a cache that the pages provide."""


def uncached(function: Callable[..., Any], run: Run | Sequence[Run], *args: Any, **options: Any) -> Any:
    """`function(run, *args, **options)`, without a cache."""
    return function(run, *args, **options)


def figures() -> ModuleType:
    """`amp_core.figures`, imported when something is drawn: names, frames and `missing` need no plotly."""
    return importlib.import_module("amp_core.figures")


@dataclass(frozen=True)
class View(Generic[F]):
    """One chart: its analyses and its figure.

    Pages, live page, notebook and report draw the same view and differ only in options.
    """

    name: str
    title: str
    """What the chart shows; the title of the figure if there is nothing to show."""
    tables: tuple[str, ...]
    """The tables of a run that it reads."""
    analyse: Callable[..., F]
    """`analyse(run, ask, **options)`: the data for `plot`. Calls each analysis through `ask`."""
    plot: Callable[..., "go.Figure"]
    """`plot(frame, dark, **style)`: the figure of the result of `analyse`, through `figures()`."""
    absent: Callable[[F], str | None]
    """A sentence that says why there is nothing to draw; None if there is."""

    def frame(self, run: Run | Sequence[Run], ask: Ask = uncached, **options: Any) -> F:
        """The data of the figure; `options` are those of `analyse`."""
        return self.analyse(run, ask, **options)

    def figure(self, frame: F, dark: bool = False, **style: Any) -> "go.Figure":
        """The figure of a frame, or one that says why there is no data; `style` holds the options of `plot`."""
        if sentence := self.absent(frame):
            nothing: go.Figure = figures().style.empty_figure(self.title, sentence)
            return nothing
        return self.plot(frame, dark, **style)

    def draw(self, run: Run | Sequence[Run], dark: bool = False, ask: Ask = uncached, **options: Any) -> "go.Figure":
        """The figure of a run; `options` are those of `analyse`."""
        frame = self.frame(run, ask, **options)
        if self.absent(frame) and (damage := self._damage(run)):
            nothing: go.Figure = figures().style.empty_figure(self.title, damage)
            return nothing
        return self.figure(frame, dark)

    def missing(self, run: Run | Sequence[Run], ask: Ask = uncached) -> str | None:
        """A sentence that says why the run has nothing to show here; None if it has."""
        absent = self.absent(self.frame(run, ask))
        return absent and (self._damage(run) or absent)

    def _damage(self, run: Run | Sequence[Run]) -> str:
        """A sentence that names the first table of the view that cannot be read; empty if all can."""
        for one in [run] if isinstance(run, Run) else run:
            for name in self.tables:
                if one.damaged(name):
                    return f"The table {name} of this run cannot be read."
        return ""
