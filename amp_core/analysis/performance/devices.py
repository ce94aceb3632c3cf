"""Device samples over a run: how busy the GPU was, its tensor cores, its memory, power and heat.

>>> device_samples(run)[["time_s", "gpu_util_frac", "tensor_active_frac"]].tail()
>>> device_now(run).power_w
412.3

`gpu_util_frac` is the share of time in which any kernel ran: it says nothing of tensor cores. `tensor_active_frac` is
the share of time in which the tensor cores' pipe was busy, counted by the GPU itself (Hopper and newer).
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from amp_core.store.run import Run

SHARES = ("gpu_util_frac", "sm_active_frac", "tensor_active_frac", "hmma_active_frac", "dram_active_frac")
_REST = (
    "memory_used_bytes",
    "memory_total_bytes",
    "power_w",
    "power_limit_w",
    "temperature_c",
    "sm_clock_mhz",
    "mem_clock_mhz",
)


@dataclass(frozen=True)
class DeviceNow:
    """The newest sample in which each value was told, of the run's first device. None where it never was."""

    samples: int
    """Samples of that device so far."""
    gpu_util_frac: float | None = None
    sm_active_frac: float | None = None
    tensor_active_frac: float | None = None
    hmma_active_frac: float | None = None
    dram_active_frac: float | None = None
    memory_used_bytes: float | None = None
    memory_total_bytes: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    temperature_c: float | None = None
    sm_clock_mhz: float | None = None
    mem_clock_mhz: float | None = None
    throttle: str | None = None
    """What holds the clocks down, in words; `none` where nothing does."""


def device_samples(run: Run) -> pd.DataFrame:
    """One row per sample of the run's first device, in order: time_s and what it told, NaN where it did not.

    The first device is the one with the lowest rank, then the lowest number.
    """
    frame = run.device
    if len(frame):
        first = frame.sort_values(["rank", "index"], kind="stable").iloc[0]
        frame = frame[(frame["rank"] == first["rank"]) & (frame["index"] == first["index"])]
    frame = frame.astype(dict.fromkeys(("time_s", *SHARES, *_REST), float))
    return frame[["time_s", "index", "rank", *SHARES, *_REST, "throttle"]].reset_index(drop=True)


def device_now(run: Run) -> DeviceNow:
    """The newest values."""
    frame = device_samples(run)
    told = {c: frame[c].to_numpy()[np.isfinite(frame[c].to_numpy())] for c in (*SHARES, *_REST)}
    words = frame["throttle"].dropna()
    return DeviceNow(
        samples=len(frame),
        throttle=str(words.iloc[-1]) if len(words) else None,
        **{c: float(values[-1]) if len(values) else None for c, values in told.items()},
    )


def not_recorded(run: Run) -> list[str]:
    """Why something was not recorded, in the run's own words, each reason once."""
    events = run.events
    said = events[(events["kind"] == "warning") & (events["name"] == "not recorded")]["detail"]
    return list(dict.fromkeys(str(detail) for detail in said if detail))
