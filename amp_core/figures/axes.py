"""Axes, their ticks, and how numbers and names are written along them.

>>> power_of_two(65536)
'2<sup>16</sup>'
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from amp_core.figures.colours import SHARES
from amp_core.formats import Format
from amp_core.text.formatting import number


def power_of_two(value: float) -> str:
    """`65536` as `2<sup>16</sup>`; a value between powers as a number of three digits."""
    if not math.isfinite(value) or value <= 0:
        return f"{value:g}"
    exponent = math.log2(value)
    return power_html(round(exponent)) if abs(exponent - round(exponent)) < 1e-9 else number(value)


def power_html(exponent: int) -> str:
    """2 to the power of `exponent`, as HTML with a real minus sign."""
    return f"2<sup>{exponent}</sup>".replace("-", "−")


def format_limits(form: Format) -> list[tuple[float, str]]:
    """log2 and label of a format's smallest subnormal, smallest normal and largest value."""
    return [
        (float(form.min_subnormal_exponent), f"min. subnormal {power_html(form.min_subnormal_exponent)}"),
        (float(form.min_normal_exponent), f"min. normal {power_html(form.min_normal_exponent)}"),
        (math.log2(form.max_value), f"max. {form.max_value:.5g}"),
    ]


def log2_axis(low: float, high: float) -> dict[str, object]:
    """A logarithmic axis from 2^`low` to 2^`high` with about nine ticks at most, at powers of two."""
    stride = next(s for s in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512) if (high - low) / s <= 9 or s == 512)
    ticks = range(math.ceil(low / stride) * stride, math.floor(high) + 1, stride)
    return {
        "type": "log",
        "range": [low * math.log10(2), high * math.log10(2)],
        "tickvals": [2.0**k for k in ticks],
        "ticktext": [power_html(k) for k in ticks],
        "minor": {"ticks": ""},
    }


def exponent_axis(title: str, low: float, high: float) -> dict[str, Any]:
    """A linear axis of exponents from `low` to `high`, with ticks as powers of two; plotly sets as many as
    fit, and finer ones when zoomed in."""
    return {
        "title": title,
        "range": [low, high],
        "tickprefix": "2<sup>",
        "ticksuffix": "</sup>",
        "nticks": 9,
        "tickangle": 0,
        "zeroline": False,
    }


COLORBAR_PX = 56
"""Height of `colorbar_below`: add it to a figure's height and bottom margin."""


MIN_DECADES = -5
"""log10 of the share that has the palest colour of a heatmap, as all below it."""


def share_cells(grid: np.ndarray, dark: bool) -> dict[str, Any]:
    """Values, colours and colour bar of a heatmap of shares (0–1) of nonzero values; cells of 0 stay empty."""
    with np.errstate(divide="ignore"):
        decades = np.maximum(np.log10(grid), MIN_DECADES)
    return {
        "z": np.where(grid > 0, decades, np.nan).astype(np.float32),
        "zmin": MIN_DECADES,
        "zmax": 0,
        "colorscale": [list(stop) for stop in SHARES[dark]],
        "colorbar": colorbar_below("of nonzero<br>values", *share_ticks()),
    }


def share_ticks() -> tuple[Sequence[float], list[str]]:
    """Ticks of a colour bar of shares on a logarithmic scale, and their labels; all decades would not fit a phone."""
    ticks = [MIN_DECADES, -3, 0]
    return ticks, [f"{100 * 10.0**k:g} %" for k in ticks]


def colorbar_below(title: str, ticks: Sequence[float], texts: Sequence[str]) -> dict[str, Any]:
    """A heatmap's colour bar along the bottom of the figure; `title` has lines of a dozen letters.

    Beside the plot it would take a third of a narrow page, and steps would not align with those of the figure above.
    """
    padding = "&nbsp;" * 5  # for the first tick
    return {
        "title": {"text": f"{title}{padding}", "side": "right"},
        "tickvals": list(ticks),
        "ticktext": list(texts),
        "thickness": 12,
        "outlinewidth": 0,
        "orientation": "h",
        "lenmode": "pixels",
        "len": 235,
        "tickangle": 0,
        "x": 0,
        "xref": "container",
        "xanchor": "left",
        "y": 0,
        "yref": "container",
        "yanchor": "bottom",
    }


def percent(share: float) -> str:
    """A share (0–1) in percent with three digits, as in tables; a tiny share is not written as zero."""
    return f"{100 * share:.3g} %" if share >= 1e-4 or share == 0 else "<0.01 %"


def share_axis(title: str, top: float = 1.0, past: float = 0.0) -> dict[str, Any]:
    """A fixed axis of shares from 0 to `top`, extended to `past`, in percent as on the pages: 20 %, where plotly's
    own format has 20%."""
    stride = next(s for s in (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5) if top / s < 4.5 or s == 0.5)
    ticks = [k * stride for k in range(math.floor(top / stride + 1e-9) + 1)]
    shown = {"tickvals": ticks, "ticktext": [f"{100 * tick:g} %" for tick in ticks]}
    return {"title": title, "range": [0, max(top, past)], "fixedrange": True} | shown


def shorten(name: str, max_chars: int = 30) -> str:
    """A long name without its middle: both ends distinguish layers."""
    if len(name) <= max_chars:
        return name
    tail = (max_chars - 1) * 3 // 5
    return f"{name[: max_chars - 1 - tail]}…{name[-tail:]}"


def tick_names(names: Sequence[str], max_chars: int = 30) -> list[str]:
    """Names of tensors for an axis: long ones without their common first and last parts."""
    if max(map(len, names), default=0) <= max_chars:
        return list(names)
    parts = [name.split(".") for name in names]
    fewest = min(map(len, parts))
    head = next((i for i in range(fewest - 1) if len({p[i] for p in parts}) > 1), 0 if len(names) == 1 else fewest - 1)
    rest = fewest - 1 - head
    tail = next((i for i in range(rest) if len({p[-1 - i] for p in parts}) > 1), 0 if len(names) == 1 else rest)
    cut = [".".join(p[head : len(p) - tail]) for p in parts]
    return [shorten(f"{'…' * bool(head)}{name}{'…' * bool(tail)}", max_chars) for name in cut]


def log2_range(values: Sequence[float] | np.ndarray) -> tuple[float, float] | None:
    """Lowest and highest log2 of the positive finite values; None if there are none."""
    array = np.asarray(values, dtype=np.float64)
    array = array[np.isfinite(array) & (array > 0)]
    return (math.log2(array.min()), math.log2(array.max())) if len(array) else None
