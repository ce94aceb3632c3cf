"""Step time by phase.

>>> speed_summary(run).step_ms
41.2
>>> phase_times(run)  # for the chart: medians over neighbouring steps

The phases data, forward, backward, optimizer and watch exclude each other; `other` is the rest of the step.
Medians, because a step with a checkpoint or an evaluation is not typical.
"""

from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from amp_core import phases
from amp_core.analysis.performance.kernels import traced_step_us
from amp_core.analysis.steps import attempts, median, quantile, warmup_steps
from amp_core.store.run import Run

PHASES = (*phases.PHASES, phases.OTHER)
MAX_POINTS = 1000
"""One per pixel of a chart; a longer run is summarised in as many blocks of steps."""


@dataclass(frozen=True)
class SpeedSummary:
    """Speed of a run without its warm-up. None where not measured."""

    step_ms: float | None
    """Median time of a step. For an imported trace the mean over its windows: it has few steps, and their bounds on
    the device are uncertain where both overlap."""
    step_ms_low: float | None
    step_ms_high: float | None
    """Quartiles of the step time. None for an imported trace: the mean of a few steps may lie outside of them."""
    samples_per_s: float | None
    """Median over steps of samples over time."""
    phases_ms: dict[str, float | None] = field(default_factory=dict)
    """Median per phase: data, forward, backward, optimizer, watch, other."""
    watch_frac: float | None = None
    """Time spent watching over all time of the steps."""
    warmup: int = 0
    """Number of first steps left out."""
    steps: int = 0
    """Number of steps counted."""


def phase_times(run: Run, window: int = 9) -> pd.DataFrame:
    """Medians for a chart: step, data_ms, forward_ms, backward_ms, optimizer_ms, watch_ms, other_ms, step_ms.

    Each row is the median over `window` neighbouring steps. A run of more than `MAX_POINTS` steps gives `MAX_POINTS`
    rows, the medians of blocks of steps. A phase that was not measured is NaN; `watch_ms` is the mean, not the median,
    because only every n-th step is sampled and a median would hide it.
    """
    frame = _with_other(attempts(run))
    columns = [f"{p}_ms" for p in PHASES] + ["step_ms"]
    if len(frame) > MAX_POINTS:
        return _blocks(frame, columns, -(-len(frame) // MAX_POINTS))
    rolling = frame[columns].rolling(max(1, window), center=True, min_periods=1)
    smooth = rolling.median()
    smooth["watch_ms"] = rolling["watch_ms"].mean()
    smooth.insert(0, "step", frame["step"])
    return smooth.reset_index(drop=True)


def speed_summary(run: Run, warmup: int | None = None) -> SpeedSummary:
    """Medians over the run without its first `warmup` steps (by default a fifth of a short run, at most 10)."""
    frame = _with_other(attempts(run))
    traced = traced_step_us(run)
    if warmup is None:
        warmup = 0 if traced else warmup_steps(len(frame))
    frame = frame.iloc[warmup:]
    step_ms = frame["step_ms"].to_numpy()
    with np.errstate(divide="ignore"):
        rate = frame["samples"].to_numpy() / step_ms * 1e3
    both = frame[["watch_ms", "step_ms"]].dropna()
    whole = float(both["step_ms"].sum())
    return SpeedSummary(
        step_ms=traced / 1e3 if traced else median(step_ms),
        step_ms_low=None if traced else quantile(step_ms, 0.25),
        step_ms_high=None if traced else quantile(step_ms, 0.75),
        samples_per_s=median(rate),
        phases_ms={p: median(frame[f"{p}_ms"]) for p in PHASES},
        watch_frac=float(both["watch_ms"].sum()) / whole if whole > 0 else None,
        warmup=warmup,
        steps=len(frame),
    )


def _with_other(frame: pd.DataFrame) -> pd.DataFrame:
    parts = frame[list(phases.COLUMNS)]
    known = parts.sum(axis=1, min_count=1)
    return frame.assign(other_ms=(frame["step_ms"] - known).clip(lower=0.0))


def _blocks(frame: pd.DataFrame, columns: list[str], size: int) -> pd.DataFrame:
    """Medians of blocks of `size` steps; `step` is the first of the block."""
    blocks = -(-len(frame) // size)
    out = pd.DataFrame({"step": frame["step"].to_numpy()[::size]})
    for column in columns:
        values = np.full(blocks * size, np.nan)
        values[: len(frame)] = frame[column].to_numpy()
        values = np.sort(values.reshape(blocks, size), axis=1)  # NaN goes last
        known = np.count_nonzero(~np.isnan(values), axis=1)
        if column == "watch_ms":
            with np.errstate(invalid="ignore"):
                out[column] = np.where(known, np.nansum(values, axis=1), np.nan) / known
            continue
        rows = np.arange(blocks)
        middle = (values[rows, np.maximum(known - 1, 0) // 2] + values[rows, np.minimum(known // 2, size - 1)]) / 2
        out[column] = middle
    return out
