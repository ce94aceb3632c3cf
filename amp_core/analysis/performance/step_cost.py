"""Where the time of a step goes.

    >>> step_cost(run).parts[["label", "us", "frac"]]

From a profiled window: kernels by category, and the rest of its wall time, in which the device was idle. Concurrent
work counts once: communication only where nothing else ran, copies only where no other kernel did, and of kernels that
overlap on several streams products first. So the parts add up to the wall time. Without a profiled
window the recorded phases of the steps are used, and `source` says so.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from amp_core import phases
from amp_core.analysis.performance.gpus import profiled_gpu
from amp_core.analysis.performance.kernels import counted_once, kernel_rows, on_cpu, window_rows
from amp_core.analysis.performance.main_device import of_main
from amp_core.analysis.performance.matrix_kinds import is_matrix
from amp_core.analysis.performance.step_time import speed_summary
from amp_core.analysis.steps import attempts, median, warmup_steps
from amp_core.hardware.data_sheets import dense_rates
from amp_core.hardware.gpus import core_names, is_amd, is_of_other_vendor
from amp_core.hardware.kernel_names import COPIES, SMALL_TYPES
from amp_core.store.run import Run
from amp_core.text.formatting import number, percent

PARTS = {
    "data": "waiting for data",
    "gaps": "idle between kernels",
    "tensor": "GEMM/conv, on tensor cores",
    "matrix_unknown": "GEMM/conv, unclassified",
    "matrix": "GEMM/conv, on CUDA cores",
    "memory_bound": "memory-bound",
    "cast": "casts",
    "layout": "layout changes",
    "optimizer": "optimizer",
    "communication": "communication",
    "copy": "copies and fills",
    "other": "other kernels",
    "watch": "recording overhead",
}
"""Labels of the parts of a profiled step, in the order of charts."""
CPU_LABELS = {"gaps": "Python and waiting", "matrix": "GEMM/conv", "other": "other operators"}
"""Labels that differ on a CPU, where the device is the host."""
AMD_LABELS = {"tensor": "GEMM/conv, on matrix cores", "matrix": "GEMM/conv, in FP32"}
"""The same on AMD's GPUs, whose FP32 products run on matrix cores too."""
PHASE_LABELS = phases.LABELS
"""Labels of the parts of a step without a profiled window."""
_GPU_ONLY = ("tensor", "matrix_unknown", "communication", "copy")
MATRIX_PARTS = ("tensor", "matrix_unknown", "matrix")

_MEMORY_BOUND = ("norm", "elementwise", "reduction", "embedding")
_PART_OF = {
    **dict.fromkeys(_MEMORY_BOUND, "memory_bound"),
    "cast": "cast",
    "layout": "layout",
    "optimizer": "optimizer",
    **dict.fromkeys(COPIES, "copy"),
}

MIN_SLOWED_RATIO = 1.05
"""Ratio of profiled to other step times above which a note says that profiling slows the run."""

NOTABLE_LEAD_FRAC = 0.02
"""A note says so if the device waits before the first kernel for more than this share of the window."""
MIN_PART_US = 1e-3
"""Less than a nanosecond is rounding of a subtraction."""


@dataclass(frozen=True)
class StepCost:
    """The time of a step by part."""

    source: str
    """`profile` (a profiled window), `phases` (the recorded phases of steps) or `nothing`."""
    parts: pd.DataFrame
    """part, label, us (per step; per window if it has no step markers), frac (of all). Adds up to `step_us`; NaN if a
    part cannot be separated from the others, which then include it (see `notes`)."""
    step_us: float
    """Wall time of a step in microseconds; 0 with source `nothing`."""
    steps: int
    """Number of steps in the mean; 0 if the window marks none."""
    on_cpu: bool
    device_name: str
    launches: float | None
    """Kernels, copies and fills per step; None on a CPU and without a profile."""
    syncs: float | None
    """Calls per step in which the host waits for the device; None where they were not recorded."""
    overlap_us: float
    """Kernel time per step that overlapped with other kernels and is not counted twice."""
    tf32_us: float
    """Time of the part `tensor` in TF32, per step."""
    narrow_us: float
    """Time of the part `matrix` in 16 bits or fewer, per step: products that the library runs without tensor cores."""
    rate_ratio: float | None
    """Dense rate of the device's 16-bit tensor cores over that of FP32 on its CUDA cores; None if not listed."""
    tf32_ratio: float | None
    """Dense rate of 16-bit inputs over that of TF32; None if not listed or without TF32."""
    samples: float | None
    """Samples per step."""
    notes: tuple[str, ...]
    """What could not be measured or had to be estimated."""

    def us(self, *parts: str) -> float:
        """Total time of these parts, microseconds per step; NaN if none of them was measured."""
        chosen = self.parts.loc[self.parts["part"].isin(parts), "us"]
        return float(chosen.sum(min_count=1)) if len(chosen) else 0.0


def step_cost(run: Run, step: int | None = None, rank: int | None = None) -> StepCost:
    """Cost of a step in the profiled window that begins at `step`, or the mean over all of them; of one `rank`, or the
    mean over all ranks and devices, or where one of these does nearly all, of that one."""
    windows = window_rows(run, step)
    windows = of_main(run, windows) if rank is None else windows[windows["rank"] == rank]
    windows = windows[np.isfinite(windows["wall_us"]) & (windows["wall_us"] > 0)]
    if windows.empty or run.damaged("kernels"):  # without its kernels a window would be other work and waiting
        return phase_cost(run)
    rows = kernel_rows(run, step, everything=True)
    cpu = on_cpu(rows) or bool(windows["device"].str.startswith("cpu").all())
    keys = ["step", "rank", "device"]
    notes: list[str] = []
    by_window: list[dict[str, float]] = []
    overlap = 0.0
    for _, window in windows.iterrows():
        in_window = (rows[keys] == window[keys]) | (rows[keys].isna() & window[keys].isna())
        parts, overlapped = _split(window, rows[in_window.all(axis=1)], _recorded(run, window), notes)
        by_window.append(parts)
        overlap += overlapped
    notes += _slowed(run, windows) + _lead(windows)
    steps = windows["steps"].sum(min_count=len(windows))
    per = float(steps) if np.isfinite(steps) and steps > 0 else float(len(windows))
    totals = pd.DataFrame(by_window).sum(min_count=1)
    wall = float(windows["wall_us"].sum())
    gpu = profiled_gpu(run, str(windows["device"].iloc[0]), str(windows["device_name"].iloc[0]))
    labels = part_labels(gpu.name, cpu, rows)
    rates = dense_rates(gpu.name)
    samples = attempts(run)["samples"].median()
    return StepCost(
        source="profile",
        parts=_frame(
            [(p, labels[p], float(totals[p]) / per) for p in PARTS if totals[p] != 0 or not (cpu and p in _GPU_ONLY)]
        ),
        step_us=wall / per,
        steps=int(steps) if np.isfinite(steps) else 0,
        on_cpu=cpu,
        device_name=str(windows["device_name"].iloc[0]) if cpu else gpu.name,
        launches=_per(windows["launches"], per),
        syncs=_per(windows["syncs"], per),
        overlap_us=overlap / per,
        tf32_us=float(totals["tensor"]) / per * _tf32_share(rows),
        narrow_us=float(totals["matrix"]) / per * _narrow_share(rows),
        rate_ratio=rates.half / rates.fp32 if rates and not cpu else None,
        tf32_ratio=rates.half / rates.tf32 if rates and rates.tf32 and not cpu else None,
        samples=float(samples) if np.isfinite(samples) else None,
        notes=tuple(dict.fromkeys(notes)),
    )


def phase_cost(run: Run) -> StepCost:
    """Cost of a step from the recorded phases: means over the steps after the warm-up, without a profile."""
    frame = attempts(run)
    frame = frame.iloc[warmup_steps(len(frame)) :]
    frame = frame[np.isfinite(frame["step_ms"]) & (frame["step_ms"] > 0)]
    device = str(run.head.config.get("device") or "")
    samples = frame["samples"].median() if len(frame) else np.nan
    ms = {p: float(frame[f"{p}_ms"].fillna(0.0).mean()) for p in phases.PHASES} if len(frame) else {}
    whole = float(frame["step_ms"].mean()) if len(frame) else 0.0
    known = sum(ms.values())
    step_us = 1e3 * max(whole, known)  # separately timed phases may add up to slightly more
    parts = [(phase, PHASE_LABELS[phase], 1e3 * value) for phase, value in ms.items()]
    parts.append(("other", PHASE_LABELS["other"], max(0.0, step_us - 1e3 * known)))
    return StepCost(
        source="phases" if len(frame) else "nothing",
        parts=_frame(parts if len(frame) else []),
        step_us=step_us,
        steps=len(frame),
        on_cpu=device.startswith("cpu"),
        device_name="",
        launches=None,
        syncs=None,
        overlap_us=0.0,
        tf32_us=0.0,
        narrow_us=0.0,
        rate_ratio=None,
        tf32_ratio=None,
        samples=float(samples) if np.isfinite(samples) else None,
        notes=(),
    )


def _split(
    window: "pd.Series[float]", rows: pd.DataFrame, recorded_us: dict[str, float], notes: list[str]
) -> tuple[dict[str, float], float]:
    """One window's wall time by part, and kernel time that overlapped with other kernels; microseconds."""
    wall = float(window["wall_us"])
    kinds = _by_part(counted_once(rows), str(window["device"]).startswith("cpu"))
    own = kinds.pop("watch")
    communication = kinds.pop("communication")
    launched = float(rows["total_us"].sum())
    busy = _known(window["busy_us"], min(wall, launched))
    idle = max(0.0, wall - busy)
    watch = min(wall, _known(window["watch_us"], own))
    idle_data_us = window["idle_data_us"]
    if not np.isfinite(idle_data_us):
        idle_data_us = recorded_us.get("data", np.nan)
        if np.isfinite(idle_data_us):
            notes.append("Waiting for data is taken from the recorded steps, because nothing in the profile marks it.")
        else:
            notes.append("Nothing marks data loading, so waiting for data is part of the device's idle time.")
    idle_data = min(idle, _known(idle_data_us, 0.0))
    idle_watch = min(idle - idle_data, max(0.0, watch - own))
    watch = min(watch, own) + idle_watch
    alone = min(busy, _known(window["communication_alone_us"], max(0.0, communication - max(0.0, launched - busy))))
    computing = max(0.0, busy - alone - (watch - idle_watch))
    copies_us = window["copies_alone_us"]
    if np.isfinite(copies_us):  # not in runs of older versions
        copies_us = min(copies_us, kinds.pop("copy"), computing)
        computing -= copies_us
    kernels = sum(kinds.values())
    scale = min(1.0, computing / kernels) if kernels > 0 else 0.0
    parts = {part: us * scale for part, us in kinds.items()}
    parts.setdefault("copy", copies_us)
    parts |= {
        "data": idle_data + parts["data"],
        "gaps": idle - idle_data - idle_watch,
        "communication": alone,
        "watch": watch,
    }
    parts["other"] += max(0.0, wall - sum(parts.values()))  # work that is not in the table
    parts = {part: us if us >= MIN_PART_US else 0.0 for part, us in parts.items()}
    if not np.isfinite(idle_data_us) and not parts["data"]:
        parts["data"] = np.nan
    return parts, max(0.0, launched - busy)


def _by_part(rows: pd.DataFrame, cpu: bool) -> dict[str, float]:
    """Kernel time by part, microseconds; parts without kernels are 0.

    On a CPU operators that load data count as waiting for data; on a GPU such kernels are mostly copies.
    """
    part = part_of(rows)
    if cpu:
        part = part.mask(rows["phase"] == "data", "data")
    us = rows["total_us"].groupby(part).sum()
    return {name: float(us.get(name, 0.0)) for name in PARTS}


def part_labels(gpu_name: str, on_cpu: bool, rows: pd.DataFrame) -> dict[str, str]:
    """The label of each part on that device, of these rows of kernels."""
    labels = PARTS | (CPU_LABELS if on_cpu else AMD_LABELS if is_amd(gpu_name) else {})
    matrix_cores, others = core_names(gpu_name)
    if is_of_other_vendor(gpu_name):
        labels["tensor"] = f"GEMM/conv, on {matrix_cores}"
    if is_of_other_vendor(gpu_name) or (is_amd(gpu_name) and _narrow_share(rows) > MIN_NARROW_FRAC):
        labels["matrix"] = f"GEMM/conv, on {others}"
    return labels


MIN_NARROW_FRAC = 0.5
"""Share of 16 bits in products without matrix cores from which an AMD GPU's are told as those of its vector units."""


def part_of(rows: pd.DataFrame) -> "pd.Series[str]":
    """The part of the step's cost of each row of kernels, one of `PARTS`."""
    part = rows["category"].map(_PART_OF).fillna("other")
    part = part.mask(rows["phase"] == "optimizer", "optimizer")
    part = part.mask(is_matrix(rows) & (rows["phase"] != "optimizer"), "matrix")
    # AMD's matrix cores multiply FP32 too, at the rate of its data sheet's FP32.
    part = part.mask((part == "matrix") & (rows["tensor_core"] == "yes") & (rows["precision"] != "fp32"), "tensor")
    part = part.mask((part == "matrix") & (rows["tensor_core"] == "unknown"), "matrix_unknown")
    part = part.mask((part == "memory_bound") & (rows["tensor_core"] == "unknown"), "other")  # perhaps a product
    part = part.mask(rows["category"] == "communication", "communication")
    return part.mask(rows["phase"] == "watch", "watch")


def _tf32_share(rows: pd.DataFrame) -> float:
    """Share of TF32 in the time of the part `tensor`."""
    on = rows[(rows["tensor_core"] == "yes") & (rows["precision"] != "fp32") & (rows["phase"] != "optimizer")]
    us = float(on["total_us"].sum())
    return float(on.loc[on["precision"] == "tf32", "total_us"].sum()) / us if us > 0 else 0.0


def _narrow_share(rows: pd.DataFrame) -> float:
    """Share of 16 bits or fewer in the time of the part `matrix`."""
    rows = rows[part_of(rows) == "matrix"]
    us = float(rows["total_us"].sum())
    return float(rows.loc[rows["precision"].isin(SMALL_TYPES), "total_us"].sum()) / us if us > 0 else 0.0


def _slowed(run: Run, windows: pd.DataFrame) -> list[str]:
    """A note if profiled steps were slower than others: the profiler costs the host time."""
    steps = attempts(run)
    steps = steps.iloc[warmup_steps(len(steps)) :]
    for first, count in windows[["step", "steps"]].dropna().to_numpy(dtype=np.float64):
        steps = steps[(steps["step"] < first) | (steps["step"] > first + count)]  # the next step writes the profile
    usual = median(steps["step_ms"])
    profiled = float((windows["wall_us"] / windows["steps"]).median()) / 1e3
    if not usual or not profiled > MIN_SLOWED_RATIO * usual:
        return []
    overhead = speed_summary(run).watch_frac
    whole = f", as is recording overhead, which is {percent(overhead)} over the whole run" if overhead else ""
    return [
        f"Other steps took {number(usual, 'ms')} (median), profiled ones {number(profiled, 'ms')}: the profiler slows "
        f"the host, so idle time is overstated here{whole}."
    ]


def _lead(windows: pd.DataFrame) -> list[str]:
    """A note if the host is in the first step for long before its first kernel, with which the step begins."""
    lead = windows["lead_us"].fillna(0.0)
    if not (lead >= NOTABLE_LEAD_FRAC * windows["wall_us"]).any():
        return []
    longest = int(lead.to_numpy().argmax())
    steps, idle_ms = float(windows["steps"].fillna(1.0).iloc[longest]), float(lead.iloc[longest]) / 1e3
    when, each = "Before that", ""
    if steps > 1:
        when, each = f"Before the first of {steps:.0f} steps", f" ({number(idle_ms / steps, 'ms')} per step)"
    return [
        f"A step starts with its first kernel, as the GPU marks it. {when}, the GPU was idle for "
        f"{number(idle_ms, 'ms')}{each} while the host was already in the step; that time is not included."
    ]


def _recorded(run: Run, window: "pd.Series[float]") -> dict[str, float]:
    """Recorded time of waiting for data in the steps of a window, microseconds."""
    if not np.isfinite(window["step"]) or not np.isfinite(window["steps"]):
        return {}
    steps = attempts(run)
    within = steps[(steps["step"] >= window["step"]) & (steps["step"] < window["step"] + window["steps"])]
    return {"data": float(1e3 * within["data_ms"].sum(min_count=1))}


def _frame(parts: list[tuple[str, str, float]]) -> pd.DataFrame:
    frame = pd.DataFrame(parts, columns=["part", "label", "us"])
    whole = float(frame["us"].sum())
    frame["frac"] = frame["us"] / whole if whole > 0 else np.nan
    return frame


def _known(value: float, otherwise: float) -> float:
    return float(value) if np.isfinite(value) and value >= 0 else otherwise


def _per(values: "pd.Series[float]", steps: float) -> float | None:
    total = values.sum(min_count=1)
    return float(total) / steps if np.isfinite(total) else None
