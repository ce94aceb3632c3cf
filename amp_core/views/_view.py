"""What a view is: an analysis and its figure under one name."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from amp_core.store.run import Run

if TYPE_CHECKING:
    import plotly.graph_objects as go  # noqa: TID251 - for its name alone

F = TypeVar("F")

Ask = Callable[..., Any]
"""Calls `ask(function, run, *args, **options)`: `plainly`, or a cache that the pages put in its place."""


def plainly(function: Callable[..., Any], of: Run | Sequence[Run], *args: Any, **options: Any) -> Any:
    """`function(of, *args, **options)`, computed anew."""
    return function(of, *args, **options)


@dataclass(frozen=True)
class View(Generic[F]):
    """One chart: which analyses it takes, and how they are drawn.

    Pages, live page, notebook and report draw the same view and differ in options only.
    """

    name: str
    title: str
    """What the chart shows; the title of the figure where there is nothing to show."""
    tables: tuple[str, ...]
    """The tables of a run that it reads."""
    analyse: Callable[..., F]
    """`analyse(run, ask, **options)`: what `plot` draws. Each analysis is called through `ask`."""
    plot: Callable[..., "go.Figure"]
    """`plot(frame, dark, **look)`: the figure of what `analyse` gave. Imports plotly."""
    absent: Callable[[F], str | None]
    """The sentence that says why there is nothing to draw; None where there is."""

    def frame(self, run: Run | Sequence[Run], ask: Ask = plainly, **options: Any) -> F:
        """What the figure is drawn of; `options` are those of `analyse`."""
        return self.analyse(run, ask, **options)

    def figure(self, frame: F, dark: bool = False, **look: Any) -> "go.Figure":
        """The figure of a frame, or one that says why there is none; `look` holds the options of `plot`."""
        if sentence := self.absent(frame):
            from amp_core.figures.style import empty

            return empty(self.title, sentence)
        return self.plot(frame, dark, **look)

    def draw(self, run: Run | Sequence[Run], dark: bool = False, ask: Ask = plainly, **options: Any) -> "go.Figure":
        """The figure of a run; `options` are those of `analyse`."""
        return self.figure(self.frame(run, ask, **options), dark)

    def missing(self, run: Run | Sequence[Run], ask: Ask = plainly) -> str | None:
        """Why the run has nothing to show here, in a sentence; None where it has."""
        return self.absent(self.frame(run, ask))
