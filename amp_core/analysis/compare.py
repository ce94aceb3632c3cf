"""Runs side by side: what each costs, what differs between them, and whether they learned the same.

>>> comparison = compare([run_fp32, run_fp16])
>>> comparison.table[["run", "speed_ratio", "speed_ratio_low", "speed_ratio_high", "speed_verdict", "memory_ratio"]]
>>> comparison.parity["fp16"]
'cannot tell: run more seeds (final loss +0.3 % against fp32, over 200 common steps)'

The first run is the one the others are held against. A ratio of 2 in speed means twice as fast as the first, a ratio
of 0.5 in memory half of its peak. Speed is compared per sample where both runs counted samples, else per step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from amp_core.analysis._steps import attempts, median, recipe, warmup_steps
from amp_core.analysis.curves import labelled
from amp_core.analysis.memory import memory_summary
from amp_core.analysis.scale import scale_summary
from amp_core.run import Run
from amp_core.schema import RunError

SMALL = 0.03
"""Differences in speed below this share are called none: repeats of one run on one machine differ by as much."""
FEW_STEPS = 20
"""With fewer timed steps nothing is said of speed."""
GROSS = 0.05
"""A final loss worse by more than this share, and by more than its own noise, is worse whatever the seed."""
_DRAWS = 400
_BLOCK = 10  # steps drawn together in the bootstrap: neighbouring steps are slow or fast together


@dataclass(frozen=True)
class Comparison:
    """What `compare` found. The first run is the reference."""

    table: pd.DataFrame
    """One row per run; see `compare`."""
    parity: dict[str, str]
    """Per run, by its label: did it learn the same as the first? A verdict, then the evidence in words."""
    differences: pd.DataFrame
    """Settings that are not the same in all runs: column `setting`, then one column of text per run."""
    notes: tuple[str, ...]
    """What a reader must know of the comparison: what was left out, what is not alike."""


@dataclass(frozen=True)
class _Timed:
    """Times of a run's steps after the warm-up: ms per step and, where samples were counted, per sample."""

    step_ms: np.ndarray
    sample_ms: np.ndarray
    warmup: int


def compare(runs: Sequence[Run]) -> Comparison:
    """Hold `runs` against the first of them. Raises `RunError` where there is none.

    `.table` has one row per run, NaN where not measured:
    run (label), precision, status, steps;
    warmup_steps (left out of timings), timed_steps, step_ms (median), step_ms_low, step_ms_high (quartiles),
    samples_per_s, speed_ratio, speed_ratio_low, speed_ratio_high (90 % block bootstrap over the steps of this run and
    the first), speed_verdict;
    memory_peak_bytes, memory_ratio;
    loss_final (mean of the last tenth of its steps), common_steps, loss_ratio (the same over the steps that it shares
    with the first), eval_loss, parity;
    skip_frac, scale_last.

    The interval holds the spread of steps within the runs, not that between repeated runs.
    """
    if not runs:
        raise RunError("runs=[] is empty; give one run or more")
    labels = labelled(runs)
    frames = [attempts(run) for run in runs]
    common = [min(len(frames[0]), len(f)) for f in frames]  # steps that each shares with the first
    firsts = [_final(frames[0], n) for n in common]
    finals = [_final(f, n) for f, n in zip(frames, common, strict=True)]
    timed = [_timed(f) for f in frames]
    rows = []
    for i, run in enumerate(runs):
        scale = scale_summary(run)
        rows.append(
            {"run": labels[i], "precision": recipe(run), "status": run.status, "steps": len(frames[i])}
            | _speed(timed[0], timed[i])
            | {"memory_peak_bytes": _number(memory_summary(run).peak_bytes)}
            | {"loss_final": _final(frames[i], len(frames[i])).mean, "common_steps": common[i]}
            | {"loss_ratio": finals[i].mean / firsts[i].mean if firsts[i].mean else np.nan}
            | {"skip_frac": _number(scale.skip_frac), "scale_last": _number(scale.last)}
            | {"eval_loss": _number(run.head.results.get("eval_loss"))}
        )
    table = pd.DataFrame(rows)
    table["memory_ratio"] = table["memory_peak_bytes"] / table["memory_peak_bytes"].iloc[0]
    task = [_task(run) for run in runs]
    parity = {labels[0]: "reference"}
    for i in range(1, len(runs)):
        parity[labels[i]] = _parity(labels[0], firsts[i], finals[i], common[i], task[0], task[i])
    table["parity"] = list(parity.values())
    return Comparison(table, parity, _differences(runs, labels), _notes(frames, timed, task))


# ---- speed ----------------------------------------------------------------------------------------------------------


def _timed(frame: pd.DataFrame) -> _Timed:
    warmup = warmup_steps(len(frame))
    frame = frame.iloc[warmup:]
    step_ms = frame["step_ms"].to_numpy()
    samples = frame["samples"].to_numpy()
    known = np.isfinite(step_ms) & (step_ms > 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        per_sample = (step_ms / samples)[known]
    return _Timed(step_ms[known], per_sample[np.isfinite(per_sample)], warmup)


def _speed(first: _Timed, this: _Timed) -> dict[str, Any]:
    step_ms = this.step_ms
    low, high = np.percentile(step_ms, [25, 75]) if len(step_ms) else (np.nan, np.nan)
    by_sample = len(first.sample_ms) > 0 and len(this.sample_ms) > 0
    before, now = (first.sample_ms, this.sample_ms) if by_sample else (first.step_ms, this.step_ms)
    ratio, ratio_low, ratio_high = _ratio(before, now) if first is not this else _itself(now)
    return {
        "warmup_steps": this.warmup,
        "timed_steps": len(step_ms),
        "step_ms": _number(median(step_ms)),
        "step_ms_low": float(low),
        "step_ms_high": float(high),
        "samples_per_s": 1e3 / m if (m := median(this.sample_ms)) else np.nan,
        "speed_ratio": ratio,
        "speed_ratio_low": ratio_low,
        "speed_ratio_high": ratio_high,
        "speed_verdict": "reference"
        if first is this
        else _speed_verdict(ratio, ratio_low, ratio_high, min(len(before), len(now))),
    }


def _itself(times: np.ndarray) -> tuple[float, float, float]:
    return (1.0, 1.0, 1.0) if len(times) else (np.nan, np.nan, np.nan)


def _ratio(before: np.ndarray, now: np.ndarray) -> tuple[float, float, float]:
    """Ratio of the medians and its 90 % interval: how many times as fast `now` is as `before`."""
    if not len(before) or not len(now):
        return np.nan, np.nan, np.nan
    random = np.random.default_rng(0)  # the same runs give the same interval
    ratios = _medians(before, random) / _medians(now, random)
    low, high = np.percentile(ratios, [5, 95])
    return float(np.median(before) / np.median(now)), float(low), float(high)


def _medians(times: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Medians of `_DRAWS` resamples made of blocks of neighbouring steps (the last 2,000 steps are enough)."""
    times = times[-2000:]
    block = min(_BLOCK, len(times))
    starts = random.integers(0, len(times) - block + 1, (_DRAWS, -(-len(times) // block)))
    drawn = times[starts[:, :, None] + np.arange(block)].reshape(_DRAWS, -1)
    medians: np.ndarray = np.median(drawn, axis=1)
    return medians


def _speed_verdict(ratio: float, low: float, high: float, steps: int) -> str:
    if not np.isfinite(ratio):
        return "not measured"
    if steps < FEW_STEPS:
        return "cannot tell: run more steps"
    if low > 1 and ratio > 1 + SMALL:
        return "faster"
    if high < 1 and ratio < 1 / (1 + SMALL):
        return "slower"
    if low > 1 / (1 + 2 * SMALL) and high < 1 + 2 * SMALL:
        return "no difference seen"
    return "cannot tell: run more steps"


# ---- learning -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Final:
    """The end of a loss curve over the common steps: mean and standard deviation of the last tenth."""

    mean: float
    noise: float
    steps: int
    broken_at: int | None
    """First step whose recorded loss was not finite."""


def _final(frame: pd.DataFrame, common: int) -> _Final:
    frame = frame.iloc[:common]
    frame = frame[frame["has_loss"]]
    loss = frame["loss"].to_numpy()
    broken = frame["step"].to_numpy()[~np.isfinite(loss)]
    tail = loss[-max(5, len(loss) // 10) :]
    if len(tail) < 2 or not np.isfinite(tail).all():
        return _Final(np.nan, np.nan, len(tail), int(broken[0]) if len(broken) else None)
    # Differences of neighbours, not deviations from the mean: a falling curve is not noise.
    noise = float(np.std(np.diff(tail)) / np.sqrt(2))
    return _Final(float(tail.mean()), noise, len(tail), int(broken[0]) if len(broken) else None)


_TASK = ("workload", "size", "data")
"""Settings that must agree before losses can be held against each other."""


def _task(run: Run) -> tuple[str, ...]:
    return tuple(str(run.head.config.get(k)) for k in _TASK)


def _parity(name: str, first: _Final, this: _Final, common: int, task: tuple[str, ...], other: tuple[str, ...]) -> str:
    unlike = [k for k, a, b in zip(_TASK, task, other, strict=True) if a != b]
    if unlike:
        return f"not comparable: {unlike[0]} is not the same as in {name}"
    if this.broken_at is not None and first.broken_at is None:
        return f"worse: the loss is not finite from step {this.broken_at} on, that of {name} is"
    if not np.isfinite(this.mean) or not np.isfinite(first.mean):
        return "cannot tell: too few steps with a finite loss"
    change = (this.mean - first.mean) / abs(first.mean) if first.mean else np.nan
    percent = 100 * change if abs(change) >= 5e-4 else 0.0  # no "-0.0"
    found = f"final loss {percent:+.1f} % against {name}, over {common:,} common steps"
    if change > GROSS and this.mean - first.mean > 2 * max(first.noise, this.noise):
        return f"worse: {found}, more than the step-to-step noise of ±{max(first.noise, this.noise):.2g}"
    return f"cannot tell: run more seeds ({found})"


# ---- settings -------------------------------------------------------------------------------------------------------


def _differences(runs: Sequence[Run], labels: list[str]) -> pd.DataFrame:
    flat = [_flat(run.head.config) | _flat(run.head.environment, "environment.") for run in runs]
    settings = dict.fromkeys(setting for found in flat for setting in found)
    rows = []
    for setting in settings:
        texts = [found.get(setting, _missing(setting, found)) for found in flat]
        if len(set(texts)) > 1:
            rows.append([setting, *texts])
    return pd.DataFrame(rows, columns=["setting", *labels], dtype="str")


def _flat(settings: Mapping[str, Any], before: str = "") -> dict[str, str]:
    """Settings as text; those within a setting follow it with a dot, as in `scaler.growth_interval`."""
    flat: dict[str, str] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            flat[f"{before}{key}"] = "on" if value.get("enabled", True) else "off"
            flat |= _flat({k: v for k, v in value.items() if k != "enabled"}, f"{before}{key}.")
        elif isinstance(value, list):
            flat[f"{before}{key}"] = ", ".join(str(v) for v in value)
        else:
            flat[f"{before}{key}"] = "off" if value is None or value is False else "on" if value is True else str(value)
    return flat


def _missing(setting: str, found: Mapping[str, str]) -> str:
    """What stands for a setting that a run lacks: of what is off, no details are missing."""
    return "–" if found.get(setting.rpartition(".")[0]) == "off" else "not recorded"


def _notes(frames: list[pd.DataFrame], timed: list[_Timed], task: list[tuple[str, ...]]) -> tuple[str, ...]:
    notes = []
    if len({len(f) for f in frames}) > 1:
        notes.append(
            "The runs are of unequal length; losses are compared over the steps that each shares with the first."
        )
    left_out = sorted({t.warmup for t in timed if t.warmup})
    if left_out:
        said = " or ".join(str(n) for n in left_out)
        notes.append(f"The first {said} steps of each run are left out of speeds: they pay for warming up.")
    if len(set(task)) > 1:
        notes.append("The runs do not train the same task, so their losses cannot be held against each other.")
    return tuple(notes)


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else np.nan
