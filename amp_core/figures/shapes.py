"""Points and lines as a browser draws them cheaply: arrays, strokes, lines without invisible gaps, straight shapes."""

from typing import Any

import numpy as np
import pandas as pd

UNSEEN = {"color": "rgba(0,0,0,0)", "size": 14, "symbol": "square", "maxdisplayed": 1}
"""Markers that tell and report clicks of what does not by itself, such as a heatmap's cells. Plotly finds each of them
under the pointer though it draws but one: what nobody sees costs the browser nothing."""

STROKES, ORNAMENT, NO_X, NO_Y = "strokes", "ornament", "no x", "no y"
"""`meta` of traces: its points are those of `comb`, with no number for their height; a label, or another trace holds
its numbers; its points stand at an edge or in a strip, where x or y is no number of theirs."""

_PIXELS = 500
"""Fewer than a plot is wide."""


def numbers(values: "pd.Series[Any] | np.ndarray") -> np.ndarray:
    """Values as plotly sends them best: 32-bit, no lists; whole numbers stay whole."""
    array = np.asarray(values)
    if array.dtype.kind in "iu" and (not len(array) or abs(array).max() < 2**31):
        return array.astype(np.int32)
    with np.errstate(over="ignore"):
        return array.astype(np.float32) if array.dtype.kind != "M" else array


def comb(x: np.ndarray, base: float, tip: float) -> tuple[np.ndarray, np.ndarray]:
    """Strokes at `x` from `base` to `tip` as one line of three points each, which a browser draws as one path. Lay
    `base` beyond the axis: from stroke to stroke the line runs along it, and is cut off there."""
    return np.repeat(x, 3), np.tile(np.array([base, tip, base], dtype=np.float32), len(x))


def mended(x: "pd.Series[Any]", y: "pd.Series[Any]") -> tuple["pd.Series[Any]", "pd.Series[Any]"]:
    """A line without those of its gaps (NaN in `y`) that are narrower than a pixel: nobody sees one, and a browser
    draws each piece between gaps as a path of its own."""
    there = x[y.notna()]
    if len(there) < 2:
        return x, y
    before, behind = x.where(y.notna()).ffill(), x.where(y.notna()).bfill()
    kept = y.notna() | ~(behind - before < (there.iloc[-1] - there.iloc[0]) / _PIXELS)
    return x[kept], y[kept]


def upright(x0: float, x1: float | None = None, **look: Any) -> dict[str, Any]:
    """A line from the bottom of the plot to its top, or with `x1` a band, for `layout.shapes`."""
    kind = "line" if x1 is None else "rect"
    return {"type": kind, "x0": x0, "x1": x0 if x1 is None else x1, "y0": 0, "y1": 1, "yref": "y domain"} | look


def level(y: float, **look: Any) -> dict[str, Any]:
    """The same from side to side."""
    return {"type": "line", "x0": 0, "x1": 1, "xref": "x domain", "y0": y, "y1": y} | look
