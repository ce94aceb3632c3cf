"""Histograms of true gradients on one axis of exponents: what every prediction is made from.

    found = true_counts(run, "weight_grad")
    found.counts @ flushed          # for each row the number of values in the exponents that `flushed` marks

A gradient recorded at loss scale S is divided by S. A scale that is no power of two moves octaves across each other:
with S = 2^(n + f), a value m · 2^e with m below 2^f comes to lie in octave e - n - 1, any other in e - n. Values are
taken to be spread evenly within their octave, so a share 2^f - 1 of each bin goes to the lower one.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from amp_core.analysis.numerics.ranges import EXPONENT_REACH, coded_names, float_column, rows_of_kind
from amp_core.formats import FORMATS
from amp_core.schema import RunError
from amp_core.store.run import Run

_FLOAT = 1000  # exponents that leave room for sums of many values in float64; float64 gradients alone go beyond
_AT_ONCE = 50_000  # rows expanded together, which bounds the memory
_BLOCK = 4_000  # rows of `blocks_of_steps`: what is made of them, 129 loss scales each, takes some tens of MB


@dataclass(frozen=True)
class TrueCounts:
    """Histograms of the true values of one kind: R rows by E exponents. A row is a tensor, or a tensor at a step."""

    names: list[str]
    """[R]"""
    steps: np.ndarray
    """[R] the step, where rows were asked for per step; else the last sampled step of the tensor."""
    low: int
    """Exponent of the first column."""
    counts: np.ndarray
    """[R, E] finite nonzero values; fractions where a loss scale was no power of two."""
    capped: np.ndarray
    """[R, E] the same, each value capped by its channel's largest output gradient where that was recorded."""
    absmax: np.ndarray
    """[R] largest true magnitude; what overflowed counts as the least that could not be held. 0 where unknown."""
    numel: np.ndarray
    """[R] elements of the tensor, the largest of all steps; 0 where unknown."""

    @property
    def exponents(self) -> np.ndarray:
        """[E] the exponent of each column."""
        return self.low + np.arange(self.counts.shape[1])

    @property
    def magnitudes(self) -> np.ndarray:
        """[R, E] sum of magnitudes of the values in each bin: 3/2 · 2^e is the mean of |x| over an octave."""
        magnitudes: np.ndarray = self.counts * np.ldexp(3 / 2, np.clip(self.exponents, -_FLOAT, _FLOAT))
        return magnitudes

    @property
    def squares(self) -> np.ndarray:
        """[R, E] sum of squares of the values in each bin: 7/3 · 4^e is the mean of x² spread evenly over an octave."""
        squares: np.ndarray = self.counts * np.ldexp(7 / 3, np.clip(2 * self.exponents, -_FLOAT, _FLOAT))
        return squares


def true_counts(run: Run, kind: str, step: int | None = None) -> TrueCounts:
    """The histograms of `kind` at the sampled step nearest at or before `step`, or of all sampled steps together: a row
    per tensor. Raises `RunError` for an unknown kind."""
    return counted(rows_of_kind(run, kind, step), narrowed=_narrowed(run, kind))


def blocks_of_steps(run: Run, kind: str, step: int | None = None, since: int | None = None) -> Iterator[TrueCounts]:
    """The same with a row for each tensor at each step, ordered by step: some steps at a time, so that a long run does
    not fill the memory. `since` leaves out the steps before it."""
    table = rows_of_kind(run, kind, step)
    if since is not None:
        table = table.filter(pc.greater_equal(table.column("step"), since))
    at = pc.fill_null(table.column("step"), 0).to_numpy()
    begins = np.concatenate([[0], np.flatnonzero(np.diff(at)) + 1, [len(at)]])
    start = 0
    while start < len(at):
        end = int(begins[np.searchsorted(begins, start + _BLOCK, side="right") - 1])
        if end <= start:  # one step alone is longer than a block
            end = int(begins[np.searchsorted(begins, start, side="right")])
        yield counted(table.slice(start, end - start), per_step=True, narrowed=_narrowed(run, kind))
        start = end


def counted(table: pa.Table, per_step: bool = False, as_stored: bool = False, narrowed: bool = False) -> TrueCounts:
    """The histograms of any rows of `tensors`. `as_stored`: not divided by the loss scale. `narrowed`: FP32 values
    have been FP16 before."""
    names, codes = coded_names(table)
    at = pc.fill_null(table.column("step"), 0).to_numpy()
    if per_step:
        different, rows = np.unique(np.stack([at, codes]), axis=1, return_inverse=True)
        rows = rows.reshape(-1)
        names, steps = [names[i] for i in different[1]], different[0]
    else:
        rows, steps = codes, np.zeros(len(names), dtype=np.int64)
        np.maximum.at(steps, rows, at)
    scale = np.ones(table.num_rows) if as_stored else float_column(table, "loss_scale")
    scale = np.where(np.isfinite(scale) & (scale > 0), scale, 1.0)
    mantissa, exponent = np.frexp(scale)  # the mantissa is in [0.5, 1): scale = 2 m · 2^(exponent - 1)
    below, shift = 2 * mantissa - 1, exponent.astype(np.int64) - 1
    plain = _Bins.of(table, "exp", shift, below)
    capped = _Bins.of(table, "capped", shift, below)
    exponents = np.concatenate([plain.exponent, capped.exponent])
    low, high = (int(exponents.min()), int(exponents.max())) if len(exponents) else (0, 0)
    if low < -EXPONENT_REACH or high > EXPONENT_REACH:
        raise RunError(
            f"tensors has exponents from {low} to {high}; they run from {-EXPONENT_REACH} to {EXPONENT_REACH}"
        )
    shape = len(names), high - low + 1
    uncapped = pc.is_null(table.column("capped_counts")).to_numpy()
    return TrueCounts(
        names=names,
        steps=steps,
        low=low,
        counts=plain.matrix(rows, low, shape),
        capped=capped.matrix(rows, low, shape) + plain.matrix(rows, low, shape, only=uncapped),
        absmax=_largest(_true_absmax(table, scale, narrowed), rows, len(names)),
        numel=_largest(np.nan_to_num(float_column(table, "numel")), rows, len(names)),
    )


@dataclass(frozen=True)
class _Bins:
    """The bins of all rows of a table that have values in them, one after another."""

    row: np.ndarray
    exponent: np.ndarray
    count: np.ndarray

    @classmethod
    def of(cls, table: pa.Table, which: str, shift: np.ndarray, below: np.ndarray) -> "_Bins":
        """The histogram columns `exp` or `capped`, by true exponent."""
        column = table.column(f"{which}_counts")
        bins = pc.fill_null(pc.list_value_length(column), 0).to_numpy().astype(np.int64)
        first = pc.fill_null(table.column(f"{which}_min"), 0).to_numpy().astype(np.int64) - shift
        parts = [(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0))]
        for start in range(0, table.num_rows, _AT_ONCE):
            some = bins[start : start + _AT_ONCE]
            row = np.repeat(np.arange(len(some)), some)
            place = np.arange(len(row)) - np.repeat(np.cumsum(some) - some, some)
            values = pc.list_flatten(column.slice(start, _AT_ONCE).combine_chunks())
            count = pc.fill_null(values, 0).to_numpy(zero_copy_only=False).astype(float)
            there = np.flatnonzero(count)
            row, place, count = row[there] + start, place[there], count[there]
            exponent, share = first[row] + place, below[row]
            parts.append((row, exponent, count * (1 - share)))
            split = np.flatnonzero(share)
            parts.append((row[split], exponent[split] - 1, (count * share)[split]))
        return cls(*(np.concatenate(column) for column in zip(*parts, strict=True)))

    def matrix(self, rows: np.ndarray, low: int, shape: tuple[int, int], only: np.ndarray | None = None) -> np.ndarray:
        """Counts by row of the result, which `rows` gives for each row of the table, and exponent."""
        count = self.count if only is None else self.count * only[self.row]
        cell = rows[self.row] * shape[1] + self.exponent - low
        return np.bincount(cell, weights=count, minlength=shape[0] * shape[1]).reshape(shape)


def _true_absmax(table: pa.Table, scale: np.ndarray, narrowed: bool) -> np.ndarray:
    """For each row of the table the largest true magnitude that it tells of."""
    absmax = np.nan_to_num(float_column(table, "absmax"), posinf=0.0, neginf=0.0)
    burst = (np.nan_to_num(float_column(table, "inf")) > 0) | (np.nan_to_num(float_column(table, "nan")) > 0)
    if burst.any():
        # What overflowed was at least as large as what its format cannot hold; of its true size nothing more is known.
        # Under FP16 autocast a weight gradient is FP32 and was FP16 before.
        limits = {str(f.dtype): f.overflow_threshold for f in FORMATS.values() if not f.has_fp32_range}
        limits |= {"float32": limits["float16"]} if narrowed else {}
        limit = np.array([limits.get(d, 0.0) for d in table.column("dtype").to_pylist()])
        absmax = np.where(burst, np.maximum(absmax, limit), absmax)
    largest: np.ndarray = absmax / scale
    return largest


def _largest(values: np.ndarray, rows: np.ndarray, count: int) -> np.ndarray:
    found = np.zeros(count)
    np.maximum.at(found, rows, values)
    return found


def _narrowed(run: Run, kind: str) -> bool:
    """Whether FP32 values of this kind were FP16 before: under autocast weight gradients leave their product so."""
    return kind == "weight_grad" and run.head.config.get("autocast_dtype") == "float16"
