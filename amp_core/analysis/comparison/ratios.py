"""Speed ratios of runs, with confidence intervals.

>>> ratio = speed_ratio([(run_fp32, run_bf16)])
>>> ratio.value, ratio.low, ratio.high, ratio.speed_verdict
(2.31, 2.28, 2.35, 'faster')

Where two runs were interleaved (`ampscope compare`), block n of one is paired with block n of the other: both ran at
the same clock speed, load and temperature of the machine. The median time of each block gives one log ratio; their
mean, trimmed by a fifth at both ends, is the result, and its percentile bootstrap over blocks the interval (Efron and
Tibshirani, "An Introduction to the Bootstrap", 1993, chapter 13; trimming after Wilcox, "Introduction to Robust
Estimation", section 3.3). Runs that were not interleaved are resampled separately in blocks of neighbouring steps,
because step times are autocorrelated (Künsch, "The jackknife and the bootstrap for general stationary observations",
1989). The log ratios of several pairs, such as seeds, are averaged, and from three pairs on the pairs are resampled
too: speed varies more between processes than within one (Kalibera and Jones, "Rigorous benchmarking in reasonable
time", 2013)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from amp_core.analysis.steps import attempts, emulated, warmup_steps
from amp_core.store.run import Run

Floats = npt.NDArray[np.float64]

SAME_SPEED_FRAC = 0.03
"""Speeds within this share of each other count as equal: repeats of one run on one machine differ by as much."""
CONFIDENCE = 0.95
"""Coverage of the intervals."""
MIN_STEPS = 20
"""Fewest timed steps for a statement on speed."""
MIN_BLOCKS = 8
"""Fewest pairs of blocks for a statement on speed."""
_DRAWS = 1000
_BLOCK_STEPS = 10  # steps drawn together where runs were not interleaved
_TRIM_FRAC = 0.2
_MAX_STEPS = 2000  # the last steps of a long run suffice for an interval


@dataclass(frozen=True)
class Ratio:
    """How many times as fast the second run of each pair is as the first. NaN if not measured."""

    value: float
    low: float
    high: float
    """Ends of the 95 % interval; NaN with a single block, which has no spread."""
    paired: bool
    """Whether the runs were interleaved, so that blocks could be paired."""
    blocks: int
    """Pairs of blocks, or blocks of the shorter run, summed over pairs of runs."""
    enough: bool
    """Whether there are enough steps for a statement."""
    emulated: bool = False
    """Whether one of the runs emulates its recipe, so that its times say nothing of the recipe."""

    @property
    def speed_verdict(self) -> str:
        """`faster`, `slower`, `no difference seen`, `cannot tell: run more steps`, `emulated` or `not measured`.

        A difference is one whose interval excludes 1 and that is larger than `SAME_SPEED_FRAC`. There is none if
        the interval lies within twice that margin of 1, so that a larger one would have shown.
        """
        if self.emulated:
            return "emulated"
        if not np.isfinite(self.value):
            return "not measured"
        if not self.enough:
            return "cannot tell: run more steps"
        if self.low > 1 and self.value > 1 + SAME_SPEED_FRAC:
            return "faster"
        if self.high < 1 and self.value < 1 / (1 + SAME_SPEED_FRAC):
            return "slower"
        if self.low > 1 / (1 + 2 * SAME_SPEED_FRAC) and self.high < 1 + 2 * SAME_SPEED_FRAC:
            return "no difference seen"
        return "cannot tell: run more steps"


ITSELF = Ratio(1.0, 1.0, 1.0, paired=False, blocks=0, enough=True)
UNKNOWN = Ratio(np.nan, np.nan, np.nan, paired=False, blocks=0, enough=False)
EMULATED = replace(UNKNOWN, emulated=True)


@dataclass(frozen=True)
class Timed:
    """The timed steps of a run after its warm-up."""

    step: npt.NDArray[np.int64]
    step_ms: Floats
    sample_ms: Floats
    """Time per sample, NaN if samples were not counted."""
    warmup: int


def timed(run: Run) -> Timed:
    """Times of the run's steps without its warm-up."""
    frame = attempts(run)
    warmup = warmup_steps(len(frame))
    frame = frame.iloc[warmup:]
    frame = frame[np.isfinite(frame["step_ms"]) & (frame["step_ms"] > 0)]
    samples = frame["samples"].where(frame["samples"] > 0)
    return Timed(
        frame["step"].to_numpy(dtype=np.int64),
        frame["step_ms"].to_numpy(),
        (frame["step_ms"] / samples).to_numpy(dtype=np.float64),
        warmup,
    )


def took_turns(one: Run, other: Run) -> int | None:
    """Steps per block if these two were interleaved in one comparison with the same seed; else None."""
    first, second = (_comparison(run) for run in (one, other))
    if not first or first.get("id") is None or first.get("id") != second.get("id"):
        return None
    if one.head.config.get("seed") != other.head.config.get("seed"):
        return None
    steps = first.get("block_steps")
    whole = isinstance(steps, int) and not isinstance(steps, bool) and steps > 0
    return steps if whole and steps == second.get("block_steps") else None


def speed_ratio(pairs: Sequence[tuple[Run, Run]]) -> Ratio:
    """Speed of the second run of each pair over the first, over all pairs. Per sample where all counted samples."""
    if any(emulated(run) for pair in pairs for run in pair):
        return EMULATED
    times = [(timed(a), timed(b)) for a, b in pairs]
    if not times or any(not len(t.step) for both in times for t in both):
        return UNKNOWN
    by_sample = all(np.isfinite(t.sample_ms).any() for both in times for t in both)
    random = np.random.default_rng(0)  # the same runs give the same interval
    points, draws, blocks, enough, paired, spread = [], [], 0, True, True, True
    for (one, other), both in zip(pairs, times, strict=True):
        before, now = (_series(t, by_sample) for t in both)
        turns = took_turns(one, other)
        logs = np.log(paired_blocks(before, now, turns)) if turns else np.zeros(0)
        if len(logs):
            points.append(float(_trimmed_mean(logs[None])[0]))
            chosen = random.integers(0, len(logs), (_DRAWS, len(logs)))
            draws.append(_trimmed_mean(logs[chosen]))
            spread = spread and len(logs) > 1
            blocks += len(logs)
        else:
            paired = False
            a, b = (np.asarray(s, dtype=np.float64) for s in (before, now))
            points.append(float(np.log(np.median(a) / np.median(b))))
            draws.append(np.log(_medians(a, random) / _medians(b, random)))
            fewest = min(len(a), len(b))
            spread = spread and fewest > _BLOCK_STEPS
            blocks += fewest // _BLOCK_STEPS
            enough = enough and fewest >= MIN_STEPS
    if paired:
        enough = blocks >= MIN_BLOCKS
    low, high = np.percentile(_over_pairs(np.array(draws), random), [50 * (1 - CONFIDENCE), 50 * (1 + CONFIDENCE)])
    if not spread and len(pairs) < 3:  # all draws are one block
        low = high = np.nan
    value, low, high = (float(np.exp(v)) for v in (np.mean(points), low, high))
    return Ratio(value, low, high, paired, blocks, enough)


def paired_blocks(before: "pd.Series[float]", now: "pd.Series[float]", block_steps: int) -> Floats:
    """Ratio before / now of each block that both have, from times indexed by step.

    A block's time is the median of its steps; blocks of four or more leave out the first step, at which the
    caches hold another run's data.
    """

    def medians(times: "pd.Series[float]") -> "pd.Series[float]":
        step = times.index.to_numpy()
        settled = times[step % block_steps > 0] if block_steps >= 4 else times
        return settled.groupby(settled.index.to_numpy() // block_steps).median()

    one, other = medians(before).align(medians(now), join="inner")
    return np.asarray(one / other, dtype=np.float64)


def _comparison(run: Run) -> Mapping[str, Any]:
    turns = run.head.config.get("comparison")
    return turns if isinstance(turns, Mapping) else {}


def _series(times: Timed, by_sample: bool) -> "pd.Series[float]":
    return pd.Series(times.sample_ms if by_sample else times.step_ms, index=times.step).dropna()


def _trimmed_mean(values: Floats) -> Floats:
    """Mean of each row without the lowest and the highest fifth."""
    cut = int(_TRIM_FRAC * values.shape[1])
    mean: Floats = np.sort(values, axis=1)[:, cut : values.shape[1] - cut].mean(axis=1)
    return mean


def _medians(times: Floats, random: np.random.Generator) -> Floats:
    """Medians of `_DRAWS` resamples of blocks of neighbouring steps."""
    times = times[-_MAX_STEPS:]
    block = min(_BLOCK_STEPS, len(times))
    starts = random.integers(0, len(times) - block + 1, (_DRAWS, -(-len(times) // block)))
    drawn = times[starts[:, :, None] + np.arange(block)].reshape(_DRAWS, -1)
    medians: Floats = np.median(drawn, axis=1)
    return medians


def _over_pairs(draws: Floats, random: np.random.Generator) -> Floats:
    """The mean of draws over pairs; with three or more, over resampled pairs."""
    pairs = len(draws)
    if pairs < 3:
        mean: Floats = draws.mean(axis=0)
        return mean
    chosen = random.integers(0, pairs, (draws.shape[1], pairs))
    again: Floats = draws[chosen, np.arange(draws.shape[1])[:, None]].mean(axis=1)
    return again
