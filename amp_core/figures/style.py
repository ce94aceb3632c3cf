"""One colour per meaning, and a common look of all figures.

Every trace takes its colour from here, for a light or a dark page; background, font and grid are added when the
figure is sent to a browser (`browser.py`), so that a notebook keeps its own. The hues follow Okabe and
Ito, "Color Universal Design" (2008); `tests/figures/test_style.py` measures contrast and distance under the three kinds
of colour blindness. No meaning rests on colour alone: skipped steps are crosses, classes have hatching.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from amp_core import phases
from amp_core.figures.figure_spec import FigureSpec
from amp_core.figures.margins import margins
from amp_core.formats import Format

RECIPES: dict[str, tuple[str, str]] = {
    "fp32": ("#6C7480", "#CFD8DF"),
    "tf32": ("#6D390F", "#C98A3A"),
    "fp16": ("#0B55B0", "#5590E0"),
    "bf16": ("#1BA24A", "#37C98C"),
    "fp16-unscaled": ("#A069D5", "#DA9AF1"),
    "fp16-pure": ("#96215F", "#E2457F"),
    "bf16-pure": ("#636106", "#D0D62E"),
}
"""Colour of each precision recipe, light and dark."""

UNKNOWN_RECIPE = ("#3C7C8A", "#7FBFCC")

MEANINGS: dict[str, tuple[str, str]] = {
    "overflow": ("#BE3217", "#F0593C"),
    "underflow": ("#B0891A", "#F9CE3E"),
    "healthy": ("#2A6B7B", "#2F8794"),
    "skipped": ("#BE3217", "#F0593C"),
    "zero": ("#C7D3DA", "#40474B"),
    "nan": ("#62104E", "#FC70E2"),
    "scale": ("#2F4B7C", "#9DB8F2"),
    "norm": ("#2F4B7C", "#9DB8F2"),
    "memory": ("#2F4B7C", "#9DB8F2"),
    "limit": ("#3A464C", "#D5DEE2"),
    "tensor_yes": ("#2A6B7B", "#2F8794"),
    "tensor_unknown": ("#8A5FC0", "#C3A3F0"),
    "tensor_no": ("#6C7480", "#75828B"),
    "no_matrix": ("#6A8FB0", "#5E80A0"),
}
"""Colour of every other meaning, light and dark. A skipped step is an overflow that was caught."""

_WHITE, _BLACK = "#FFFFFF", "#11181B"
PARTS: dict[str, tuple[str, str, tuple[str, str], str]] = {
    "data": ("#C9AE6A", "#BFA45F", (_BLACK, _BLACK), ""),
    "forward": ("#2B5C8F", "#4C82BD", (_WHITE, _WHITE), ""),
    "backward": ("#79A6D2", "#9CC4EA", (_BLACK, _BLACK), ""),
    "gaps": ("#D9DFE2", "#39444A", (_BLACK, _WHITE), "/"),
    "tensor": ("#2A6B7B", "#2F8794", (_WHITE, _WHITE), ""),
    "matrix_unknown": ("#8A5FC0", "#C3A3F0", (_WHITE, _BLACK), "/"),
    "matrix": ("#6C7480", "#75828B", (_WHITE, _WHITE), "x"),
    "memory_bound": ("#79A6D2", "#9CC4EA", (_BLACK, _BLACK), ""),
    "cast": ("#C2571A", "#F09A5C", (_WHITE, _BLACK), ""),
    "layout": ("#EBC19C", "#8F5B35", (_BLACK, _WHITE), ""),
    "optimizer": ("#7D6BAF", "#A493D6", (_WHITE, _BLACK), ""),
    "communication": ("#7A4A63", "#B97B98", (_WHITE, _BLACK), ""),
    "copy": ("#B7C86A", "#A4B755", (_BLACK, _BLACK), ""),
    "other": ("#B9C2C7", "#5D6A71", (_BLACK, _WHITE), ""),
    "watch": ("#4E9A8C", "#69BCAC", (_BLACK, _BLACK), "."),
}
"""Parts of a step's cost, in stacking order: colour light and dark, colour of its label light
and dark, hatching."""
UNKNOWN_PART = PARTS["other"]

PHASES = {name: PARTS.get(name, UNKNOWN_PART)[:2] for name in (*phases.PHASES, phases.OTHER)}
"""Colour of each phase of a step, light and dark; neighbours in the stack differ in lightness or in hatching."""
HATCHES = {name: PARTS[name][3] for name in PHASES if name in PARTS} | {"activations": "/"}
"""Hatching of phases and categories of memory whose lightness is close to their neighbour's."""

MEMORY: dict[str, tuple[str, str]] = {
    "parameters": ("#2B5C8F", "#4C82BD"),
    "gradients": ("#79A6D2", "#9CC4EA"),
    "optimizer": ("#7D6BAF", "#A493D6"),
    "activations": ("#C2571A", "#F09A5C"),
    "autocast": ("#EBC19C", "#8F5B35"),
    "buffers": ("#4E9A8C", "#69BCAC"),
    "temporary": ("#C9AE6A", "#BFA45F"),
    "other": ("#B9C2C7", "#5D6A71"),
}
"""Colour of the categories of memory, light and dark; neighbours in the stack differ in lightness or in hatching."""

COUNTERS: dict[str, tuple[str, str]] = {
    "gpu_util_frac": ("#8A949B", "#6B747A"),
    "sm_active_frac": ("#0B55B0", "#6FA8F0"),
    "tensor_active_frac": ("#0A5A4A", "#4FE0C4"),
    "hmma_active_frac": ("#0A5A4A", "#4FE0C4"),
    "dram_active_frac": ("#C24E9A", "#D9679F"),
}
"""Colour of each counter of a device, light and dark; their dashes differ too."""

SHARES = (
    ((0.0, "#E3EEF1"), (0.35, "#A9CBD6"), (0.6, "#5B9DB3"), (0.8, "#256F8A"), (1.0, "#083C52")),
    ((0.0, "#15292F"), (0.35, "#1E4E5C"), (0.6, "#2E8196"), (0.8, "#5CBACB"), (1.0, "#D8F7FB")),
)
"""Colour scale of shares, light and dark: one hue, more is further from the background."""

PAGE = ("#FCFCFA", "#11181B")
"""The page's own background, light and dark: behind a label that stands on data."""
INK = ("#0F1A1E", "#E3EBE9")
"""Colour of titles and legends, light and dark."""
QUIET = ("#56666B", "#A9B8BA")
"""Colour of axis labels."""
GRID = ("#DDE4E1", "#2B393E")
"""Colour of grid lines."""

INVISIBLE_MARKER = {"color": "rgba(0,0,0,0)", "size": 14, "symbol": "square", "maxdisplayed": 1}
"""Markers with hover texts and clicks for traces without them, such as a heatmap's cells. Plotly finds each of them
under the pointer although it draws only one, so they cost the browser nothing."""

STROKES, ORNAMENT, NO_X, NO_Y = "strokes", "ornament", "no x", "no y"
"""`meta` of traces: points of `stroke_points`, whose height is not data; labels, or a trace whose data is in another
trace; points at an edge or in a strip, where x or y is not data."""

_MIN_PLOT_WIDTH_PX = 500
"""A lower bound of a plot's width."""
_COUNT_TITLES = ("step", "samples seen")
"""Titles of axes of counts, which are written 20,000 and not 20k as in plotly's own format."""
_MIN_FREE_TICK_STEPS = 10
"""With fewer steps plotly would set ticks between them."""
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
"""Distinguish runs of one recipe, which all have its colour."""


def recipe_colour(recipe: object, dark: bool = False) -> str:
    """The colour of a precision recipe; a common one for unknown recipes."""
    known = RECIPES.get(recipe, UNKNOWN_RECIPE) if isinstance(recipe, str) else UNKNOWN_RECIPE
    return known[dark]


def colour(meaning: str, dark: bool = False) -> str:
    """The colour of a meaning (`MEANINGS`) or a phase (`PHASES`)."""
    return (MEANINGS.get(meaning) or PHASES[meaning])[dark]


def pattern(shape: str, dark: bool, size: int = 5, opacity: float | None = None) -> dict[str, Any]:
    """Hatching of a shape, for `marker.pattern` or `fillpattern`; none for an empty `shape`."""
    look = {"shape": shape, "size": size, "fgcolor": "#11181B" if dark else "#FFFFFF", "fillmode": "overlay"}
    return look if opacity is None else look | {"fgopacity": opacity}


def bar_marker(hue: str, hatch: str, dark: bool, size: int = 5, opacity: float | None = None) -> dict[str, Any]:
    """The marker of a bar without an outline, hatched with the shape `hatch`."""
    return {"color": hue, "line": {"width": 0}, "pattern": pattern(hatch, dark, size, opacity)}


def hatching(name: str, dark: bool, opacity: float = 0.45) -> dict[str, Any]:
    """The hatching of a phase or a category of memory, for `marker.pattern` or `fillpattern`; none for most."""
    return pattern(HATCHES.get(name, ""), dark, 6, opacity)


def with_opacity(hex_colour: str, opacity: float) -> str:
    """`#RRGGBB` as an `rgba()` of that opacity (0–1)."""
    red, green, blue = (int(hex_colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity:g})"


def power_of_two(value: float) -> str:
    """`65536` as `2<sup>16</sup>`; a value between powers as a number of three digits."""
    if not math.isfinite(value) or value <= 0:
        return f"{value:g}"
    exponent = math.log2(value)
    return power_html(round(exponent)) if abs(exponent - round(exponent)) < 1e-9 else f"{value:.3g}"


def power_html(exponent: int) -> str:
    """2 to the power of `exponent`, as HTML with a real minus sign."""
    return f"2<sup>{exponent}</sup>".replace("-", "−")


def log2_axis(low: float, high: float, max_ticks: int = 9) -> dict[str, object]:
    """A logarithmic axis from 2^`low` to 2^`high` with about `max_ticks` ticks at most, at powers of two."""
    stride = next(s for s in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512) if (high - low) / s <= max_ticks or s == 512)
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
        "nticks": 14,
        "tickangle": 0,
        "zeroline": False,
    }


COLORBAR_PX = 56
"""Height of `colorbar_below`: add it to a figure's height and bottom margin."""


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
        "len": 300,
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


def compact_array(values: "pd.Series[Any] | np.ndarray") -> np.ndarray:
    """Values as compact arrays: 32-bit floats, or 32-bit integers for whole numbers."""
    array = np.asarray(values)
    if array.dtype.kind in "iu" and (not len(array) or abs(array).max() < 2**31):
        return array.astype(np.int32)
    with np.errstate(over="ignore"):
        return array.astype(np.float32) if array.dtype.kind != "M" else array


def format_limits(form: Format) -> list[tuple[float, str]]:
    """log2 and label of a format's smallest subnormal, smallest normal and largest value."""
    return [
        (float(form.min_subnormal_exponent), f"min. subnormal {power_html(form.min_subnormal_exponent)}"),
        (float(form.min_normal_exponent), f"min. normal {power_html(form.min_normal_exponent)}"),
        (math.log2(form.max_value), f"max. {form.max_value:.5g}"),
    ]


def limit_line(row: int, dark: bool) -> dict[str, Any]:
    """The line of the limits of the format number `row`; formats differ in their dashes."""
    return {"color": colour("limit", dark), "width": 1.4, "dash": ("solid", "dash", "dot")[row % 3]}


def set_layout(figure: FigureSpec | go.Figure, **layout: Any) -> None:
    """Set these properties of a layout, each as a whole; `update_layout`, which merges, takes a hundred times as
    long."""
    for name, value in layout.items():
        figure.layout[name] = value


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


def vertical_line(x0: float, x1: float | None = None, **look: Any) -> dict[str, Any]:
    """A vertical line across the plot, or with `x1` a band, for `layout.shapes`."""
    kind = "line" if x1 is None else "rect"
    return {"type": kind, "x0": x0, "x1": x0 if x1 is None else x1, "y0": 0, "y1": 1, "yref": "y domain"} | look


def horizontal_line(y: float, **look: Any) -> dict[str, Any]:
    """A horizontal line across the plot, for `layout.shapes`."""
    return {"type": "line", "x0": 0, "x1": 1, "xref": "x domain", "y0": y, "y1": y} | look


def finish(figure: FigureSpec, title: str, alt: str, height: int = 360, **layout: Any) -> go.Figure:
    """Add the common look of all figures: title above, legend below the plot, margins, and `alt`, a text description.

    The legend is at the figure's edge, where plotly can enlarge its margin on a narrow page.
    """
    set_layout(
        figure,
        title={
            "text": title, "x": 0, "xref": "container", "xanchor": "left", "y": 1, "yref": "container",
            "yanchor": "top", "pad": {"t": 14, "l": 2},
        },
        legend={
            "orientation": "h", "x": 0, "xref": "container", "xanchor": "left", "y": 0, "yref": "container",
            "yanchor": "bottom", "traceorder": "normal", "title": {"text": ""},
        } | layout.pop("legend", {}),
        margin=margins(figure, {"l": 64, "r": 28, "t": 52, "b": 48} | layout.pop("margin", {}), "showlegend" in layout),
        height=height,
        meta={"alt": alt},
        uirevision=title,
        **layout,
    )  # fmt: skip
    for name, axis in figure.axes():
        axis["automargin"] = True
        if name == "xaxis" and axis.get("title") in _COUNT_TITLES:
            axis |= {"exponentformat": "none", "separatethousands": True}
            if axis.get("range") and axis["range"][1] - axis["range"][0] < _MIN_FREE_TICK_STEPS:
                axis["dtick"] = 1  # no ticks between steps
    return figure.to_figure()


def empty_figure(title: str, sentence: str, height: int = 150) -> go.Figure:
    """A figure without data, with a sentence that says why."""
    figure = FigureSpec()
    figure.add_annotation(text=sentence, x=0.5, y=0.5, xref="paper", yref="paper", showarrow=False, font={"size": 14})
    figure.xaxis(visible=False)
    figure.yaxis(visible=False)
    return finish(figure, title, f"{title}: {sentence}", height)


def log2_range(values: Sequence[float] | np.ndarray) -> tuple[float, float] | None:
    """Lowest and highest log2 of the positive finite values; None if there are none."""
    array = np.asarray(values, dtype=np.float64)
    array = array[np.isfinite(array) & (array > 0)]
    return (math.log2(array.min()), math.log2(array.max())) if len(array) else None
