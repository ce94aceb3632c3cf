"""Device samples over a run: utilisation of the GPU and its tensor cores, memory, power and temperature.

>>> device_samples(run)[["time_s", "gpu_util_frac", "tensor_active_frac"]].tail()
>>> device_now(run).power_w
412.3

`gpu_util_frac` is the share of time in which any kernel ran, whether on tensor cores or not. `tensor_active_frac` is
the share of time in which the tensor pipe was busy, by the GPU's own counter (Hopper and newer).
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
    """The last known value of each quantity, of the run's first device. None if it was never known."""

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
    """Reasons for throttled clocks, in words; `none` without any."""


def device_samples(run: Run) -> pd.DataFrame:
    """One row per sample of the run's first device, in order: time_s and its values, NaN if missing.

    The first device is the one with the lowest rank, then the lowest number.
    """
    frame = run.device
    if len(frame):
        first = frame.sort_values(["rank", "index"], kind="stable").iloc[0]
        frame = frame[(frame["rank"] == first["rank"]) & (frame["index"] == first["index"])]
    frame = frame.astype(dict.fromkeys(("time_s", *SHARES, *_REST), float))
    return frame[["time_s", "index", "rank", *SHARES, *_REST, "throttle"]].reset_index(drop=True)


def device_now(run: Run) -> DeviceNow:
    """The last known values of the run's first device."""
    frame = device_samples(run)
    known = {c: frame[c].to_numpy()[np.isfinite(frame[c].to_numpy())] for c in (*SHARES, *_REST)}
    words = frame["throttle"].dropna()
    return DeviceNow(
        samples=len(frame),
        throttle=str(words.iloc[-1]) if len(words) else None,
        **{c: float(values[-1]) if len(values) else None for c, values in known.items()},
    )


def not_recorded_reasons(run: Run) -> list[str]:
    """The reasons that the run gives for missing recordings, each once."""
    events = run.events
    details = events[(events["kind"] == "warning") & (events["name"] == "not recorded")]["detail"]
    return list(dict.fromkeys(str(detail) for detail in details if detail))
