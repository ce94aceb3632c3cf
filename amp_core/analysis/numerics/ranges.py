"""Number ranges: where the values of each tensor lie on the axis of exponents, and in which class of the format.

>>> exponent_shares(run, "output_grad")  # name, exponent, share
>>> exponent_shares(run, "output_grad", true_exponents=True)  # the gradient without the loss scale
>>> class_shares(run, "weight_grad", step=100)

Exponent e holds magnitudes from 2^e to below 2^(e+1). Values are as stored, that is multiplied by the loss scale of
their step. Zero is a class of its own and no underflow: only a value that was nonzero can underflow.
"""

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from amp_core.schema import KINDS, RunError
from amp_core.store.run import Run

CLASSES = ("zero", "subnormal", "normal", "inf", "nan")
_ROWS_AT_ONCE = 50_000  # bounds the memory of the expanded histograms to some tens of MB
EXPONENT_REACH = 6000  # |exponent|: float64 has none beyond 1100, a histogram 4,096 bins, and a scale shifts by its own


def kinds_present(run: Run) -> list[str]:
    """The kinds that the run has rows of, in the order of `amp_core.schema.KINDS`."""
    found = set(pc.unique(run.table("tensors").column("kind")).to_pylist())
    return [k for k in KINDS if k in found]


def sampled_steps(run: Run, kind: str) -> list[int]:
    """Steps at which tensors of `kind` were sampled, in order. Raises `RunError` for an unknown kind."""
    steps = pc.unique(run.table("tensors").column("step").filter(is_of_kind(run, kind))).to_pylist()
    return sorted(s for s in steps if s is not None)


def exponent_shares(run: Run, kind: str, step: int | None = None, true_exponents: bool = False) -> pd.DataFrame:
    """Share (0–1) of each tensor's finite nonzero values per exponent: name, exponent, share, count.

    Args:
        kind: one of `amp_core.schema.KINDS`.
        step: the sampled step nearest at or before this one; None takes all sampled steps together.
        true_exponents: divide by the loss scale of each row first. A scale that is no power of two moves the
            histogram by the nearest whole exponent.

    Rows come tensor by tensor in the order in which the run has them (output gradients: from the last layer to the
    first), exponents rising, only where there are values; a tensor of zeros or non-finite values alone has none.
    Raises `RunError` for an unknown kind.
    """
    table = rows_of_kind(run, kind, step)
    names, codes = coded_names(table)
    first, bins = histogram_bounds(table, true_exponents)
    there = bins > 0
    low = int(first[there].min()) if there.any() else 0
    high = int((first + bins)[there].max()) if there.any() else 1
    counts = np.zeros((len(names), high - low))
    for start in range(0, table.num_rows, _ROWS_AT_ONCE):
        some = slice(start, start + _ROWS_AT_ONCE)
        row = np.repeat(np.arange(len(bins[some])), bins[some])
        place = np.arange(len(row)) - np.repeat(np.cumsum(bins[some]) - bins[some], bins[some])
        count = pc.list_flatten(table.slice(start, _ROWS_AT_ONCE).column("exp_counts").combine_chunks())
        count = pc.fill_null(count, 0).to_numpy(zero_copy_only=False)
        cell = codes[some][row] * counts.shape[1] + first[some][row] + place - low
        counts += np.bincount(cell, weights=count, minlength=counts.size).reshape(counts.shape)
    name, column = np.nonzero(counts)
    values = counts[name, column]
    return pd.DataFrame(
        {
            "name": pd.Series(np.asarray(names, dtype=object)[name], dtype="str"),
            "exponent": column + low,
            "share": values / counts.sum(axis=1)[name],
            "count": values.astype(np.int64),
        }
    )


def class_shares(run: Run, kind: str, step: int | None = None) -> pd.DataFrame:
    """Per tensor the five classes as shares (0–1) of all its elements, and how large its values are.

    Columns: name; dtype; numel (of the tensor); counted (elements counted, over all rows taken); zero_frac,
    subnormal_frac, normal_frac, inf_frac, nan_frac (of `counted`; they add up to 1); absmax (largest finite
    magnitude); rms (of the finite values); exp_low, exp_high (lowest and highest exponent with a value in it). NaN
    where not recorded. Magnitudes and exponents are as stored: multiplied by the loss scale. `step` as in
    `exponent_shares`; the order is the run's. Raises `RunError` for an unknown kind.
    """
    table = rows_of_kind(run, kind, step)
    names, codes = coded_names(table)

    def total(values: np.ndarray) -> np.ndarray:
        return np.bincount(codes, weights=values, minlength=len(names))

    def largest(values: np.ndarray) -> np.ndarray:
        found = np.full(len(names), -np.inf)
        np.fmax.at(found, codes, values)
        return np.where(np.isfinite(found), found, np.nan)

    numel = float_column(table, "numel")
    counted = total(numel)
    classes = {c: float_column(table, c) for c in CLASSES}
    finite = classes["zero"] + classes["subnormal"] + classes["normal"]
    first = np.unique(codes, return_index=True)[1]
    dtypes = pd.Series(table.column("dtype").take(pa.array(first)).to_pylist(), dtype="str")
    with np.errstate(invalid="ignore", divide="ignore"):
        fractions = {f"{name}_frac": total(values) / counted for name, values in classes.items()}
        squares = float_column(table, "rms") ** 2
        known = ~np.isnan(squares)  # a row without it says nothing of how large its values are
        rms = np.sqrt(total(np.where(known, squares * finite, 0)) / total(np.where(known, finite, 0)))
    exponents = exponent_shares(run, kind, step).groupby("name")["exponent"]
    return pd.DataFrame(
        {"name": pd.Series(names, dtype="str"), "dtype": dtypes, "numel": largest(numel), "counted": counted}
        | fractions
        | {
            "absmax": largest(float_column(table, "absmax")),
            "rms": rms,
            "exp_low": exponents.min().reindex(names).to_numpy(dtype=np.float64),
            "exp_high": exponents.max().reindex(names).to_numpy(dtype=np.float64),
        }
    )


def is_of_kind(run: Run, kind: str) -> pa.ChunkedArray:
    """Which rows of `tensors` are of that kind. Raises `RunError` for an unknown one."""
    if kind not in KINDS:
        raise RunError(f"kind={kind!r} is unknown; choose one of {', '.join(KINDS)}")
    return pc.equal(run.table("tensors").column("kind"), kind)


def rows_of_kind(run: Run, kind: str, step: int | None) -> pa.Table:
    """The rows of one kind: of the sampled step nearest at or before `step`, or all."""
    table, chosen = run.table("tensors"), is_of_kind(run, kind)
    if step is not None:  # rows are wide: those of the other steps are not copied
        steps = table.column("step")
        nearest = pc.max(steps.filter(pc.and_(chosen, pc.less_equal(steps, step))))
        chosen = pc.and_(chosen, pc.equal(steps, nearest))
    return table.filter(chosen)


def coded_names(table: pa.Table) -> tuple[list[str], np.ndarray]:
    """Distinct names in order of appearance, and for each row the number of its name."""
    coded = table.column("name").combine_chunks().dictionary_encode()
    return coded.dictionary.to_pylist(), coded.indices.to_numpy(zero_copy_only=False).astype(np.int64)


def histogram_bounds(table: pa.Table, true_exponents: bool) -> tuple[np.ndarray, np.ndarray]:
    """For each row the exponent that its histogram begins with, and the number of bins."""
    bins = pc.fill_null(pc.list_value_length(table.column("exp_counts")), 0).to_numpy().astype(np.int64)
    first = pc.fill_null(table.column("exp_min"), 0).to_numpy().astype(np.int64)
    if true_exponents:
        scale = float_column(table, "loss_scale")
        known = np.isfinite(scale) & (scale > 0)
        first = first - np.rint(np.log2(np.where(known, scale, 1.0))).astype(np.int64)
    beyond = (bins > 0) & ((first < -EXPONENT_REACH) | (first + bins > EXPONENT_REACH))
    if beyond.any():
        raise RunError(
            f"tensors has exp_min={first[beyond][0]}; exponents run from {-EXPONENT_REACH} to {EXPONENT_REACH}"
        )
    return first, bins


def float_column(table: pa.Table, column: str) -> np.ndarray:
    """A column as float64, null as NaN."""
    values: np.ndarray = pc.cast(table.column(column), pa.float64(), safe=False).to_numpy()
    return values
