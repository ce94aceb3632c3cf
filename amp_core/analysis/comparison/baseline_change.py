"""A run and its baseline in a few numbers, each with the noise band of the baseline.

>>> baseline_changes([fp32, fp16])[["metric", "baseline", "value", "low", "high", "outside"]]
>>> baseline_band(scale_trace(fp32), "grad_norm")       # step, low, middle, high: for a chart
"""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from amp_core.analysis.comparison.learned import common, final
from amp_core.analysis.comparison.parity import MIN_SEEDS, NOISE_STDS
from amp_core.analysis.comparison.ratios import timed
from amp_core.analysis.numerics.layers import layer_trace, tensor_names
from amp_core.analysis.numerics.loss_scale import scale_summary, scale_trace
from amp_core.analysis.numerics.what_if import GRADIENTS
from amp_core.analysis.performance.memory import memory_summary
from amp_core.analysis.performance.memory_breakdown import memory_breakdown
from amp_core.analysis.steps import attempts, emulated
from amp_core.store.run import Run

SEEDS, STEPS, QUARTILES = "seed to seed", "step to step", "half of its steps"
"""What a noise band consists of: `NOISE_STDS` standard deviations over seeds, or standard errors of the mean over its
steps; of times and norms the range that holds the middle half of the steps."""
BAND_WINDOWS = 20
"""Windows of a band along a run."""
MIN_WINDOW = 5
_COLUMNS = ("metric", "baseline", "value", "low", "high", "noise", "outside")
_Numbers = tuple[float, float, float, float, str]


def baseline_changes(runs: Sequence[Run]) -> pd.DataFrame:
    """How the last of `runs` differs from the baseline: the first, and its repeats with other seeds between them.

    One row per metric that both recorded: metric (`loss`, mean of the last tenth of the common steps; `step_ms`,
    median; `memory_bytes`, peak of tensors, or of the process where parts are not known; `skip_frac`; `grad_norm`,
    median), baseline, value, low and high (noise band of the baseline, NaN if it has none), noise (`SEEDS`, `STEPS`,
    `QUARTILES` or empty), outside (whether the value lies outside the band; without a band, whether it differs).
    """
    run, bases = runs[-1], list(runs[:-1])
    rows: list[dict[str, object]] = []
    by_metric = {
        "loss": _loss(run, bases),
        "step_ms": None if emulated(run) or emulated(bases[0]) else _step_time(run, bases[0]),
        "memory_bytes": None if emulated(run) or emulated(bases[0]) else _memory(run, bases[0]),
        "skip_frac": _skips(run, bases[0]),
        "grad_norm": _gradient_norm(run, bases[0]),
    }
    for metric, numbers in by_metric.items():
        if numbers is None or not np.isfinite(numbers[0]):
            continue
        base, value, low, high, noise = numbers
        known = np.isfinite(low) and np.isfinite(high)
        outside = not low <= value <= high if known else value != base
        rows.append(dict(zip(_COLUMNS, (metric, base, value, low, high, noise, outside), strict=True)))
    return pd.DataFrame(rows, columns=list(_COLUMNS))


def baseline_band(trace: pd.DataFrame, column: str) -> pd.DataFrame:
    """The course of `column` over the steps of a baseline: step, and the quartiles low, middle and high of windows of a
    `BAND_WINDOWS`-th of its rows. Empty if nothing finite was recorded."""
    rows = trace.loc[np.isfinite(trace[column].astype(float)), ["step", column]]
    width = max(MIN_WINDOW, len(rows) // BAND_WINDOWS)
    windows = rows[column].astype(float).rolling(width, center=True, min_periods=1)
    return pd.DataFrame(
        {
            "step": rows["step"].to_numpy(),
            "low": windows.quantile(0.25).to_numpy(),
            "middle": windows.median().to_numpy(),
            "high": windows.quantile(0.75).to_numpy(),
        }
    )


def layer_band(pair: Sequence[Run], kind: str, name: str) -> pd.DataFrame:
    """`baseline_band` of the root mean square of a tensor in the first of a `pair` of runs, at the loss scale of the
    second, so that both are as stored. Empty if the baseline did not sample that tensor."""
    base, run = pair
    if name not in tensor_names(base, kind):
        return baseline_band(pd.DataFrame({"step": [], "rms": []}), "rms")
    trace, own = layer_trace(base, kind, name), layer_trace(run, kind, name)
    ours, theirs = (frame["loss_scale"].fillna(1.0).to_numpy(dtype=float) for frame in (own, trace))
    at_step = np.interp(trace["step"], own["step"], ours) if len(own) else 1.0
    scaled = kind in GRADIENTS
    return baseline_band(trace.assign(rms=trace["rms"] * at_step / theirs if scaled else trace["rms"]), "rms")


def _loss(run: Run, bases: Sequence[Run]) -> _Numbers | None:
    frames = [attempts(one) for one in (*bases, run)]
    extent = common(frames)
    frames = [extent.cut(frame) for frame in frames]
    *ends, own = (final(frame) for frame in frames)
    ends = [end for end in ends if np.isfinite(end.mean)]
    if not ends:
        return None
    means = [end.mean for end in ends]
    if len(ends) >= MIN_SEEDS:
        base, spread, noise = float(np.mean(means)), NOISE_STDS * float(np.std(means, ddof=1)), SEEDS
    else:
        count = max(5, int(frames[0]["has_loss"].sum()) // 10)  # losses in the mean, as in `final`
        base, spread, noise = means[0], NOISE_STDS * ends[0].noise / count**0.5, STEPS
    return base, own.mean, base - spread, base + spread, noise


def _step_time(run: Run, base: Run) -> _Numbers | None:
    before, now = timed(base).step_ms, timed(run).step_ms
    if not len(before) or not len(now):
        return None
    low, middle, high = (float(v) for v in np.percentile(before, [25, 50, 75]))
    return middle, float(np.median(now)), low, high, QUARTILES


def _memory(run: Run, base: Run) -> _Numbers | None:
    parts = [memory_breakdown(one) for one in (base, run)]
    if all(part.categories_known and part.on_cpu for part in parts):
        before, now = (float(part.named["bytes"].sum()) for part in parts)
        return before, now, np.nan, np.nan, ""
    before_peak, now_peak = (memory_summary(one).peak_bytes for one in (base, run))
    if before_peak is None or now_peak is None:
        return None
    return float(before_peak), float(now_peak), np.nan, np.nan, ""


def _skips(run: Run, base: Run) -> _Numbers | None:
    before, now = scale_summary(base), scale_summary(run)
    if not now.has_scaler or now.skip_frac is None:
        return None
    return before.skip_frac or 0.0, now.skip_frac, np.nan, np.nan, ""


def _gradient_norm(run: Run, base: Run) -> _Numbers | None:
    before, now = (_finite(scale_trace(one)["grad_norm"]) for one in (base, run))
    if before.empty or now.empty:
        return None
    low, middle, high = (float(before.quantile(share)) for share in (0.25, 0.5, 0.75))
    return middle, float(now.median()), low, high, QUARTILES


def _finite(values: "pd.Series[float]") -> "pd.Series[float]":
    numbers = values.astype(float)
    return numbers[np.isfinite(numbers)]
