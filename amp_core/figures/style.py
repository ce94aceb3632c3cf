"""One colour per meaning, one look for all figures.

Every trace gets its colour from here, for a light or a dark page; background, font and grid are put below it when the
figure goes to a browser (`browser.py`), so that in a notebook they are those of the notebook. The hues follow Okabe and
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
"""Colour of everything else that has a meaning, light and dark. A skipped step is an overflow that was caught."""

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
"""Parts of a step's cost, in the order in which they are stacked: colour light and dark, that of a label on it light
and dark, hatching."""
UNKNOWN_PART = PARTS["other"]

PHASES = {name: PARTS.get(name, UNKNOWN_PART)[:2] for name in (*phases.PHASES, phases.OTHER)}
"""Colour of each phase of a step, light and dark; neighbours in the stack differ in lightness or in hatching."""
HATCHES = {name: PARTS[name][3] for name in PHASES if name in PARTS} | {"activations": "/"}
"""Hatching of phases and of what memory is used for, where lightness does not tell it from its neighbour."""

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
"""Colour of what memory is used for, light and dark; neighbours in the stack differ in lightness or in hatching."""

COUNTERS: dict[str, tuple[str, str]] = {
    "gpu_util_frac": ("#8A949B", "#6B747A"),
    "sm_active_frac": ("#0B55B0", "#6FA8F0"),
    "tensor_active_frac": ("#0A5A4A", "#4FE0C4"),
    "hmma_active_frac": ("#0A5A4A", "#4FE0C4"),
    "dram_active_frac": ("#C24E9A", "#D9679F"),
}
"""Colour of each share that a device counts, light and dark; their dashes differ too."""

SHARES = (
    ((0.0, "#E3EEF1"), (0.35, "#A9CBD6"), (0.6, "#5B9DB3"), (0.8, "#256F8A"), (1.0, "#083C52")),
    ((0.0, "#15292F"), (0.35, "#1E4E5C"), (0.6, "#2E8196"), (0.8, "#5CBACB"), (1.0, "#D8F7FB")),
)
"""Colour scale of shares, light and dark: one hue, more is further from the background."""

PAGE = ("#FCFCFA", "#11181B")
"""The page's own background, light and dark: behind a label that stands on data."""
INK = ("#0F1A1E", "#E3EBE9")
"""Colour of titles and of what explains data, light and dark."""
QUIET = ("#56666B", "#A9B8BA")
"""Colour of what stands along axes."""
GRID = ("#DDE4E1", "#2B393E")
"""Colour of grid lines."""

UNSEEN = {"color": "rgba(0,0,0,0)", "size": 14, "symbol": "square", "maxdisplayed": 1}
"""Markers that tell and report clicks of what does not by itself, such as a heatmap's cells. Plotly finds each of them
under the pointer though it draws but one: what nobody sees costs the browser nothing."""

STROKES, ORNAMENT, NO_X, NO_Y = "strokes", "ornament", "no x", "no y"
"""`meta` of traces: its points are those of `comb`, with no number for their height; a label, or another trace holds
its numbers; its points stand at an edge or in a strip, where x or y is no number of theirs."""

_PIXELS = 500
"""Fewer than a plot is wide."""
_COUNTED = ("step", "samples seen")
"""Titles of axes that count: 20,000 as in the sentences beside them, where plotly's own format has 20k."""
_FEW = 10
"""Along so few steps plotly would put ticks between them."""
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
"""Tell runs of one recipe apart, which all have its colour."""


def recipe_colour(recipe: object, dark: bool = False) -> str:
    """The colour of a precision recipe; one for all that are not known."""
    known = RECIPES.get(recipe, UNKNOWN_RECIPE) if isinstance(recipe, str) else UNKNOWN_RECIPE
    return known[dark]


def colour(meaning: str, dark: bool = False) -> str:
    """The colour of a meaning (`MEANINGS`) or a phase (`PHASES`)."""
    return (MEANINGS.get(meaning) or PHASES[meaning])[dark]


def hatched(name: str, dark: bool, opacity: float = 0.45) -> dict[str, Any]:
    """The hatching of a phase or a category of memory, for `marker.pattern` or `fillpattern`; none for most."""
    ground = "#11181B" if dark else "#FFFFFF"
    return {"shape": HATCHES.get(name, ""), "size": 6, "fgcolor": ground, "fillmode": "overlay", "fgopacity": opacity}


def faded(hex_colour: str, opacity: float) -> str:
    """`#RRGGBB` as an `rgba()` of that opacity (0–1)."""
    red, green, blue = (int(hex_colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity:g})"


def power_of_two(value: float) -> str:
    """`65536` as `2<sup>16</sup>`; a value between powers as a number of three digits."""
    if not math.isfinite(value) or value <= 0:
        return f"{value:g}"
    exponent = math.log2(value)
    return raised(round(exponent)) if abs(exponent - round(exponent)) < 1e-9 else f"{value:.3g}"


def raised(exponent: int) -> str:
    """2 to the power of `exponent`, as HTML with a real minus sign."""
    return f"2<sup>{exponent}</sup>".replace("-", "−")


def log2_axis(low: float, high: float, most: int = 9) -> dict[str, object]:
    """A logarithmic axis from 2^`low` to 2^`high` (exponents) with ticks at powers of two, at most about `most`."""
    stride = next(s for s in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512) if (high - low) / s <= most or s == 512)
    ticks = range(math.ceil(low / stride) * stride, math.floor(high) + 1, stride)
    return {
        "type": "log",
        "range": [low * math.log10(2), high * math.log10(2)],
        "tickvals": [2.0**k for k in ticks],
        "ticktext": [raised(k) for k in ticks],
        "minor": {"ticks": ""},
    }


def exponent_axis(title: str, low: float, high: float) -> dict[str, Any]:
    """A linear axis of exponents from `low` to `high`, ticks written as powers of two; plotly puts as many as there is
    room for, and finer ones when one zooms in."""
    return {
        "title": title,
        "range": [low, high],
        "tickprefix": "2<sup>",
        "ticksuffix": "</sup>",
        "nticks": 14,
        "tickangle": 0,
        "zeroline": False,
    }


BAR = 56
"""Pixels that `bar_below` takes at the bottom of a figure: add them to its height and to its lower margin."""


def bar_below(title: str, ticks: Sequence[float], texts: Sequence[str]) -> dict[str, Any]:
    """A heatmap's bar of colours along the bottom of the figure; `title` has lines of a dozen letters.

    Beside the plot it would take a third of a narrow page, and steps would not stand below those of the figure above.
    """
    room = "&nbsp;" * 5  # for the first tick
    return {
        "title": {"text": f"{title}{room}", "side": "right"},
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
    """A share (0–1) in percent with three digits, as the tables write it; one too small for them is not called zero."""
    return f"{100 * share:.3g} %" if share >= 1e-4 or share == 0 else "<0.01 %"


def share_axis(title: str, top: float = 1.0, past: float = 0.0) -> dict[str, Any]:
    """A fixed axis of shares from 0 to `top`, and on to `past`, in percent as the pages write it: 20 %, where plotly's
    own format has 20%."""
    stride = next(s for s in (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5) if top / s < 4.5 or s == 0.5)
    ticks = [k * stride for k in range(math.floor(top / stride + 1e-9) + 1)]
    shown = {"tickvals": ticks, "ticktext": [f"{100 * tick:g} %" for tick in ticks]}
    return {"title": title, "range": [0, max(top, past)], "fixedrange": True} | shown


def shortened(name: str, most: int = 30) -> str:
    """A long name with its middle left out: both ends tell layers apart."""
    if len(name) <= most:
        return name
    tail = (most - 1) * 3 // 5
    return f"{name[: most - 1 - tail]}…{name[-tail:]}"


def tick_names(names: Sequence[str], most: int = 30) -> list[str]:
    """Names of tensors for an axis: where they are long, without the parts that all begin and end with."""
    if max(map(len, names), default=0) <= most:
        return list(names)
    parts = [name.split(".") for name in names]
    fewest = min(map(len, parts))
    head = next((i for i in range(fewest - 1) if len({p[i] for p in parts}) > 1), 0 if len(names) == 1 else fewest - 1)
    rest = fewest - 1 - head
    tail = next((i for i in range(rest) if len({p[-1 - i] for p in parts}) > 1), 0 if len(names) == 1 else rest)
    cut = [".".join(p[head : len(p) - tail]) for p in parts]
    return [shortened(f"{'…' * bool(head)}{name}{'…' * bool(tail)}", most) for name in cut]


def numbers(values: "pd.Series[Any] | np.ndarray") -> np.ndarray:
    """Values as plotly sends them best: 32-bit, no lists; whole numbers stay whole."""
    array = np.asarray(values)
    if array.dtype.kind in "iu" and (not len(array) or abs(array).max() < 2**31):
        return array.astype(np.int32)
    with np.errstate(over="ignore"):
        return array.astype(np.float32) if array.dtype.kind != "M" else array


def put(figure: FigureSpec | go.Figure, **layout: Any) -> None:
    """Set these parts of a layout, each as a whole; `update_layout`, which looks into each, takes a hundred times as
    long."""
    for name, value in layout.items():
        figure.layout[name] = value


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


def finished(figure: FigureSpec, title: str, alt: str, height: int = 360, **layout: Any) -> go.Figure:
    """The look that all figures share: title above, legend below the plot, margins, and `alt` for those who cannot see.

    The legend stands at the figure's own edge: plotly makes room for it there, however many rows a narrow page asks.
    """
    put(
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
        if name == "xaxis" and axis.get("title") in _COUNTED:
            axis |= {"exponentformat": "none", "separatethousands": True}
            if axis.get("range") and axis["range"][1] - axis["range"][0] < _FEW:
                axis["dtick"] = 1  # there is no step 550.5
    return figure.made()


def empty(title: str, sentence: str, height: int = 150) -> go.Figure:
    """A figure with nothing to draw: it says why."""
    figure = FigureSpec()
    figure.add_annotation(text=sentence, x=0.5, y=0.5, xref="paper", yref="paper", showarrow=False, font={"size": 14})
    figure.xaxis(visible=False)
    figure.yaxis(visible=False)
    return finished(figure, title, f"{title}: {sentence}", height)


def span(values: Sequence[float] | np.ndarray) -> tuple[float, float] | None:
    """Lowest and highest log2 of the positive finite values; None where there is none."""
    array = np.asarray(values, dtype=np.float64)
    array = array[np.isfinite(array) & (array > 0)]
    return (math.log2(array.min()), math.log2(array.max())) if len(array) else None
