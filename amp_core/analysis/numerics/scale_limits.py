"""The loss scales between which each gradient is safe in a format, and all of them together at each step.

    safe = limits(run, FORMATS["fp16"], MAX_ERROR)
    safe.steps, safe.lowest, safe.highest      # per sampled step, log2 of the loss scale
    safe.tensors                               # per tensor, over all steps

`safe_window` describes the method. Observations bound the predictions: a step made at a scale did not overflow there,
and a skipped step shows that its scale was too high. Of a step whose gradients were not finite only the values that
survived were counted, so nothing is predicted from it if another step was sampled.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from amp_core.analysis.numerics.histograms import TrueCounts, blocks_of_steps, true_counts
from amp_core.analysis.numerics.loss_scale import skip_episodes
from amp_core.analysis.numerics.rounded_gradients import Rounding
from amp_core.analysis.numerics.what_if import GRADIENTS
from amp_core.analysis.steps import attempts, autocast_dtype
from amp_core.formats import Format
from amp_core.store.run import Run

LOG2_SCALES = np.arange(-64, 65)
"""The loss scales that are evaluated; none beyond them is used in practice."""

PARTIAL_SUM_OCTAVES = 0.5
"""Margin in octaves below overflow: within a matrix product or convolution a partial sum may exceed the result,
and kernels that keep it in FP16 overflow. Audits did so a quarter of an octave below the limit."""

NOISE_RATIO = 2.0**-22
"""Root mean square, relative to the largest of a step, below which a weight gradient is FP32 rounding error."""


@dataclass(frozen=True)
class Limits:
    """Limits as log2 of the loss scale. At least one tensor per step; empty if no gradient was recorded."""

    steps: np.ndarray
    lowest: np.ndarray
    """[S] lowest scale at which the errors of all tensors together are within the limit."""
    highest: np.ndarray
    """[S] highest scale at which no tensor overflows, up to the next of these steps."""
    lowest_by: list[str]
    highest_by: list[str]
    tensors: pd.DataFrame
    """name, kind, lowest_log2, highest_log2: of each rounded gradient alone, over these steps. The lowest is -inf
    where the error does not count: for a bias, or for noise."""


def limits(run: Run, form: Format, max_error: float, step: int | None = None, since: int | None = None) -> Limits:
    """Limits of every gradient that autocast rounds, at every sampled step (from `since` on), or at the last one at
    or before `step`. `max_error` is the relative error up to which a loss scale is safe."""
    rounding = Rounding(run)
    outputs = true_counts(run, "output_grad", step)
    numel = dict(zip(outputs.names, outputs.numel, strict=True))
    by_step: dict[int, _StepLimits] = {}
    per_tensor: dict[tuple[str, str], tuple[float, float]] = {}
    unusable = _nonfinite_steps(run, step, since)
    for kind in GRADIENTS:
        for block in blocks_of_steps(run, kind, step, since):
            names = sorted(set(block.names))
            rounded = dict(zip(names, rounding.is_rounded(kind, names), strict=True))
            known = ~np.isin(block.steps, unusable)
            rows = _select_rows(block, known & np.array([rounded[n] for n in block.names], dtype=bool))
            if kind == "weight_grad":
                matrix = dict(zip(names, rounding.matrices(names), strict=True))
                hidden = dict(zip(names, rounding.hidden_octaves(names, numel), strict=True))
                counts_error = np.array([matrix[n] for n in rows.names], dtype=bool) & ~_noise(rows)
                octaves = np.array([hidden[n] for n in rows.names], dtype=np.int64)
            else:
                counts_error = np.ones(len(rows.names), dtype=bool)
                octaves = np.zeros(len(rows.names), dtype=np.int64)
            errors = error_squares(form, rows)
            errors[~counts_error] = 0.0
            # The error that propagates is that of the 16-bit gradient that a weight gradient is computed from.
            places = np.clip(np.arange(len(LOG2_SCALES)) - octaves[:, None], 0, len(LOG2_SCALES) - 1)
            propagated = np.take_along_axis(errors, places, axis=1) * (octaves >= 0)[:, None]
            lowest = _first_within(np.maximum(errors, propagated), max_error)
            highest = _highest(form, rows.absmax)
            _add_block(by_step, rows, errors, propagated, np.where(counts_error, lowest, -np.inf), highest)
            for name, low, high, counts in zip(rows.names, lowest, highest, counts_error, strict=True):
                before = per_tensor.get((name, kind), (-np.inf, np.inf))
                per_tensor[name, kind] = max(before[0], low if counts else -np.inf), min(before[1], high)
    steps = sorted(at for at, of_step in by_step.items() if of_step.highest < np.inf)
    # Both the sum of errors and each tensor's own error must be within the limit.
    worst = np.array([np.maximum(by_step[s].sum, by_step[s].worst) for s in steps]).reshape(-1, len(LOG2_SCALES))
    highest, highest_by = _observed(
        run,
        form,
        np.array(steps, dtype=np.int64),
        np.array([by_step[s].highest for s in steps]),
        [by_step[s].highest_by for s in steps],
    )
    return Limits(
        steps=np.array(steps, dtype=np.int64),
        lowest=_first_within(worst, max_error),
        highest=highest,
        lowest_by=[by_step[s].lowest_by or by_step[s].highest_by for s in steps],
        highest_by=highest_by,
        tensors=pd.DataFrame(
            [(*key, *ends) for key, ends in per_tensor.items()], columns=["name", "kind", "lowest_log2", "highest_log2"]
        ),
    )


def _nonfinite_steps(run: Run, step: int | None, since: int | None) -> np.ndarray:
    """Sampled steps with a gradient that was not finite; empty if there are no others to predict from."""
    table = run.table("tensors").select(["step", "kind", "inf", "nan"])
    table = table.filter(pc.is_in(table.column("kind"), pa.array(GRADIENTS)))
    at = pc.fill_null(table.column("step"), 0).to_numpy()
    bad = pc.greater(pc.add(pc.fill_null(table.column("inf"), 0), pc.fill_null(table.column("nan"), 0)), 0).to_numpy()
    sampled = at >= (since if since is not None else at.min(initial=0))
    if step is not None:
        sampled = at == at[at <= step].max(initial=-1)
    unusable = np.unique(at[sampled & bad])
    return unusable if len(unusable) < len(np.unique(at[sampled])) else unusable[:0]


def _observed(
    run: Run, form: Format, steps: np.ndarray, highest: np.ndarray, highest_by: list[str]
) -> tuple[np.ndarray, list[str]]:
    """`highest` and `highest_by`, bounded by the steps that the run made and skipped in this format."""
    if autocast_dtype(run) != form.dtype or not len(steps):
        return highest, highest_by
    frame = attempts(run)
    made = frame[frame["step"].isin(steps) & ~frame["skipped"] & (frame["loss_scale"] > 0)]
    held = np.floor(np.log2(made["loss_scale"].to_numpy()))
    at = np.searchsorted(steps, made["step"].to_numpy())
    highest = highest.copy()
    highest[at] = np.maximum(highest[at], held)
    highest_by = list(highest_by)
    episodes = skip_episodes(run)
    # A scale below 1, or one that never fell low enough, is not the reason for an overflow.
    episodes = episodes[(episodes["origin"] != "forward") & (episodes["scale_after"] >= 1)]
    begin = np.searchsorted(steps[1:], episodes["first"].to_numpy(), side="right")
    end = np.searchsorted(steps, episodes["last"].to_numpy(), side="right")
    bounds = np.floor(np.log2(np.minimum(episodes["scale_after"], episodes["scale_before"] / 2)))
    for i, j, bound, tensors in zip(begin, end, bounds, episodes["tensors"], strict=True):
        for place in (k for k in range(i, j) if highest[k] > bound):
            highest[place] = bound
            highest_by[place] = tensors.partition(", ")[0] or highest_by[place]
    return highest, highest_by


class _StepLimits:
    """The combined limits of the tensors of one step."""

    def __init__(self) -> None:
        self.sum = np.zeros(len(LOG2_SCALES))
        self.worst = np.zeros(len(LOG2_SCALES))
        self.needed = -np.inf
        self.lowest_by = ""
        self.highest = np.inf
        self.highest_by = ""


def _add_block(
    by_step: dict[int, _StepLimits],
    block: TrueCounts,
    errors: np.ndarray,
    propagated: np.ndarray,
    lowest: np.ndarray,
    highest: np.ndarray,
) -> None:
    """Add the rows of a block, ordered by step. `lowest` is -inf where the error does not count."""
    if not len(block.steps):
        return
    at, begins = np.unique(block.steps, return_index=True)
    sums, worst = np.add.reduceat(propagated, begins, axis=0), np.maximum.reduceat(errors, begins, axis=0)
    needs, tops = _first_smallest(-lowest, begins), _first_smallest(highest, begins)
    for i, step in enumerate(at.tolist()):
        limits, need, top = by_step.setdefault(step, _StepLimits()), needs[i], tops[i]
        limits.sum += sums[i]
        np.maximum(limits.worst, worst[i], out=limits.worst)
        if lowest[need] > limits.needed:
            limits.needed, limits.lowest_by = float(lowest[need]), block.names[need]
        if highest[top] < limits.highest:
            limits.highest, limits.highest_by = float(highest[top]), block.names[top]


def _first_smallest(values: np.ndarray, begins: np.ndarray) -> np.ndarray:
    """Index of the first smallest value in each group of rows, ignoring NaN, which an untrusted file may hold."""
    values = np.where(np.isnan(values), np.inf, values)
    group = np.repeat(np.arange(len(begins)), np.diff(np.append(begins, len(values))))
    smallest = np.flatnonzero(values == np.minimum.reduceat(values, begins)[group])
    places: np.ndarray = smallest[np.unique(group[smallest], return_index=True)[1]]
    return places


def _select_rows(block: TrueCounts, keep: np.ndarray) -> TrueCounts:
    """The rows in `keep` that have nonzero values."""
    keep = keep & ((block.counts.sum(axis=1) > 0) | (block.absmax > 0))
    return TrueCounts(
        names=[n for n, k in zip(block.names, keep, strict=True) if k],
        steps=block.steps[keep],
        low=block.low,
        counts=block.counts[keep],
        capped=block.capped[keep],
        absmax=block.absmax[keep],
        numel=block.numel[keep],
    )


def error_squares(form: Format, block: TrueCounts) -> np.ndarray:
    """[R, scales] squared relative error of each row due to the format's range."""
    squares = block.squares
    below = np.zeros((len(squares), squares.shape[1] + 1))
    count = np.zeros_like(below)
    np.cumsum(squares, axis=1, out=below[:, 1:])
    np.cumsum(block.counts, axis=1, out=count[:, 1:])

    def columns_under(exponent: int) -> np.ndarray:
        """For each scale the number of columns below `exponent` after multiplication by it."""
        return np.clip(exponent - LOG2_SCALES - block.low, 0, squares.shape[1])

    flushed, subnormal = columns_under(form.min_subnormal_exponent - 1), columns_under(form.min_normal_exponent)
    rounding_error = np.ldexp(1.0, 2 * (form.min_subnormal_exponent - LOG2_SCALES)) / 12
    lost = below[:, flushed] + rounding_error * (count[:, subnormal] - count[:, flushed])
    errors: np.ndarray = lost / np.maximum(below[:, -1:], 1e-300)
    return errors


def _first_within(squares: np.ndarray, max_error: float) -> np.ndarray:
    """For each row the lowest of `LOG2_SCALES` from which its error is within the limit."""
    beyond = squares > max_error**2
    last = len(LOG2_SCALES) - 1 - np.argmax(beyond[:, ::-1], axis=1)
    first = np.where(beyond.any(axis=1), np.minimum(last + 1, len(LOG2_SCALES) - 1), 0)
    return LOG2_SCALES[first].astype(float)


def _highest(form: Format, absmax: np.ndarray) -> np.ndarray:
    """For each row log2 of the highest scale at which neither its largest value nor partial sums overflow."""
    with np.errstate(divide="ignore"):
        octaves = np.log2(form.overflow_threshold) - np.log2(absmax) - PARTIAL_SUM_OCTAVES
    highest: np.ndarray = np.clip(np.floor(octaves), -np.inf, 127.0)  # a loss scale is an FP32 number
    return highest


def _noise(block: TrueCounts) -> np.ndarray:
    """For each row whether it is smaller than the FP32 rounding error of the largest row of its step."""
    values = np.maximum(block.counts.sum(axis=1), 1.0)
    size = np.sqrt(block.squares.sum(axis=1) / values)
    at, which = np.unique(block.steps, return_inverse=True)
    largest = np.zeros(len(at))
    np.maximum.at(largest, which, size)
    noise: np.ndarray = size < NOISE_RATIO * largest[which]
    return noise
