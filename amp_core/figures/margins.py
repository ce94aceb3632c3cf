"""Margins for a figure's labels and legend, estimated before a browser draws it.

>>> margins(figure, {"l": 64, "r": 28, "t": 52, "b": 48})       # a FigureSpec with its axes and traces

Plotly's `automargin` measures margins by drawing the whole figure and then draws it again, which takes a browser twice
as long. So the margins are estimated here, and `automargin` only corrects estimates that are too small. A browser test
checks that they are not.
"""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from amp_core.figures.figure_spec import FigureSpec

COLUMN_PX, PAGE_PX = 500, 1000
"""Width of a chart in one of two columns, and across the page. On a phone it is 360 pixels: the app measures there what
the legend takes, and makes the chart higher (pages/parts/chart_sync.js)."""


def legend_px(traces: Iterable[Mapping[str, Any]], always: bool = False, width_px: int = COLUMN_PX) -> int:
    """Height of the legend of these traces in a chart of that width, pixels; 0 if plotly draws none, as for
    a single trace unless `always`."""
    shown = [t for t in traces if t["type"] != "heatmap" and t.get("showlegend") is not False]
    if len(shown) < 2 and not always and not any(t.get("showlegend") for t in shown):
        return 0
    entries = [46 + _text_px(t.get("name") or "") for t in shown]
    rows = 1 if sum(entries) <= width_px else math.ceil(len(entries) / max(1, width_px // max(entries)))
    return 19 + 19 * rows


def more_legend_px(figure: FigureSpec) -> int:
    """Height of the legend's rows after the first, for which a low figure has no room."""
    return max(0, legend_px(figure.data) - legend_px((), always=True))


def margins(figure: FigureSpec, given: dict[str, int], legend: bool) -> dict[str, int]:
    """The margins `given`, enlarged for axis titles, ticks and a `legend`."""
    x, y = figure.layout.get("xaxis", {}), figure.layout.get("yaxis", {})
    if x.get("visible") is False:
        return given
    named = y.get("type") == "category" and y.get("showticklabels") is not False
    names = y.get("ticktext") or y.get("tickvals") if named else ()
    if not names and named:
        names = [name for trace in figure.data for name in trace.get("y", ())]
    left = 26 + max(_text_px(str(name)) for name in names) if names else 50
    return given | {
        "l": max(given["l"], round(left) + 32 * bool(y.get("title"))),
        "t": given["t"] + legend_px(figure.data, legend),
        "b": given["b"] + 29 * bool(x.get("title")),
    }


def _text_px(text: str) -> float:
    """Approximate width of a text of 12 pixels in a sans serif, by narrow, wide and other letters."""
    plain = re.sub(r"<[^>]*>", "", text)
    return sum(3.4 if c in "iljtfrI.,:;'|()[] " else 9.5 if c in "mwMW%@" else 6.4 for c in plain)
