"""Figures for a browser: plain data with the same look in the app and in reports; and plotly.js.

    record = for_browser(loss_figure(curves, dark=True), dark=True)        # keys `data` and `layout`
    script = plotly_script()

Streamlit passes each figure to plotly.js twice, the second time as a copy. Plotly then redraws it unless all parts are
equal, and it cannot compare three: packed numbers (base64), `meta` and a template. So numbers are lists, for which
plotly relies on `datarevision`, and each figure contains the properties of a template. Only two-dimensional numbers,
such as a heatmap's, stay packed: plotly unpacks them into a list of rows, and for up to 400,000 cells they are half as
long as in digits.
"""

import base64
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from amp_core.figures.colours import GRID, INK, PAGE, QUIET

APP_FONT = "'Source Sans', sans-serif"
"""Included in Streamlit."""
SYSTEM_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"
DIGITS = (7, 15)
"""Significant decimal digits of 32-bit and 64-bit floats, approximately; further digits are noise."""


def for_browser(figure: go.Figure, dark: bool = False, font: str = APP_FONT) -> dict[str, Any]:
    """`figure` as plain data for `Plotly.newPlot`: keys `data` and `layout`. The figure is not changed."""
    layout: dict[str, Any] = figure.layout.to_plotly_json()
    for unwanted in ("meta", "template"):
        layout.pop(unwanted, None)
    look = _look(dark, font)
    for axis in [name for name in layout if name.startswith(("xaxis", "yaxis"))]:
        look[axis] = _axis(axis[0], dark)
    data = [{name: _plain(value) for name, value in t.to_plotly_json().items()} for t in figure.data]
    return {"data": data, "layout": _merge(look, layout)}


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
    """Only horizontal grid lines, no ticks (a heatmap would have some), and a margin between an axis and its title."""
    lines = {"gridcolor": GRID[dark], "zerolinecolor": GRID[dark], "ticks": ""}
    if which == "y":
        return lines | {"title": {"font": {"size": 14}, "standoff": 24}}
    return lines | {"title": {"font": {"size": 14}, "standoff": 20}, "showgrid": False, "zeroline": False}


def _merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Both merged recursively; `above` wins."""
    both = below | above
    for name in below.keys() & above.keys():
        if isinstance(below[name], dict):
            both[name] = _merge(below[name], above[name])
    return both


def _plain(value: Any) -> Any:
    """A value of a trace with its arrays in a JSON-compatible form."""
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    if not isinstance(value, np.ndarray):
        return value
    if value.ndim == 2 and value.dtype.kind == "f":  # a heatmap's
        packed = base64.b64encode(value.astype(np.float32).tobytes()).decode()
        return {"dtype": "f4", "bdata": packed, "shape": f"{value.shape[0]}, {value.shape[1]}"}
    return _rounded(value) if value.dtype.kind == "f" else value.tolist()


def _rounded(values: np.ndarray) -> list[Any]:
    """Floats with their significant digits, whole numbers with all; None for non-finite values."""
    wide, known = values.astype(np.float64), np.isfinite(values)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        places = DIGITS[values.itemsize > 4] - 1 - np.floor(np.log10(np.abs(wide)))
        factor = 10.0 ** np.clip(places, -300, 300)
        short = np.where(wide == np.rint(wide), wide, np.rint(wide * factor) / factor)
    rounded = short if known.all() else np.where(known, short.astype(object), np.array(None))
    return list(rounded.tolist())
