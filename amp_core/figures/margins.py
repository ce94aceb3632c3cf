"""How much room a figure's labels and its legend take, guessed before a browser draws it.

>>> margins(figure, {"l": 64, "r": 28, "t": 52, "b": 48})       # a Sketch with its axes and traces

Plotly makes room where it lacks (`automargin`), but finds that out by drawing the whole figure, and then draws it once
more: a browser takes twice as long. So what it will need is guessed here, and its own measure only mends a guess that
was too low. That it is not is tested in a browser.
"""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from amp_core.figures.figure_spec import FigureSpec

WIDE = 960
"""Pixels of a chart on a page of usual width."""


def legend_px(traces: Iterable[Mapping[str, Any]], always: bool = False) -> int:
    """Pixels that the legend of these traces takes on a page of usual width; 0 where plotly draws none, as it does for
    a single trace unless it `always` is to."""
    shown = [t for t in traces if t["type"] != "heatmap" and t.get("showlegend") is not False]
    if len(shown) < 2 and not always and not any(t.get("showlegend") for t in shown):
        return 0
    entries = [46 + _text_px(t.get("name") or "") for t in shown]
    rows = 1 if sum(entries) <= WIDE else math.ceil(len(entries) / max(1, WIDE // max(entries)))
    return 8 + 19 * rows


def margins(figure: FigureSpec, given: dict[str, int], legend: bool) -> dict[str, int]:
    """The margins `given`, with room for the names of the axes, for ticks and for a `legend`."""
    x, y = figure.layout.get("xaxis", {}), figure.layout.get("yaxis", {})
    if x.get("visible") is False:
        return given
    names = y.get("ticktext") or y.get("tickvals") if y.get("type") == "category" else ()
    if not names and y.get("type") == "category":
        names = [name for trace in figure.data for name in trace.get("y", ())]
    left = 26 + max(_text_px(str(name)) for name in names) if names else 44
    below = given["b"] + 29 * bool(x.get("title")) + legend_px(figure.data, legend)
    return given | {"l": max(given["l"], round(left) + 32 * bool(y.get("title"))), "b": below}


def _text_px(text: str) -> float:
    """About how wide a text of 12 pixels is: in a sans serif these letters are the narrow and the wide ones."""
    plain = re.sub(r"<[^>]*>", "", text)
    return sum(3.4 if c in "iljtfrI.,:;'|()[] " else 9.5 if c in "mwMW%@" else 6.4 for c in plain)
