"""The user's own tensor in 8 and 4 bits, value by value, with the scale that each block of it shares.

    >>> values = quantized_values([0.1, 0.7, 6.0], "mxfp4")
    >>> values[["value", "scale", "element", "held"]].round(3).to_numpy().tolist()
    [[0.1, 1.0, 0.0, 0.0], [0.7, 1.0, 0.5, 0.5], [6.0, 1.0, 6.0, 6.0]]

The values are one row of a tensor along the contraction. Results are those of `amp_core.record.fake_quantize`, bit for
bit; here without torch.
"""

import math
import re
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pandas as pd

from amp_core.formats import Format
from amp_core.quantization import RECIPES, ROW, TENSOR, Recipe, find_recipe
from amp_core.schema import RunError

MAX_VALUES = 4096
_MIN_AMAX = 1e-12
"""torchao's smallest amax for scales in FP32."""

Floats = npt.NDArray[np.float32]


def parse_values(text: str) -> list[float]:
    """Numbers separated by commas, blanks or lines; brackets around them are left out, as Python and torch print them.

    Raises `RunError` for what is no finite number, for no number and for more than `MAX_VALUES`.
    """
    parts = re.split(r"[\s,;]+", re.sub(r"\b(tensor|array)\b|[\[\](){}]", " ", text).strip())
    parts = [part for part in parts if part]
    if not 1 <= len(parts) <= MAX_VALUES:
        raise RunError(f"values has {len(parts)} numbers; give 1 to {MAX_VALUES}, separated by commas")
    values = []
    for part in parts:
        try:
            with np.errstate(over="ignore"):
                value = float(np.float32(float(part)))
        except (ValueError, OverflowError):
            value = math.nan
        if not math.isfinite(value):
            raise RunError(f"values={part[:40]!r} is no finite FP32 number; give numbers such as 0.5 or -1e-3")
        values.append(value)
    return values


def block_size(recipe: str | Recipe, count: int) -> int:
    """How many of `count` values in a row share a scale: all, where the whole row or tensor does."""
    block = _found(recipe).block
    return block if isinstance(block, int) else count


def quantized_values(values: Sequence[float], recipe: str | Recipe, kind: str = "activation") -> pd.DataFrame:
    """One row per value: block (its number), value (FP32), amax and scale (of its block; what the element is multiplied
    with), element (as stored), held (element × scale), smallest (the least nonzero magnitude that the block holds),
    rel_error (NaN of 0), what: `zero`, `underflow` (becomes 0), `saturated` (beyond the largest), `exact`, `rounded`.

    Weights of recipes with tiles are taken in a row as well. Raises `RunError` for an unknown recipe.
    """
    recipe = _found(recipe)
    element = recipe.element_of(kind)
    row: Floats = np.asarray(values, dtype=np.float32)
    size = max(1, block_size(recipe, len(row)))
    number = np.arange(len(row)) // size
    amax = np.zeros(len(row) // size + 1, dtype=np.float32)
    np.maximum.at(amax, number, np.abs(row))
    with np.errstate(all="ignore"):
        encoded, decode = _scaled(row, recipe, element, amax, number)
        clamped = np.clip(encoded, -np.float32(element.max_value), np.float32(element.max_value))
        stored = _rounded(clamped, element)
        held = (stored / decode[0] if decode[1] else stored * decode[0]).astype(np.float32)
        scale = np.float32(1) / decode[0] if decode[1] else decode[0]
        error = np.abs(held - row) / np.abs(row)
    zero = row == 0
    what = np.select(
        [zero, held == 0, np.abs(encoded) > element.max_value, held == row],
        ["zero", "underflow", "saturated", "exact"],
        "rounded",
    )
    return pd.DataFrame(
        {
            "block": number,
            "value": row,
            "amax": amax[number],
            "scale": scale,
            "element": stored,
            "held": held,
            "smallest": scale * np.float32(element.min_subnormal),
            "rel_error": np.where(zero, np.nan, error),
            "what": what,
        }
    )


def recipe_effects(values: Sequence[float], index: int) -> pd.DataFrame:
    """What every recipe does to the block of the value at `index`, and to the values outside of it.

    One row per recipe: recipe, label, scaling (in words), size (values of the block), scale (of the block), underflow
    and other_underflow (how many nonzero values become 0, in the block and outside), nonzero and other_nonzero,
    rel_error and other_rel_error (root of squared error over squared values; NaN where there are none), and
    beside_rel_error: that of the block without its largest value, which is most of the block's squares.
    """
    rows = []
    for recipe in RECIPES.values():
        frame = quantized_values(values, recipe)
        inside = frame["block"] == frame["block"].iloc[index]
        beside = frame[inside].drop(index=frame.loc[inside, "value"].abs().idxmax())
        rows.append(
            {
                "recipe": recipe.name,
                "label": recipe.label,
                "scaling": recipe.scaling,
                "size": int(inside.sum()),
                "scale": float(frame["scale"].iloc[index]),
                **_effect(frame[inside], ""),
                **_effect(frame[~inside], "other_"),
                "beside_rel_error": _effect(beside, "")["rel_error"],
            }
        )
    return pd.DataFrame(rows)


def _effect(frame: pd.DataFrame, prefix: str) -> dict[str, float]:
    value, held = (frame[name].to_numpy(dtype=np.float64) for name in ("value", "held"))
    squares = float(np.square(value).sum())
    return {
        f"{prefix}underflow": int((frame["what"] == "underflow").sum()),
        f"{prefix}nonzero": int(np.count_nonzero(value)),
        f"{prefix}rel_error": math.sqrt(float(np.square(held - value).sum()) / squares) if squares else math.nan,
    }


def _found(recipe: str | Recipe) -> Recipe:
    return recipe if isinstance(recipe, Recipe) else find_recipe(recipe)


def _scaled(
    row: Floats, recipe: Recipe, element: Format, amax: Floats, number: npt.NDArray[np.int64]
) -> tuple[Floats, tuple[Floats, bool]]:
    """The values as the element has to hold them, and by what it is multiplied, or divided if True, afterwards."""
    top = np.float32(element.max_value)
    if recipe.scale.name == "e8m0":
        if recipe.rule == "floor":
            exponent = np.clip((amax.view(np.int32) >> 23) - element.max_exponent, 0, 255)
            least = 2.0**-126 if element.exponent_bits else 2.0**-127
            encode = np.maximum(np.ldexp(np.float32(1), exponent - 127), np.float32(least))
        else:
            quotient = amax / top
            exponent = np.where(amax == 0, 0, np.clip(np.ceil(np.log2(quotient)), -127, 127) + 127).astype(np.int32)
            encode = np.where(exponent == 0, np.float32(1), np.ldexp(np.float32(1), exponent - 127))
        decode = np.ldexp(np.float32(1), exponent - 127).astype(np.float32)
        return (row / encode[number]).astype(np.float32), (decode[number], False)
    if recipe.scale.name == "fp32":
        scale = (element.max_value / np.maximum(amax.astype(np.float64), _MIN_AMAX)).astype(np.float32)
        if recipe.rule == "amax-pow2":
            scale = np.exp2(np.floor(np.log2(scale))).astype(np.float32)
        divides = recipe.block in (TENSOR, ROW)
        return row * scale[number], ((scale if divides else np.float32(1) / scale)[number], divides)
    narrow, tensor_scale = amax / top, np.float32(1)
    if recipe.levels == 2:
        largest = np.float32(np.abs(row).max()) if len(row) else np.float32(0)
        tensor_scale = largest / np.float32(recipe.scale.max_value * element.max_value) or np.float32(1)
        narrow = narrow / tensor_scale
    narrow = np.clip(narrow, np.float32(recipe.scale.min_normal), np.float32(recipe.scale.max_value))
    narrow = _rounded(narrow, recipe.scale)
    encode = (np.float32(1) / tensor_scale) / narrow
    scaled = row * encode[number]
    return np.nan_to_num(scaled, nan=-1.5, posinf=np.inf, neginf=-np.inf), ((tensor_scale * narrow)[number], False)


def _rounded(values: Floats, form: Format) -> Floats:
    """Values that the format can reach, rounded to nearest, ties to even; exact in float64."""
    wide = values.astype(np.float64)
    exponent = np.frexp(wide)[1] - 1
    quantum = np.exp2(np.maximum(exponent, form.min_normal_exponent) - form.mantissa_bits)
    return np.asarray(np.copysign(np.rint(wide / quantum) * quantum, wide), dtype=np.float32)
