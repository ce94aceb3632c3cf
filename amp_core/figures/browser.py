"""Figures as a browser gets them: plain data in a look that is the same in the app and in a report; and plotly.js.

    record = for_browser(loss_figure(curves, dark=True), dark=True)        # keys `data` and `layout`
    script = plotly_script()

Streamlit hands each figure to plotly.js twice, the second time as a copy. Plotly then draws it anew unless all parts
are equal, and of three it cannot tell: of packed numbers (base64), of `meta` and of a template. So numbers are lists,
where plotly leaves it to `datarevision` whether they have changed, and each figure says what a template would say.
Only numbers of two dimensions stay packed, a heatmap's above all: plotly unpacks them into a list of rows, which is as
good, and of up to 400,000 cells they are half as long as in digits.
"""

import base64
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from amp_core.figures.colours import GRID, INK, PAGE, QUIET

APP_FONT = "'Source Sans', sans-serif"
"""Comes with Streamlit."""
SYSTEM_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"
DIGITS = (7, 15)
"""Significant decimal digits of a float of 32 bits and of one of 64, or nearly: what is written after them is noise."""


def for_browser(figure: go.Figure, dark: bool = False, font: str = APP_FONT) -> dict[str, Any]:
    """`figure` as plain data for `Plotly.newPlot`: keys `data` and `layout`. The figure itself stays as it is."""
    layout: dict[str, Any] = figure.layout.to_plotly_json()
    for unwanted in ("meta", "template"):
        layout.pop(unwanted, None)
    look = _look(dark, font)
    for axis in [name for name in layout if name.startswith(("xaxis", "yaxis"))]:
        look[axis] = _axis(axis[0], dark)
    data = [{name: _plain(value) for name, value in t.to_plotly_json().items()} for t in figure.data]
    return {"data": data, "layout": _over(look, layout)}


def plotly_script() -> str:
    """plotly.js, minified, as the plotly package carries it (about 4.8 MB)."""
    script: str = get_plotlyjs()
    return script


def _look(dark: bool, font: str) -> dict[str, Any]:
    plain = {"family": font, "size": 12}
    return {
        "font": plain | {"color": QUIET[dark]},
        "title": {"font": {"size": 16, "weight": 600, "color": INK[dark]}},
        "legend": {"font": {"color": INK[dark]}},
        "hoverlabel": {"bgcolor": PAGE[dark], "bordercolor": GRID[dark], "font": plain | {"color": INK[dark]}},
        "margin": {"pad": 8},
        "paper_bgcolor": PAGE[dark],
        "plot_bgcolor": PAGE[dark],
    }


def _axis(which: str, dark: bool) -> dict[str, Any]:
    """Lines from side to side alone, no ticks (a heatmap would have some); room between an axis and its name."""
    lines = {"gridcolor": GRID[dark], "zerolinecolor": GRID[dark], "ticks": ""}
    if which == "y":
        return lines | {"title": {"font": {"size": 14}, "standoff": 24}}
    return lines | {"title": {"font": {"size": 14}, "standoff": 20}, "showgrid": False, "zeroline": False}


def _over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Both as one, what is `above` winning, part by part."""
    both = below | above
    for name in below.keys() & above.keys():
        if isinstance(below[name], dict):
            both[name] = _over(below[name], above[name])
    return both


def _plain(value: Any) -> Any:
    """Arrays in what a trace holds as JSON can have them."""
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    if not isinstance(value, np.ndarray):
        return value
    if value.ndim == 2 and value.dtype.kind == "f":  # a heatmap's above all
        packed = base64.b64encode(value.astype(np.float32).tobytes()).decode()
        return {"dtype": "f4", "bdata": packed, "shape": f"{value.shape[0]}, {value.shape[1]}"}
    return _rounded(value) if value.dtype.kind == "f" else value.tolist()


def _rounded(values: np.ndarray) -> list[Any]:
    """Floats with as many digits as they have, whole numbers with all; None for what JSON has no number for."""
    wide, known = values.astype(np.float64), np.isfinite(values)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        places = DIGITS[values.itemsize > 4] - 1 - np.floor(np.log10(np.abs(wide)))
        factor = 10.0 ** np.clip(places, -300, 300)
        short = np.where(wide == np.rint(wide), wide, np.rint(wide * factor) / factor)
    told = short if known.all() else np.where(known, short.astype(object), np.array(None))
    return list(told.tolist())
