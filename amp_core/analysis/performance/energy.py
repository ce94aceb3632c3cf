"""Energy per sample, from the power that the GPU reported while the run's own steps were made.

>>> energy_per_sample(run)
Energy(joules=0.84, power_w=412.0, samples=118, why='')

Energy is mean power times median step time over samples per step: idle power included, host not. NVML's power is an
average over up to a second on newer GPUs (NVML API reference, `nvmlDeviceGetPowerUsage`), so that the first second of
each block of an interleaved run still includes the other run; it is excluded.
"""

from dataclasses import dataclass

import numpy as np

from amp_core.analysis.performance.devices import device_samples
from amp_core.analysis.steps import attempts, median, warmup_steps
from amp_core.store.run import Run

SETTLE_S = 1.0
"""Longest averaging time of NVML's power."""
MIN_SAMPLES = 5
"""Fewest power samples for a result."""


@dataclass(frozen=True)
class Energy:
    """Energy of a run's steps. None where not known."""

    joules: float | None
    """Per sample."""
    power_w: float | None
    """Mean over the samples that count."""
    samples: int
    """Number of power samples used."""
    why: str
    """Why there is no result, in words; empty if there is one."""


def energy_per_sample(run: Run) -> Energy:
    """Joules per sample of the run after its warm-up, on its first device."""
    device = device_samples(run)[["time_s", "power_w"]].dropna()
    frame = attempts(run)
    frame = frame.iloc[warmup_steps(len(frame)) :]
    timed = np.isfinite(frame["time_s"].astype(float)) & np.isfinite(frame["step_ms"])
    frame = frame[timed & (frame["samples"] > 0)]
    if device.empty:
        return Energy(None, None, 0, "no device reported its power draw")
    if frame.empty:
        return Energy(None, None, 0, "no step was timed, or no step recorded its samples")
    if run.head.world_size > 1:
        return Energy(None, None, 0, "only one of the run's devices reported its power draw")
    end = frame["time_s"].to_numpy(dtype=np.float64)
    begin = end - frame["step_ms"].to_numpy() / 1e3
    # A step that begins well after the end of the one before begins a turn: another run had the device in between. A
    # step that was not timed lies between two others and is taken to last as long as they do, or a quarter more.
    missing = np.diff(frame["step"].to_numpy()) - 1
    usual = float(np.median(np.diff(end) / (missing + 1))) if len(end) > 1 else 0.0
    waited = begin[1:] - end[:-1] - 1.25 * usual * missing
    waits = np.concatenate([[np.inf], waited]) > 0.5 * np.median(end - begin) + 0.02
    turn = np.cumsum(waits) - 1
    first = begin[waits] + (SETTLE_S if waits.sum() > 1 else 0.0)
    last = np.array([end[turn == n][-1] for n in range(turn[-1] + 1)])
    times = device["time_s"].to_numpy()
    place = np.searchsorted(first, times, side="right") - 1
    inside = (place >= 0) & (times <= last[np.maximum(place, 0)])
    if inside.sum() < MIN_SAMPLES:
        short = (
            "the interleaved blocks are shorter than the second over which a GPU averages its power"
            if waits.sum() > 1
            else "steps"
        )
        return Energy(
            None, None, int(inside.sum()), f"fewer than {MIN_SAMPLES} power samples fall in the run's {short}"
        )
    power = float(device["power_w"].to_numpy()[inside].mean())
    per_sample_s = median(frame["step_ms"] / frame["samples"]) or np.nan
    return Energy(power * per_sample_s / 1e3, power, int(inside.sum()), "")
