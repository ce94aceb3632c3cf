"""Points and lines as a browser draws them cheaply: arrays, strokes, lines without invisible gaps, straight shapes."""

from typing import Any

import numpy as np
import pandas as pd

INVISIBLE_MARKER = {"color": "rgba(0,0,0,0)", "size": 14, "symbol": "square", "maxdisplayed": 1}
"""Markers with hover texts and clicks for traces without them, such as a heatmap's cells. Plotly finds each of them
under the pointer although it draws only one, so they cost the browser nothing."""

STROKES, ORNAMENT, NO_X, NO_Y = "strokes", "ornament", "no x", "no y"
"""`meta` of traces: points of `stroke_points`, whose height is not data; labels, or a trace whose data is in another
trace; points at an edge or in a strip, where x or y is not data."""

_MIN_PLOT_WIDTH_PX = 500
"""A lower bound of a plot's width."""


def compact_array(values: "pd.Series[Any] | np.ndarray") -> np.ndarray:
    """Values as compact arrays: 32-bit floats, or 32-bit integers for whole numbers."""
    array = np.asarray(values)
    if array.dtype.kind in "iu" and (not len(array) or abs(array).max() < 2**31):
        return array.astype(np.int32)
    with np.errstate(over="ignore"):
        return array.astype(np.float32) if array.dtype.kind != "M" else array


def stroke_points(x: np.ndarray, base: float, tip: float) -> tuple[np.ndarray, np.ndarray]:
    """Strokes at `x` from `base` to `tip` as one line of three points each, which a browser draws as one path. Place
    `base` beyond the axis, which cuts off the line between strokes."""
    return np.repeat(x, 3), np.tile(np.array([base, tip, base], dtype=np.float32), len(x))


def bridge_gaps(x: "pd.Series[Any]", y: "pd.Series[Any]") -> tuple["pd.Series[Any]", "pd.Series[Any]"]:
    """A line without the gaps (NaN in `y`) that are narrower than a pixel: they are invisible, and a browser
    draws each piece between gaps as a separate path."""
    known = x[y.notna()]
    if len(known) < 2:
        return x, y
    before, behind = x.where(y.notna()).ffill(), x.where(y.notna()).bfill()
    kept = y.notna() | ~(behind - before < (known.iloc[-1] - known.iloc[0]) / _MIN_PLOT_WIDTH_PX)
    return x[kept], y[kept]


def error_bars(
    value: np.ndarray, low: np.ndarray, high: np.ndarray, hue: str, thickness: float = 1.4, width: int = 5
) -> dict[str, Any]:
    """Bars from `low` to `high` around values, for `error_x` or `error_y`; none where an end is not known."""
    above, below = (np.nan_to_num(part).astype(np.float32) for part in (high - value, value - low))
    look = {"color": hue, "thickness": thickness, "width": width}
    return {"type": "data", "symmetric": False, "array": above, "arrayminus": below} | look


def vertical_line(x0: float, x1: float | None = None, **look: Any) -> dict[str, Any]:
    """A vertical line across the plot, or with `x1` a band, for `layout.shapes`."""
    kind = "line" if x1 is None else "rect"
    return {"type": kind, "x0": x0, "x1": x0 if x1 is None else x1, "y0": 0, "y1": 1, "yref": "y domain"} | look


def horizontal_line(y: float, **look: Any) -> dict[str, Any]:
    """A horizontal line across the plot, for `layout.shapes`."""
    return {"type": "line", "x0": 0, "x1": 1, "xref": "x domain", "y0": y, "y1": y} | look
