"""Memory over a run: the memory of torch or of the process at each step, and its peak.

>>> memory_summary(run).peak_bytes
329252864

On CUDA this is the memory allocated by torch, which is less than the device reports as used (context, cache, other
processes). On a CPU it is the resident set of the whole process, including Python and libraries.
"""

from dataclasses import dataclass

import pandas as pd

from amp_core.analysis.steps import attempts
from amp_core.hardware.device_types import is_accelerator
from amp_core.store.run import Run

TENSOR_CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "autocast", "buffers")
"""Columns of table `memory` that are sums over tensors, without `_bytes`."""


@dataclass(frozen=True)
class MemorySummary:
    """Memory of a run in bytes. None if it was not measured."""

    what: str
    """What was measured, in words."""
    peak_bytes: int | None
    tensors_peak_bytes: int | None
    """On a CPU the most that the tensors of a sampled step held; None if that was not sampled. It does not include
    Python and libraries, which are most of a process."""
    device_peak_bytes: int | None
    """Highest use of the device by all processes (NVML)."""


def memory_trace(run: Run) -> pd.DataFrame:
    """One row per step at which memory was measured: step, time_s (s), allocated_bytes, peak_bytes (highest so far)."""
    return run.cached_frame(["steps"], _memory_trace)


def _memory_trace(run: Run) -> pd.DataFrame:
    frame = attempts(run)[["step", "time_s", "memory_allocated_bytes", "memory_peak_bytes"]]
    frame = frame.rename(columns=lambda c: c.removeprefix("memory_"))
    for column in ("allocated_bytes", "peak_bytes"):
        frame[column] = frame[column].astype(float)
    return frame.dropna(subset=["allocated_bytes", "peak_bytes"], how="all").reset_index(drop=True)


def memory_summary(run: Run) -> MemorySummary:
    """The peaks, and what was measured."""
    trace = memory_trace(run)
    used = run.device["memory_used_bytes"].dropna()
    peak = trace[["allocated_bytes", "peak_bytes"]].max().max() if len(trace) else None
    return MemorySummary(
        what=memory_description(run),
        peak_bytes=int(peak) if peak is not None else None,
        tensors_peak_bytes=_tensors_peak(run),
        device_peak_bytes=int(used.max()) if len(used) else None,
    )


def _tensors_peak(run: Run) -> int | None:
    device = run.head.config.get("device", run.head.environment.get("device"))
    if not isinstance(device, str) or is_accelerator(device):  # there the allocator counts tensors alone
        return None
    held = run.memory[[f"{c}_bytes" for c in TENSOR_CATEGORIES]].astype(float).sum(axis=1, min_count=1)
    return int(held.max()) if held.notna().any() else None


def memory_description(run: Run) -> str:
    """What the run's memory columns measure, in words."""
    device = run.head.config.get("device", run.head.environment.get("device"))
    if not isinstance(device, str):
        return "held at the step"
    return "allocated by torch on the GPU" if is_accelerator(device) else "resident set of the process"
