"""Predict what each quantization recipe loses of the operands of linear layers, from recorded blocks.

    quantized(run, [RECIPES["nvfp4"]])          # one row per operand, product and recipe
    product_errors(quantized(run, recipes))     # both operands of each product together

A run that `watch(…, blocks=True)` recorded counts the values of each operand by their distance below the top of their
block (see `amp_core.schema.TABLES["blocks"]`). Where a value lies below the top decides what an element makes of it: so
underflow and saturation follow from counts, ties apart. The squared error within a bin is that of values spread evenly
over it, on the grid of the tensor's own dtype.

Rules that round to another power of two than the recorded ones shift each block by an unknown factor (`amax-pow2`,
`rceil`); they are averaged over factors as the leading digits of numbers are distributed. For a whole tensor, and for
delayed scaling, the factor is known.
"""

import functools
from collections.abc import Sequence

import numpy as np
import pandas as pd

from amp_core.formats import FORMAT_OF_DTYPE, Format
from amp_core.quantization import (
    BINS,
    EIGHTHS,
    FINE_OCTAVES,
    OCTAVES,
    OPERANDS,
    Block,
    Recipe,
    block_name,
)
from amp_core.schema import RunError
from amp_core.store.run import Run

Shares = float | np.ndarray

POINTS = 64
"""Values that stand for a bin of an eighth; those of an octave have twice as many."""

FACTORS = 8
"""Factors that stand for an unknown one."""

COLUMNS = ["name", "kind", "product", "format", "underflow_frac", "underflow_mass_frac", "saturated_frac"]
COLUMNS += ["rel_error", "rel_error_db", "nonzero", "mass", "squares", "scaling"]


def quantized(
    run: Run, recipes: Sequence[Recipe], kinds: Sequence[str] = tuple(OPERANDS), step: int | None = None
) -> pd.DataFrame:
    """One row per operand, product and recipe, over the sampled step at or before `step`, or over all of them.

    Columns: name (of the parameter or module), kind (`weight`, `activation`, `output_grad`), product (`forward`,
    `input_grad`, `weight_grad`), format (the recipe), underflow_frac (values that become 0, over nonzero values),
    underflow_mass_frac (their share of the sum of magnitudes), saturated_frac (values beyond the largest, over nonzero
    values), rel_error (root of the squared error over the sum of squares), rel_error_db (the same in dB: the larger,
    the better), nonzero, mass and squares (values counted, sum of magnitudes and of squares), scaling (in words).
    Fractions are 0–1. Raises `RunError` for a run without blocks, and for a recipe whose blocks it did not record.
    """
    table = run.blocks
    if table.empty:
        name = recipes[0].name
        raise RunError(
            f"format={name!r} has a scale per {_per(recipes[0].block)}, but the run was recorded without blocks; "
            "record one with watch(…, blocks=True) or ampscope train --blocks"
        )
    if step is not None:
        before = table["step"][table["step"] <= step]
        table = table[table["step"] == before.max()] if len(before) else table[:0]
    frames = []
    present = set(table["kind"])
    for recipe in recipes:
        for kind in (k for k in kinds if k in OPERANDS and k in present):
            wanted = (table["kind"] == kind) & (table["block"] == block_name(recipe.block_of(kind)))
            wanted &= table["scaling"] == recipe.key
            if not wanted.any():
                recorded = ", ".join(sorted(set(table["block"])))
                raise RunError(
                    f"format={recipe.name!r} has a scale per {_per(recipe.block_of(kind))}, but the run recorded "
                    f"blocks of {recorded}; record it again with this version"
                )
            frames.append(_of_recipe(run, table[wanted & (table["nonzero"] > 0)], recipe, kind))
    frames = [frame for frame in frames if not frame.empty]
    if not frames:
        return pd.DataFrame(columns=COLUMNS)
    rows = pd.concat(frames, ignore_index=True)
    return _over_steps(rows)[COLUMNS]


def product_errors(predictions: pd.DataFrame) -> pd.DataFrame:
    """The error of each product of a linear layer, from `quantized`: name of the module, product, format, rel_error and
    rel_error_db. The errors of its two operands are independent, so their squares add up."""
    module = predictions["name"].where(predictions["kind"] != "weight", predictions["name"].str.rpartition(".")[0])
    squares = predictions.assign(name=module, squared=predictions["rel_error"] ** 2)
    sums = squares.groupby(["name", "product", "format"], sort=False, as_index=False)["squared"].agg(["sum", "size"])
    sums = sums[sums["size"] == 2]
    result = sums.assign(rel_error=np.sqrt(sums["sum"]))
    return result.assign(rel_error_db=_db(result["rel_error"].to_numpy()))[
        ["name", "product", "format", "rel_error", "rel_error_db"]
    ].reset_index(drop=True)


def _per(block: Block) -> str:
    name = block_name(block)
    return f"block of {name} values" if name.isdigit() else name


def _of_recipe(run: Run, rows: pd.DataFrame, recipe: Recipe, kind: str) -> pd.DataFrame:
    """The losses of one recipe and kind, from the rows of `blocks` with its scaling."""
    if rows.empty:
        return rows
    element = recipe.element_of(kind)
    amax = _history(run, recipe, rows) if recipe.history_steps else None
    losses = np.array(
        [
            _losses(row, recipe, element, _factors(recipe, row, None if amax is None else amax[i]))
            for i, row in enumerate(rows.itertuples())
        ]
    )
    frame = rows[["name", "kind", "product", "nonzero"]].assign(
        format=recipe.name,
        scaling=recipe.scaling,
        underflow_frac=losses[:, 0],
        underflow_mass_frac=losses[:, 1],
        saturated_frac=losses[:, 2],
        rel_error=losses[:, 3],
        mass=rows["abs_sum"],
        squares=rows["sq_sum"],
    )
    both = frame[frame["product"].isna()]
    if both.empty:
        return frame
    return pd.concat([frame[frame["product"].notna()], *(both.assign(product=p) for p in OPERANDS[kind])])


def _factors(recipe: Recipe, row: object, amax: float | None) -> list[tuple[float, Shares]]:
    """By what the recorded scaled values have to be multiplied, with the share of each bin's values for which."""
    own: float = row.absmax  # type: ignore[attr-defined]
    if amax is not None:
        return [(own / amax, 1.0)]
    if recipe.rule == "rceil":  # blocks whose amax is beyond the element's largest value get the next power of two
        same = np.where(recipe.top > _LOW, np.log2(recipe.top), 0.0)
        return [(1.0, same), (0.5, 1 - same)]
    if recipe.rule != "amax-pow2":
        return [(1.0, 1.0)]
    if recipe.by_tensor:
        exact = np.log2(recipe.element.max_value / own)
        return [(float(np.exp2(np.floor(exact) - exact)), 1.0)]
    return [(float(np.exp2(-(k + 0.5) / FACTORS)), 1 / FACTORS) for k in range(FACTORS)]


def _history(run: Run, recipe: Recipe, rows: pd.DataFrame) -> np.ndarray:
    """For each row the largest amax of the steps before it that delayed scaling remembers; its own where none is."""
    known = run.blocks.drop_duplicates(["step", "name", "kind"])
    steps, amax = known["step"].to_numpy(), known["absmax"].to_numpy()
    keys = (known["name"] + "\n" + known["kind"]).to_numpy()
    result = rows["absmax"].to_numpy(dtype=float).copy()
    mine = (rows["name"] + "\n" + rows["kind"]).to_numpy()
    for i, step in enumerate(rows["step"].to_numpy()):
        before = amax[(keys == mine[i]) & (steps < step) & (steps >= step - recipe.history_steps)]
        if before.size and before.max() > 0:
            result[i] = before.max()
    return result


def _losses(row: object, recipe: Recipe, element: Format, factors: list[tuple[float, Shares]]) -> tuple[float, ...]:
    """Shares of values that become 0, of their magnitudes, and of values that saturate; and the relative error."""
    counts, sums, squares, ties = (
        np.pad(np.asarray(getattr(row, name), dtype=float), (0, length - len(getattr(row, name))))
        for name, length in (("counts", BINS), ("top_sums", BINS), ("top_squares", BINS), ("ties", OCTAVES))
    )
    zero = mass = saturated = error = 0.0
    tied = np.zeros(BINS)
    tied[_LOWEST_OF_OCTAVE] = ties
    per_value = np.divide(sums, counts, out=np.zeros(BINS), where=counts > 0)
    grid = FORMAT_OF_DTYPE.get(str(row.dtype))  # type: ignore[attr-defined]
    by_power = recipe.scale.name == "e8m0"
    for factor, share in factors:
        bins = _bins(element, float(factor), recipe.scale, grid.mantissa_bits if grid and by_power else 23)
        zero += (share * ((counts - tied) * bins.zero + tied * bins.tie_zero)).sum()
        lost = (counts - tied) * bins.zero_mass + tied * bins.tie_zero * bins.tie
        mass += (share * per_value * lost).sum()
        saturated += (share * counts * bins.saturated).sum()
        error += (share * squares * bins.squared_error).sum()
        if recipe.scale.name not in (
            "e8m0",
            "fp32",
        ):  # scales are rounded up as often as down: as many of the largest lie below the top as above
            largest = min(squares[bins.above].sum(), squares[bins.below])
            error += largest * (bins.largest_error - bins.squared_error[bins.below])
    total = counts.sum()
    return (
        zero / total,
        min(mass / row.abs_sum, 1.0) if row.abs_sum > 0 else 0.0,  # type: ignore[attr-defined]
        saturated / total,
        float(np.sqrt(error / row.sq_sum)) if row.sq_sum > 0 else 0.0,  # type: ignore[attr-defined]
    )


def _edges() -> tuple[np.ndarray, np.ndarray]:
    """Lower and upper end of each bin, in tops."""
    fine = np.arange(EIGHTHS * FINE_OCTAVES)
    power = np.exp2(-(fine // EIGHTHS))
    low = power * (2 - (fine % EIGHTHS + 1) / EIGHTHS)
    coarse = np.exp2(-np.arange(FINE_OCTAVES, OCTAVES))
    return np.concatenate([low, coarse]), np.concatenate([low + power / EIGHTHS, 2 * coarse])


_LOW, _HIGH = _edges()
_LOWEST_OF_OCTAVE = np.concatenate(
    [EIGHTHS * np.arange(1, FINE_OCTAVES + 1) - 1, np.arange(EIGHTHS * FINE_OCTAVES, BINS)]
)
"""The bin that holds each octave's power of two."""


class _Bins:
    """What an element makes of the values in each bin, on average."""

    def __init__(self, element: Format, factor: float, scale: Format, mantissa_bits: int) -> None:
        top = 2.0**element.max_exponent
        ceiling = element.max_value / top
        self.above, self.below = ceiling <= _LOW, int(np.flatnonzero(ceiling - _HIGH >= 0)[0])
        beyond = _rounding_of(scale) * ceiling
        self.zero, self.zero_mass, self.saturated, self.squared_error = np.zeros((4, BINS))
        for i, (low, high) in enumerate(zip(_LOW, _HIGH, strict=True)):
            points = POINTS if i < EIGHTHS * FINE_OCTAVES else 2 * POINTS
            power = 2.0 ** np.floor(np.log2(low))
            steps = round((high - low) / power * 2.0**mantissa_bits)
            if self.above[i] and scale.name != "e8m0":  # only the largest of each block come here
                values = ceiling + beyond
            elif steps < points:  # the values of a narrow dtype that lie in the bin
                values = low + power * np.arange(steps) * 2.0**-mantissa_bits
            else:
                values = low + (high - low) * (np.arange(points) + 0.5) / points
            held = _held(values * factor * top, element) / (factor * top)
            self.squared_error[i] = np.square(held - values).mean()
            # An FP32 scale brings the largest value to the element's largest but for its own rounding.
            self.saturated[i] = (values * factor * top > element.max_value * (1 + 2.0**-20)).mean()
            others = values[values != power]  # ties are counted apart
            zeros = held[values != power] == 0
            self.zero[i] = zeros.mean() if len(others) else 0.0
            self.zero_mass[i] = (others * zeros).mean() if len(others) else 0.0
        largest = ceiling - beyond
        self.largest_error = float(np.square(_held(largest * factor * top, element) / (factor * top) - largest).mean())
        self.tie = np.exp2(np.floor(np.log2(_LOW)))
        self.tie_zero = (_held(self.tie * factor * top, element) == 0).astype(float)


_bins = functools.lru_cache(maxsize=256)(_Bins)


def _rounding_of(scale: Format) -> np.ndarray:
    """Relative errors that stand for those of rounding a scale to its format: up to half a unit of its mantissa."""
    steps = (np.arange(8) + 0.5) / 8
    errors: np.ndarray = np.outer(steps, 1 / (1 + steps)).ravel() * 2.0 ** -(scale.mantissa_bits + 1)
    return errors


def _held(values: np.ndarray, element: Format) -> np.ndarray:
    """Positive values rounded to the element, to nearest with ties to even, saturating."""
    values = np.minimum(values, element.max_value)
    unit = np.exp2(np.maximum(np.floor(np.log2(values)), element.min_normal_exponent) - element.mantissa_bits)
    rounded: np.ndarray = np.round(values / unit) * unit
    return rounded


def _over_steps(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of several steps together: shares weighted by what they are shares of."""
    weights = {"underflow_frac": "nonzero", "underflow_mass_frac": "mass", "saturated_frac": "nonzero"}
    # Each step counts alike in the error: gradients of later steps are smaller, not less important.
    products = {share: rows[share] * rows[weight] for share, weight in weights.items()}
    frame = rows.assign(**products, rel_error=rows["rel_error"] ** 2)
    keys = ["name", "kind", "product", "format", "scaling"]
    sums = dict.fromkeys((*weights, "nonzero", "mass", "squares"), "sum") | {"rel_error": "mean"}
    result = frame.groupby(keys, sort=False, as_index=False).agg(sums)
    for share, weight in weights.items():
        result[share] /= result[weight]
    result["rel_error"] = np.sqrt(result["rel_error"])
    return result.assign(rel_error_db=_db(result["rel_error"].to_numpy()))


def _db(error: np.ndarray) -> np.ndarray:
    """A relative error as the ratio of signal to noise, in dB."""
    with np.errstate(divide="ignore"):
        result: np.ndarray = -20 * np.log10(error)
    return result
