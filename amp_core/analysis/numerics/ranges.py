"""Number ranges: the values of each tensor by exponent and by class.

>>> exponent_shares(run, "output_grad")  # name, exponent, share
>>> exponent_shares(run, "output_grad", true_exponents=True)  # the gradient without the loss scale
>>> class_shares(run, "weight_grad", step=100)

Exponent e covers magnitudes from 2^e to below 2^(e+1). Values are as stored, that is multiplied by the loss scale of
their step. Zero is a class of its own and not underflow: only a nonzero value can underflow.
"""

from collections.abc import Iterator

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from amp_core.schema import KINDS, RunError
from amp_core.store.run import Run

CLASSES = ("zero", "subnormal", "normal", "inf", "nan")
_CHUNK_ROWS = 50_000  # bounds the memory of the expanded histograms to some tens of MB
EXPONENT_REACH = 6000  # max |exponent|: float64 up to 1100, a histogram of 4,096 bins, and the shift by a scale


def kinds_present(run: Run) -> list[str]:
    """The kinds of tensors in the run, in the order of `amp_core.schema.KINDS`."""
    present = set(pc.unique(run.table("tensors").column("kind")).to_pylist())
    return [k for k in KINDS if k in present]


def sampled_steps(run: Run, kind: str) -> list[int]:
    """Steps at which tensors of `kind` were sampled, in order. Raises `RunError` for an unknown kind."""
    steps = pc.unique(run.table("tensors").column("step").filter(is_of_kind(run, kind))).to_pylist()
    return sorted(s for s in steps if s is not None)


def exponent_shares(run: Run, kind: str, step: int | None = None, true_exponents: bool = False) -> pd.DataFrame:
    """Share (0–1) of each tensor's finite nonzero values per exponent: name, exponent, share, count.

    Args:
        kind: one of `amp_core.schema.KINDS`.
        step: the last sampled step at or before this one; None combines all sampled steps.
        true_exponents: divide by the loss scale of each row first. A scale that is not a power of two shifts the
            histogram by the nearest whole exponent.

    Rows are by tensor in the run's order (output gradients: from the last layer to the
    first), then by exponent, only where there are values; a tensor with only zeros or non-finite values has none.
    Raises `RunError` for an unknown kind.
    """
    table = rows_of_kind(run, kind, step)
    names, codes = coded_names(table)
    first, bins = histogram_bounds(table, true_exponents)
    nonempty = bins > 0
    low = int(first[nonempty].min()) if nonempty.any() else 0
    high = int((first + bins)[nonempty].max()) if nonempty.any() else 1
    counts = np.zeros((len(names), high - low))
    for row, place, count in filled_bins(table):
        cell = codes[row] * counts.shape[1] + first[row] + place - low
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
    """The five classes of each tensor as shares (0–1) of its elements, and its magnitudes.

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
        maxima = np.full(len(names), -np.inf)
        np.fmax.at(maxima, codes, values)
        return np.where(np.isfinite(maxima), maxima, np.nan)

    numel = float_column(table, "numel")
    counted = total(numel)
    classes = {c: float_column(table, c) for c in CLASSES}
    finite = classes["zero"] + classes["subnormal"] + classes["normal"]
    first = np.unique(codes, return_index=True)[1]
    dtypes = pd.Series(table.column("dtype").take(pa.array(first)).to_pylist(), dtype="str")
    with np.errstate(invalid="ignore", divide="ignore"):
        fractions = {f"{name}_frac": total(values) / counted for name, values in classes.items()}
        squares = float_column(table, "rms") ** 2
        known = ~np.isnan(squares)
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
    """Which rows of `tensors` are of a kind. Raises `RunError` for an unknown kind."""
    if kind not in KINDS:
        raise RunError(f"kind={kind!r} is unknown; choose one of {', '.join(KINDS)}")
    return pc.equal(run.table("tensors").column("kind"), kind)


def rows_of_kind(run: Run, kind: str, step: int | None) -> pa.Table:
    """The rows of one kind: of the last sampled step at or before `step`, or all."""
    table, chosen = run.table("tensors"), is_of_kind(run, kind)
    if step is not None:  # filter before copying, since rows are wide
        steps = table.column("step")
        nearest = pc.max(steps.filter(pc.and_(chosen, pc.less_equal(steps, step))))
        chosen = pc.and_(chosen, pc.equal(steps, nearest))
    return table.filter(chosen)


def coded_names(table: pa.Table) -> tuple[list[str], np.ndarray]:
    """Distinct names in order of appearance, and for each row the index of its name."""
    coded = table.column("name").combine_chunks().dictionary_encode()
    return coded.dictionary.to_pylist(), coded.indices.to_numpy(zero_copy_only=False).astype(np.int64)


def histogram_bounds(table: pa.Table, true_exponents: bool) -> tuple[np.ndarray, np.ndarray]:
    """The first exponent of each row's histogram, and its number of bins."""
    bins = _bin_counts(table.column("exp_counts"))
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


def filled_bins(table: pa.Table, which: str = "exp") -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """The bins of the histograms `exp` or `capped` that hold values, some rows at a time: [B] row in the table, [B]
    index in the row's histogram, [B] number of values as float64."""
    column = table.column(f"{which}_counts")
    bins = _bin_counts(column)
    for start in range(0, max(1, table.num_rows), _CHUNK_ROWS):
        length = bins[start : start + _CHUNK_ROWS]
        row = np.repeat(np.arange(start, start + len(length)), length)
        place = np.arange(len(row)) - np.repeat(np.cumsum(length) - length, length)
        count = pc.fill_null(pc.list_flatten(column.slice(start, _CHUNK_ROWS).combine_chunks()), 0)
        count = count.to_numpy(zero_copy_only=False).astype(float)
        filled = np.flatnonzero(count)
        yield row[filled], place[filled], count[filled]


def _bin_counts(histograms: pa.ChunkedArray) -> np.ndarray:
    """The number of bins of each row's histogram; 0 where it has none."""
    counts: np.ndarray = pc.fill_null(pc.list_value_length(histograms), 0).to_numpy().astype(np.int64)
    return counts


def float_column(table: pa.Table, column: str) -> np.ndarray:
    """A column as float64, null as NaN."""
    values: np.ndarray = pc.cast(table.column(column), pa.float64(), safe=False).to_numpy()
    return values
