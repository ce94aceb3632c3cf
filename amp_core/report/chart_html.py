"""The charts of a report: which ones a run has, each in a light and a dark version.

charts = Charts()
html = charts.view(views.LOSS, run)
charts.record()             # {"0": {"light": {data, layout}, "dark": …}}: what page.js draws
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from amp_core import figures, views
from amp_core.analysis import Comparison, first_runs
from amp_core.figures.browser import SYSTEM_FONT, for_browser
from amp_core.store.run import Run
from amp_core.text.html import Html, join, tag
from amp_core.views import View

if TYPE_CHECKING:
    import plotly.graph_objects as go  # noqa: TID251 - for type annotations

_OPTIONS: dict[str, dict[str, Any]] = {views.RANGES.name: {"title": "Number ranges: {kind} by tensor and exponent"}}
"""Options of views, by name: a report has no page whose title names the subject of a heatmap."""

_WIDE = frozenset(view.name for view in (views.CLASSES, views.TENSOR_CORES, views.KERNELS, views.PRECISION_MAP))
"""Views with long names beside or above their plot: on a phone they scroll sideways, as on the pages."""

Draw = Callable[[bool], "go.Figure"]


class Charts:
    """The charts of one report, in the order in which they were added."""

    def __init__(self) -> None:
        self._drawn: dict[str, dict[str, Any]] = {}

    def add(self, draw: Draw, wide: bool = False) -> Html:
        """Reserve the place of a chart in the page; `draw(dark)` makes its figure. A `wide` one scrolls on a phone."""
        light, dark = draw(False), draw(True)
        key = str(len(self._drawn))
        self._drawn[key] = {
            "light": for_browser(light, False, SYSTEM_FONT),
            "dark": for_browser(dark, True, SYSTEM_FONT),
        }
        alt = light.layout.meta["alt"]
        box = tag("div", data_chart=key, role="img", aria_label=alt, style=f"min-height:{light.layout.height}px")
        scrolls = {"class_": "wide", "tabindex": "0"} if wide else {}  # by keyboard, it needs the focus
        return tag("figure", box, tag("figcaption", alt), **scrolls)

    def view(self, view: View[Any], of: Run | Sequence[Run]) -> Html | None:
        """Add a view; None if it has nothing to show."""
        frame = view.frame(of, **_OPTIONS.get(view.name, {}))
        if view.absent(frame):
            return None
        return self.add(lambda dark: view.figure(frame, dark), wide=view.name in _WIDE)

    def record(self) -> dict[str, dict[str, Any]]:
        """All charts as plain data."""
        return self._drawn


def together(charts: Charts, runs: list[Run], comparison: Comparison | None) -> Html:
    """Charts that show all runs at once."""
    if comparison is None:
        return join([charts.view(views.LOSS, runs[0])])
    bars = [_bars(charts, comparison, column) for column in ("speed_ratio", "memory_ratio", "loss_ratio")]

    def hues(dark: bool) -> dict[str, str]:
        return figures.run_colours(comparison.table, dark)

    agreement = views.AGREEMENT.frame(first_runs(runs))
    return join(
        [
            charts.view(views.LOSSES, runs),
            tag("div", *bars, class_="row"),
            charts.add(lambda dark: figures.deviation_figure(comparison.recipes, dark=dark, hues=hues(dark))),
            None
            if views.AGREEMENT.absent(agreement)
            else charts.add(lambda dark: views.AGREEMENT.figure(agreement, dark, hues=hues(dark))),
        ]
    )


def _bars(charts: Charts, comparison: Comparison, column: str) -> Html:
    return charts.add(lambda dark: figures.compare_bars(comparison.table, column, dark=dark))


def of_run(charts: Charts, run: Run) -> Html:
    """Every view of one run that has something to show; `together` shows its loss."""
    return join([charts.view(view, run) for name, view in views.RUN_VIEWS.items() if name != views.LOSS.name])
