"""Speed ratios of runs, with confidence intervals.

>>> ratio = speed_ratio([(run_fp32, run_bf16)])
>>> ratio.value, ratio.low, ratio.high, ratio.speed_verdict
(2.31, 2.28, 2.35, 'faster')

Where two runs were interleaved (`ampscope compare`), block n of one is paired with block n of the other: both ran at
the same clock speed, load and temperature of the machine. The median time of each block gives one log ratio. Their
mean, trimmed by a fifth at both ends, is the result, with Student's t interval from the winsorized variance (Tukey and
McLaughlin, "Less vulnerable confidence and significance procedures for location", 1963; Wilcox, "Introduction to Robust
Estimation", section 4.3): bursts of other work hit single blocks. Runs that were not interleaved are resampled
separately in blocks of neighbouring steps, because step times are autocorrelated (Künsch, "The jackknife and the
bootstrap for general stationary observations", 1989); the variance of the resampled ratios gives the interval.

The log ratios of several pairs, such as seeds, are averaged. From three pairs on, variance between pairs beyond that
within them adds to the interval, as in a random-effects model, with Satterthwaite's degrees of freedom ("An approximate
distribution of estimates of variance components", 1946): speed varies more between processes than within one (Kalibera
and Jones, "Rigorous benchmarking in reasonable time", 2013)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from amp_core.analysis.comparison.parity import t_quantile
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
    """Ends of the interval, of 95 % unless asked otherwise; NaN with a single block, which has no spread."""
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
    """Times of the run's steps without its warm-up. Callers share them."""
    return run.cached(["steps"], _timed)  # a race compares each run with several others


def _timed(run: Run) -> Timed:
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


def speed_ratio(pairs: Sequence[tuple[Run, Run]], confidence: float = CONFIDENCE) -> Ratio:
    """Speed of the second run of each pair over the first, over all pairs. Per sample where all counted samples."""
    if any(emulated(run) for pair in pairs for run in pair):
        return EMULATED
    times = [(timed(a), timed(b)) for a, b in pairs]
    if not times or any(not len(t.step) for both in times for t in both):
        return UNKNOWN
    by_sample = all(np.isfinite(t.sample_ms).any() for both in times for t in both)
    random = np.random.default_rng(0)  # the same runs give the same interval
    estimates, blocks, enough, paired = [], 0, True, True
    for (one, other), both in zip(pairs, times, strict=True):
        before, now = (_series(t, by_sample) for t in both)
        turns = took_turns(one, other)
        logs = np.log(paired_blocks(before, now, turns)) if turns else np.zeros(0)
        if len(logs):
            estimates.append(_trimmed_mean(logs))
            blocks += len(logs)
        else:
            paired = False
            a, b = (np.asarray(s, dtype=np.float64) for s in (before, now))
            estimates.append(_ratio_of_medians(a, b, random))
            fewest = min(len(a), len(b))
            blocks += fewest // _BLOCK_STEPS
            enough = enough and fewest >= MIN_STEPS
    if paired:
        enough = blocks >= MIN_BLOCKS
    mean = _over_pairs(estimates)
    reach = t_quantile(mean.freedom, (1 + confidence) / 2) * mean.variance**0.5
    value, low, high = (float(np.exp(v)) for v in (mean.log_ratio, mean.log_ratio - reach, mean.log_ratio + reach))
    return Ratio(value, low, high, paired, blocks, enough)


class _Estimate(NamedTuple):
    log_ratio: float
    variance: float
    """Of `log_ratio`; NaN where the runs have a single block, which has no spread."""
    freedom: float
    """Degrees of freedom of `variance`."""


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


def _trimmed_mean(logs: Floats) -> _Estimate:
    """The mean without the lowest and the highest fifth."""
    logs, count = np.sort(logs), len(logs)
    cut = int(_TRIM_FRAC * count)
    kept = logs[cut : count - cut]
    if count < 2:
        return _Estimate(float(kept.mean()), np.nan, 1.0)
    winsorized = float(np.clip(logs, kept[0], kept[-1]).var(ddof=1))
    inner = len(kept)
    return _Estimate(float(kept.mean()), (count - 1) * winsorized / (inner * (inner - 1)), inner - 1)


def _ratio_of_medians(before: Floats, now: Floats, random: np.random.Generator) -> _Estimate:
    log_ratio = float(np.log(np.median(before) / np.median(now)))
    blocks = min(len(before), len(now)) / _BLOCK_STEPS
    if blocks <= 1:
        return _Estimate(log_ratio, np.nan, 1.0)
    drawn = np.log(_medians(before, random) / _medians(now, random))
    return _Estimate(log_ratio, float(drawn.var(ddof=1)), max(1.0, blocks - 1))


def _medians(times: Floats, random: np.random.Generator) -> Floats:
    """Medians of `_DRAWS` resamples of blocks of neighbouring steps."""
    times = times[-_MAX_STEPS:]
    block = min(_BLOCK_STEPS, len(times))
    starts = random.integers(0, len(times) - block + 1, (_DRAWS, -(-len(times) // block)))
    drawn = times[starts[:, :, None] + np.arange(block)].reshape(_DRAWS, -1)
    medians: Floats = np.median(drawn, axis=1)
    return medians


def _over_pairs(pairs: Sequence[_Estimate]) -> _Estimate:
    """The mean over pairs; its variance is that within pairs, and from three pairs on what they differ by beyond it."""
    count = len(pairs)
    points = np.array([pair.log_ratio for pair in pairs])
    shares = np.array([pair.variance for pair in pairs]) / count**2
    within, freedom = float(shares.sum()), np.array([pair.freedom for pair in pairs])
    if count < 3:
        between = 0.0
    elif np.isnan(within):  # single blocks: all that is known is what the pairs differ by
        within, between = 0.0, float(points.var(ddof=1)) / count
    else:
        between = max(0.0, float(points.var(ddof=1)) / count - within)
    total = within + between
    parts = between**2 / (count - 1) if between else 0.0
    parts += float((shares**2 / freedom).sum()) if within else 0.0
    return _Estimate(float(points.mean()), total, total**2 / parts if parts else 1.0)
