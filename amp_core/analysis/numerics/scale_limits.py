"""Between which loss scales each gradient is safe in a format, and all of them together at each step.

    found = limits(run, FORMATS["fp16"])
    found.steps, found.lowest, found.highest      # per sampled step, log2 of the loss scale
    found.tensors                                 # per tensor, over all steps

The method is described in `window.py`.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from amp_core.analysis.numerics.histograms import TrueCounts, blocks_of_steps, true_counts
from amp_core.analysis.numerics.rounded_gradients import Rounding
from amp_core.formats import Format
from amp_core.store.run import Run

GRADIENTS = ("weight_grad", "output_grad")
LOG2_SCALES = np.arange(-64, 65)
"""Loss scales that are tried. Beyond them none is used."""

PARTIAL_SUMS = 0.5
"""Octaves kept free below overflow: within a matrix product or convolution a partial sum may be larger than the whole,
and kernels that keep it in FP16 overflow there. Audits did so a quarter of an octave below the limit."""

NOISE = 2.0**-22
"""Root mean square, relative to the largest of a step, below which a weight gradient is FP32's own rounding error."""


@dataclass(frozen=True)
class Limits:
    """Limits as log2 of the loss scale. At least one tensor per step; empty where no gradient was recorded."""

    steps: np.ndarray
    lowest: np.ndarray
    """[S] from which scale on the errors of all tensors together keep to the limit."""
    highest: np.ndarray
    """[S] up to which scale no tensor overflows."""
    lowest_by: list[str]
    highest_by: list[str]
    tensors: pd.DataFrame
    """name, kind, lowest_log2, highest_log2: of each rounded gradient by itself, over these steps. The lowest is -inf
    where the error is not judged: that of a bias, or of noise."""


def limits(run: Run, form: Format, error_limit: float, step: int | None = None, since: int | None = None) -> Limits:
    """Limits of every gradient that autocast rounds, at every sampled step (from `since` on), or at the one nearest at
    or before `step`. `error_limit` is the relative error up to which a loss scale is safe."""
    rounding = Rounding(run)
    outputs = true_counts(run, "output_grad", step)
    numel = dict(zip(outputs.names, outputs.numel, strict=True))
    by_step: dict[int, _OfStep] = {}
    per_tensor: dict[tuple[str, str], tuple[float, float]] = {}
    for kind in GRADIENTS:
        for block in blocks_of_steps(run, kind, step, since):
            names = sorted(set(block.names))
            rounded = dict(zip(names, rounding.of(kind, names), strict=True))
            found = _rows_of(block, np.array([rounded[n] for n in block.names]))
            if kind == "weight_grad":
                matrix = dict(zip(names, rounding.matrices(names), strict=True))
                hidden = dict(zip(names, rounding.hidden_octaves(names, numel), strict=True))
                judged = np.array([matrix[n] for n in found.names], dtype=bool) & ~_noise(found)
                octaves = np.array([hidden[n] for n in found.names], dtype=np.int64)
            else:
                judged, octaves = np.ones(len(found.names), dtype=bool), np.zeros(len(found.names), dtype=np.int64)
            errors = error_squares(form, found)
            errors[~judged] = 0.0
            # What travels on is the error of the 16-bit gradient that a weight gradient is made from.
            places = np.clip(np.arange(len(LOG2_SCALES)) - octaves[:, None], 0, len(LOG2_SCALES) - 1)
            travelling = np.take_along_axis(errors, places, axis=1) * (octaves >= 0)[:, None]
            lowest = _first_within(np.maximum(errors, travelling), error_limit)
            highest = _highest(form, found.absmax)
            _add(by_step, found, errors, travelling, np.where(judged, lowest, -np.inf), highest)
            for name, low, high, counts in zip(found.names, lowest, highest, judged, strict=True):
                before = per_tensor.get((name, kind), (-np.inf, np.inf))
                per_tensor[name, kind] = max(before[0], low if counts else -np.inf), min(before[1], high)
    steps = sorted(at for at, of in by_step.items() if of.highest < np.inf)
    # From where on the errors that add up, and each tensor's own, keep to the limit.
    worst = np.array([np.maximum(by_step[s].sum, by_step[s].worst) for s in steps]).reshape(-1, len(LOG2_SCALES))
    return Limits(
        steps=np.array(steps, dtype=np.int64),
        lowest=_first_within(worst, error_limit),
        highest=np.array([by_step[s].highest for s in steps]),
        lowest_by=[by_step[s].lowest_by or by_step[s].highest_by for s in steps],
        highest_by=[by_step[s].highest_by for s in steps],
        tensors=pd.DataFrame(
            [(*key, *ends) for key, ends in per_tensor.items()], columns=["name", "kind", "lowest_log2", "highest_log2"]
        ),
    )


class _OfStep:
    """What the tensors of one step say together."""

    def __init__(self) -> None:
        self.sum = np.zeros(len(LOG2_SCALES))
        self.worst = np.zeros(len(LOG2_SCALES))
        self.needed = -np.inf
        self.lowest_by = ""
        self.highest = np.inf
        self.highest_by = ""


def _add(
    by_step: dict[int, _OfStep],
    found: TrueCounts,
    errors: np.ndarray,
    travelling: np.ndarray,
    lowest: np.ndarray,
    highest: np.ndarray,
) -> None:
    """Take in the rows of a block, which come in the order of their steps. `lowest` is -inf where it is not judged."""
    if not len(found.steps):
        return
    at, begins = np.unique(found.steps, return_index=True)
    sums, worst = np.add.reduceat(travelling, begins, axis=0), np.maximum.reduceat(errors, begins, axis=0)
    needs, tops = _first_of_each(-lowest, begins), _first_of_each(highest, begins)
    for i, step in enumerate(at.tolist()):
        of, need, top = by_step.setdefault(step, _OfStep()), needs[i], tops[i]
        of.sum += sums[i]
        np.maximum(of.worst, worst[i], out=of.worst)
        if lowest[need] > of.needed:
            of.needed, of.lowest_by = float(lowest[need]), found.names[need]
        if highest[top] < of.highest:
            of.highest, of.highest_by = float(highest[top]), found.names[top]


def _first_of_each(values: np.ndarray, begins: np.ndarray) -> np.ndarray:
    """Where the smallest value of each stretch of rows stands first; NaN, which a stranger's file may hold, is none."""
    values = np.where(np.isnan(values), np.inf, values)
    stretch = np.repeat(np.arange(len(begins)), np.diff(np.append(begins, len(values))))
    smallest = np.flatnonzero(values == np.minimum.reduceat(values, begins)[stretch])
    places: np.ndarray = smallest[np.unique(stretch[smallest], return_index=True)[1]]
    return places


def _rows_of(block: TrueCounts, keep: np.ndarray) -> TrueCounts:
    """The rows to `keep`, of those that hold anything but zeros."""
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


def error_squares(form: Format, found: TrueCounts) -> np.ndarray:
    """[R, scales] square of the relative error that the format's range takes from each row."""
    squares = found.squares
    below = np.zeros((len(squares), squares.shape[1] + 1))
    count = np.zeros_like(below)
    np.cumsum(squares, axis=1, out=below[:, 1:])
    np.cumsum(found.counts, axis=1, out=count[:, 1:])

    def columns_under(exponent: int) -> np.ndarray:
        """For each scale how many columns lie under `exponent` once they are multiplied by it."""
        return np.clip(exponent - LOG2_SCALES - found.low, 0, squares.shape[1])

    flushed, subnormal = columns_under(form.min_subnormal_exponent - 1), columns_under(form.min_normal_exponent)
    grain = np.ldexp(1.0, 2 * (form.min_subnormal_exponent - LOG2_SCALES)) / 12
    lost = below[:, flushed] + grain * (count[:, subnormal] - count[:, flushed])
    errors: np.ndarray = lost / np.maximum(below[:, -1:], 1e-300)
    return errors


def _first_within(squares: np.ndarray, error_limit: float) -> np.ndarray:
    """For each row the lowest of `LOG2_SCALES` from which on its error keeps to the limit."""
    beyond = squares > error_limit**2
    last = len(LOG2_SCALES) - 1 - np.argmax(beyond[:, ::-1], axis=1)
    first = np.where(beyond.any(axis=1), np.minimum(last + 1, len(LOG2_SCALES) - 1), 0)
    return LOG2_SCALES[first].astype(float)


def _highest(form: Format, absmax: np.ndarray) -> np.ndarray:
    """For each row log2 of the highest scale at which its largest value, and its partial sums, can be held."""
    with np.errstate(divide="ignore"):
        room = np.log2(form.overflow_threshold) - np.log2(absmax) - PARTIAL_SUMS
    highest: np.ndarray = np.clip(np.floor(room), -np.inf, 127.0)  # a loss scale is an FP32 number
    return highest


def _noise(found: TrueCounts) -> np.ndarray:
    """For each row whether it is smaller than what FP32 rounds away of the largest of its step."""
    values = np.maximum(found.counts.sum(axis=1), 1.0)
    size = np.sqrt(found.squares.sum(axis=1) / values)
    at, which = np.unique(found.steps, return_inverse=True)
    largest = np.zeros(len(at))
    np.maximum.at(largest, which, size)
    noise: np.ndarray = size < NOISE * largest[which]
    return noise
