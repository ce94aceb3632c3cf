"""Histograms of true gradients on one axis of exponents: the input of every prediction.

    histograms = true_counts(run, "weight_grad")
    histograms.counts @ flushed     # for each row the number of values in the exponents that `flushed` marks

A gradient recorded at loss scale S is divided by S. If S is not a power of two, octaves do not map onto octaves: with
S = 2^(n + f), a value m · 2^e with m below 2^f falls into octave e - n - 1, any other into e - n. Values are assumed
uniform within their octave, so a share 2^f - 1 of each bin goes to the lower one.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from amp_core.analysis.numerics.ranges import EXPONENT_REACH, coded_names, filled_bins, float_column, rows_of_kind
from amp_core.formats import FORMATS
from amp_core.schema import RunError
from amp_core.store.run import Run

_MAX_EXPONENT = 1000  # leaves room for sums of many values in float64; only float64 gradients exceed it
_BLOCK_ROWS = 4_000  # rows of `blocks_of_steps`: the 129 loss scales of each take some tens of MB


@dataclass(frozen=True)
class TrueCounts:
    """Histograms of the true values of one kind: R rows by E exponents. A row is a tensor, or a tensor at a step."""

    names: list[str]
    """[R]"""
    steps: np.ndarray
    """[R] the step, with rows per step; else the last sampled step of the tensor."""
    low: int
    """Exponent of the first column."""
    counts: np.ndarray
    """[R, E] number of finite nonzero values; fractions where a loss scale was not a power of two."""
    capped: np.ndarray
    """[R, E] the same, each value capped by its channel's largest output gradient where that was recorded."""
    absmax: np.ndarray
    """[R] largest true magnitude; overflowed values count as the overflow threshold. 0 where unknown."""
    numel: np.ndarray
    """[R] elements of the tensor, the largest of all steps; 0 where unknown."""

    @property
    def exponents(self) -> np.ndarray:
        """[E] the exponent of each column."""
        return self.low + np.arange(self.counts.shape[1])

    @property
    def magnitudes(self) -> np.ndarray:
        """[R, E] sum of magnitudes of the values in each bin: the mean of |x| over an octave is 3/2 · 2^e."""
        magnitudes: np.ndarray = self.counts * np.ldexp(3 / 2, np.clip(self.exponents, -_MAX_EXPONENT, _MAX_EXPONENT))
        return magnitudes

    @property
    def squares(self) -> np.ndarray:
        """[R, E] sum of squares of the values in each bin: the mean of x² over an octave is 7/3 · 4^e."""
        squares: np.ndarray = self.counts * np.ldexp(7 / 3, np.clip(2 * self.exponents, -_MAX_EXPONENT, _MAX_EXPONENT))
        return squares


def true_counts(run: Run, kind: str, step: int | None = None) -> TrueCounts:
    """The histograms of `kind` at the sampled step nearest at or before `step`, or of all sampled steps together: a row
    per tensor. Raises `RunError` for an unknown kind."""
    return count_values(rows_of_kind(run, kind, step), narrowed=_narrowed(run, kind))


def blocks_of_steps(run: Run, kind: str, step: int | None = None, since: int | None = None) -> Iterator[TrueCounts]:
    """The same with a row per tensor and step, ordered by step, in blocks of steps, so that a long run does
    not fill the memory. `since` excludes earlier steps."""
    table = rows_of_kind(run, kind, step)
    if since is not None:
        table = table.filter(pc.greater_equal(table.column("step"), since))
    at = pc.fill_null(table.column("step"), 0).to_numpy()
    begins = np.concatenate([[0], np.flatnonzero(np.diff(at)) + 1, [len(at)]])
    start = 0
    while start < len(at):
        end = int(begins[np.searchsorted(begins, start + _BLOCK_ROWS, side="right") - 1])
        if end <= start:  # a single step is longer than a block
            end = int(begins[np.searchsorted(begins, start, side="right")])
        yield count_values(table.slice(start, end - start), per_step=True, narrowed=_narrowed(run, kind))
        start = end


def count_values(
    table: pa.Table, per_step: bool = False, as_stored: bool = False, narrowed: bool = False
) -> TrueCounts:
    """The histograms of any rows of `tensors`. `as_stored`: not divided by the loss scale. `narrowed`: FP32 values
    were FP16 before."""
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
    plain = _Bins.read(table, "exp", shift, below)
    capped = _Bins.read(table, "capped", shift, below)
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
    """The nonempty bins of all rows of a table, flattened."""

    row: np.ndarray
    exponent: np.ndarray
    count: np.ndarray

    @classmethod
    def read(cls, table: pa.Table, which: str, shift: np.ndarray, below: np.ndarray) -> "_Bins":
        """The histogram columns `exp` or `capped`, by true exponent."""
        first = pc.fill_null(table.column(f"{which}_min"), 0).to_numpy().astype(np.int64) - shift
        parts = [(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0))]
        for row, place, count in filled_bins(table, which):
            exponent, share = first[row] + place, below[row]
            parts.append((row, exponent, count * (1 - share)))
            split = np.flatnonzero(share)
            parts.append((row[split], exponent[split] - 1, (count * share)[split]))
        return cls(*(np.concatenate(column) for column in zip(*parts, strict=True)))

    def matrix(self, rows: np.ndarray, low: int, shape: tuple[int, int], only: np.ndarray | None = None) -> np.ndarray:
        """Counts by row of the result and exponent; `rows` maps rows of the table to rows of the result."""
        count = self.count if only is None else self.count * only[self.row]
        cell = rows[self.row] * shape[1] + self.exponent - low
        return np.bincount(cell, weights=count, minlength=shape[0] * shape[1]).reshape(shape)


def _true_absmax(table: pa.Table, scale: np.ndarray, narrowed: bool) -> np.ndarray:
    """The largest true magnitude in each row of the table."""
    absmax = np.nan_to_num(float_column(table, "absmax"), posinf=0.0, neginf=0.0)
    overflowed = (np.nan_to_num(float_column(table, "inf")) > 0) | (np.nan_to_num(float_column(table, "nan")) > 0)
    if overflowed.any():
        # An overflowed value was at least the overflow threshold of its format; nothing more is known of its size.
        # Under FP16 autocast a weight gradient is FP32 and was FP16 before.
        limits = {str(f.dtype): f.overflow_threshold for f in FORMATS.values() if not f.has_fp32_range}
        limits |= {"float32": limits["float16"]} if narrowed else {}
        limit = np.array([limits.get(d, 0.0) for d in table.column("dtype").to_pylist()])
        absmax = np.where(overflowed, np.maximum(absmax, limit), absmax)
    largest: np.ndarray = absmax / scale
    return largest


def _largest(values: np.ndarray, rows: np.ndarray, count: int) -> np.ndarray:
    largest = np.zeros(count)
    np.maximum.at(largest, rows, values)
    return largest


def _narrowed(run: Run, kind: str) -> bool:
    """Whether FP32 values of this kind were FP16 before: under autocast weight gradients leave their product so."""
    return kind == "weight_grad" and run.head.config.get("autocast_dtype") == "float16"
