"""Colours and hatching: one colour per meaning, for a light and a dark page.

    >>> recipe_colour("fp16", dark=True)
    '#5590E0'

The hues follow Okabe and Ito, "Color Universal Design" (2008); `tests/figures/test_style.py` measures contrast and
distance under the three kinds of colour blindness. No meaning rests on colour alone: skipped steps are crosses, classes
have hatching.
"""

from typing import Any

import pandas as pd

from amp_core import phases

RECIPES: dict[str, tuple[str, str]] = {
    "fp32": ("#6C7480", "#CFD8DF"),
    "tf32": ("#6D390F", "#C98A3A"),
    "fp16": ("#0B55B0", "#5590E0"),
    "bf16": ("#1BA24A", "#37C98C"),
    "fp16-unscaled": ("#A069D5", "#DA9AF1"),
    "fp16-pure": ("#96215F", "#E2457F"),
    "bf16-pure": ("#636106", "#D0D62E"),
    "fp8": ("#F05000", "#8C5E00"),
    "mxfp8": ("#20566D", "#0077B2"),
    "nvfp4": ("#571D63", "#BE1B7E"),
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
    "tensor_no": ("#24406B", "#6C86D9"),
    "no_matrix": ("#6A8FB0", "#5E80A0"),
}
"""Colour of every other meaning, light and dark. A skipped step is an overflow that was caught."""

_WHITE, _BLACK = "#FFFFFF", "#11181B"

PARTS: dict[str, tuple[str, str, tuple[str, str], str]] = {
    "data": ("#C9AE6A", "#BFA45F", (_BLACK, _BLACK), ""),
    "forward": ("#2B5C8F", "#4C82BD", (_WHITE, _WHITE), ""),
    "backward": ("#79A6D2", "#9CC4EA", (_BLACK, _BLACK), ""),
    "gaps": ("#D9DFE2", "#39444A", (_BLACK, _WHITE), ""),
    "tensor": ("#2A6B7B", "#2F8794", (_WHITE, _WHITE), ""),
    "matrix_unknown": ("#8A5FC0", "#C3A3F0", (_WHITE, _BLACK), "/"),
    "matrix": ("#24406B", "#6C86D9", (_WHITE, _BLACK), ""),
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

CHANGES = (
    ((0.0, "#7A2E05"), (0.2, "#C2571A"), (0.4, "#EBB48C"), (0.5, "#FCFCFA"), (0.6, "#A9C6E8"), (0.8, "#3C78BE"),
     (1.0, "#0B3A75")),
    ((0.0, "#FFC79A"), (0.2, "#E07F3A"), (0.4, "#6B3A1C"), (0.5, "#11181B"), (0.6, "#1D4064"), (0.8, "#4E90DC"),
     (1.0, "#BFDCFF")),
)  # fmt: skip
"""Colour scale of changes, light and dark: less in orange, more in blue, none in the page's own colour."""

PAGE = ("#FCFCFA", "#11181B")
"""The page's own background, light and dark: behind a label that stands on data."""

INK = ("#0F1A1E", "#E3EBE9")
"""Colour of titles and legends, light and dark."""

QUIET = ("#56666B", "#A9B8BA")
"""Colour of axis labels."""

GRID = ("#DDE4E1", "#2B393E")
"""Colour of grid lines."""

DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
"""Distinguish runs of one recipe, whose colours are shades of one hue."""

_SHADES = {"ink": (0.0, 0.42, 0.75), "page": (0.0, 0.28, 0.49)}
"""Shares of ink, or of the page, in the colours of the first, second and third run of a recipe."""
_MAX_LIGHTENED = 0.62
"""Colours brighter than this (0–1) are darkened on a dark page: lightened, they would all be white."""


def recipe_colour(recipe: object, dark: bool = False) -> str:
    """The colour of a precision recipe; a common one for unknown recipes."""
    known = RECIPES.get(recipe, UNKNOWN_RECIPE) if isinstance(recipe, str) else UNKNOWN_RECIPE
    return known[dark]


def run_colours(runs: pd.DataFrame, dark: bool = False) -> dict[str, str]:
    """A colour for each run of a comparison, the same on all of its charts: that of its recipe, and shades of it for
    further runs of the recipe.

    `runs` has columns run (label) and precision, in the order of the runs; where it has `recipe`, as
    `compare(runs).table`, the label of each recipe has the colour of its first run.
    """
    hues: dict[str, str] = {}
    used: dict[object, int] = {}
    first = runs.drop_duplicates("run")
    for run, precision in zip(first["run"], first["precision"], strict=True):
        hues[str(run)] = _shade(recipe_colour(precision, dark), used.get(precision, 0), dark)
        used[precision] = used.get(precision, 0) + 1
    if "recipe" in runs:
        for label, run in zip(first["recipe"], first["run"], strict=True):
            hues.setdefault(str(label), hues[str(run)])
    return hues


def _shade(hue: str, number: int, dark: bool) -> str:
    """The colour of the run `number` of a recipe with the colour `hue`."""
    red, green, blue = (int(hue[i : i + 2], 16) for i in (1, 3, 5))
    bright = (0.2126 * red + 0.7152 * green + 0.0722 * blue) / 255
    into, shares = (PAGE, _SHADES["page"]) if dark and bright > _MAX_LIGHTENED else (INK, _SHADES["ink"])
    share = shares[number % len(shares)]
    other = (int(into[dark][i : i + 2], 16) for i in (1, 3, 5))
    mixed = (round(a + (b - a) * share) for a, b in zip((red, green, blue), other, strict=True))
    return "#" + "".join(f"{part:02X}" for part in mixed)


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


def hatching(name: str, dark: bool) -> dict[str, Any]:
    """The hatching of a phase or a category of memory, for `marker.pattern` or `fillpattern`; none for most."""
    return pattern(HATCHES.get(name, ""), dark, 6, 0.45)


def with_opacity(hex_colour: str, opacity: float) -> str:
    """`#RRGGBB` as an `rgba()` of that opacity (0–1)."""
    red, green, blue = (int(hex_colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity:g})"


def limit_line(row: int, dark: bool) -> dict[str, Any]:
    """The line of the limits of the format number `row`; formats differ in their dashes."""
    return {"color": colour("limit", dark), "width": 1.4, "dash": ("solid", "dash", "dot")[row % 3]}
