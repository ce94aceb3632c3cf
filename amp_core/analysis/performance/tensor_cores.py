"""The share of a profiled window in kernels that use tensor cores, and the kernels that took the time.

    >>> use = tensor_core_use(run)
    >>> use.tensor_frac, use.matrix_tensor_frac, use.unknown_frac
    (0.58, 0.96, 0.02)
    >>> kernel_table(run, by="module").head()

Shares are of kernel time, without AMPscope's own kernels, copies and fills. `unknown` is time in kernels whose names do
not show whether they use tensor cores; the true share is between `yes` and `yes` + `unknown`. On a CPU the rows are
operators, and there are no shares of tensor cores.

The hardware counter (GPM, Hopper and newer) measures something else: the share of time in which the tensor pipe was
busy. A kernel that uses tensor cores also loads tiles, waits and writes its result, so the counter is below the share
of time in such kernels; half of it is usual, and far less means small or badly shaped products.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from amp_core.analysis.performance.devices import not_recorded_reasons
from amp_core.analysis.performance.gpus import profiled_gpu
from amp_core.analysis.performance.kernels import call_counts, kernel_rows, on_cpu, window_rows
from amp_core.analysis.performance.matrix_kinds import is_matrix
from amp_core.analysis.performance.step_cost import part_labels, part_of
from amp_core.analysis.steps import attempts, warmup_steps
from amp_core.schema import RunError
from amp_core.store.run import Run

BY = ("kernel", "op", "module", "phase", "category", "precision")
"""The groupings of `kernel_table`."""
MIN_COUNTER_SAMPLES = 3
"""With fewer device samples within the window, those of the whole run after its warm-up are used."""


@dataclass(frozen=True)
class TensorCoreUse:
    """Use of tensor cores in a run's profiled windows. Shares are 0–1; None without a total."""

    windows: int
    """Number of profiled windows."""
    on_cpu: bool
    device: str
    device_name: str
    capability: tuple[int, int] | None
    has_tensor_cores: bool | None
    """None if the capability is not known."""
    kernel_us: float
    """Time of all kernels."""
    matrix_us: float
    """Time of those that multiply matrices."""
    tensor_frac: float | None
    """Share of kernel time in kernels that use tensor cores."""
    unknown_frac: float | None
    """Share of kernel time in unclassified kernels."""
    matrix_frac: float | None
    """Share of kernel time in kernels that multiply matrices."""
    matrix_tensor_frac: float | None
    """Share of matrix time in kernels that use tensor cores."""
    matrix_unknown_frac: float | None
    """Share of GEMM/conv time in unclassified kernels."""
    tensor_wall_frac: float | None
    """Time in kernels that use tensor cores over the window's wall time, for comparison with the counter."""
    counter_frac: float | None
    """Mean of `tensor_active_frac`: share of time in which the tensor pipe was busy, by hardware counter."""
    counter_samples: int
    counter_where: str
    """The time that the counter's mean is over: `window`, `run` or empty."""
    counter_why: str
    """The run's own reason for a missing counter; "" without one."""


def tensor_core_use(run: Run, step: int | None = None) -> TensorCoreUse:
    """Use of tensor cores in the window that begins at `step`, or in all windows."""
    rows, windows = kernel_rows(run, step), window_rows(run, step)
    total, matrix = float(rows["total_us"].sum()), rows[is_matrix(rows)]
    matrix_us = float(matrix["total_us"].sum())
    cpu = on_cpu(rows)
    device = str(rows["device"].iloc[0]) if len(rows) else ""
    named = windows["device_name"][windows["device_name"] != ""]
    gpu = profiled_gpu(run, device, str(named.iloc[0]) if len(named) else "")
    known = not cpu and total > 0
    wall = float(windows["wall_us"].sum())
    tensor_us = _time(rows, "yes")
    counter, samples, where = _counter(run, windows) if known else (None, 0, "")
    return TensorCoreUse(
        windows=len(rows[["step", "rank", "device"]].drop_duplicates()),
        on_cpu=cpu,
        device=device,
        device_name="" if cpu else gpu.name,
        capability=None if cpu else gpu.capability,
        has_tensor_cores=None if cpu else gpu.has_tensor_cores,
        kernel_us=total,
        matrix_us=matrix_us,
        tensor_frac=tensor_us / total if known else None,
        unknown_frac=_time(rows, "unknown") / total if known else None,
        matrix_frac=matrix_us / total if total > 0 else None,
        matrix_tensor_frac=_time(matrix, "yes") / matrix_us if known and matrix_us > 0 else None,
        matrix_unknown_frac=_time(matrix, "unknown") / matrix_us if known and matrix_us > 0 else None,
        tensor_wall_frac=min(1.0, tensor_us / wall) if known and wall > 0 else None,
        counter_frac=counter,
        counter_samples=samples,
        counter_where=where,
        counter_why=_why_not(run) if known and counter is None else "",
    )


def profiled_windows(run: Run) -> pd.DataFrame:
    """The windows of a run, one row each: step (its first; NaN if the trace has no step markers), steps, devices
    (number of profiled devices and ranks), kernel_us (of copies, where there is nothing else)."""
    rows = kernel_rows(run)
    rows = kernel_rows(run, everything=True) if rows.empty else rows
    each = rows.groupby("step", dropna=False, sort=True)
    table = each.agg(steps=("steps", "max"), kernel_us=("total_us", "sum")).reset_index()
    places = rows[["step", "rank", "device"]].drop_duplicates().groupby("step", dropna=False, sort=True).size()
    table.insert(2, "devices", places.to_numpy())
    return table


def kernel_table(run: Run, by: str = "kernel", step: int | None = None) -> pd.DataFrame:
    """Kernel time summed over `by` (one of `BY`), the longest first.

    Columns: `name` (the kernel, operator, module, …; "" where not known), count (launches; on a CPU calls), total_us,
    time_frac (of all kernel time), matrix_frac, tensor_frac and unknown_frac (of the row's own time; NaN on a CPU). By
    kernel also tensor_core, precision, category, op, module, phase of most of its time, and part and label (of
    `step_cost`). Raises `RunError` for an unknown `by`.
    """
    if by not in BY:
        raise RunError(f"by={by!r} is unknown; choose one of {', '.join(BY)}")
    rows = kernel_rows(run, step)
    cpu = on_cpu(rows)
    if by == "op":
        rows["count"] = call_counts(rows)
    rows["name"] = rows["name" if by == "kernel" else by]
    us = rows["total_us"]
    for column, which in (
        ("matrix_us", is_matrix(rows)),
        ("tensor_us", rows["tensor_core"] == "yes"),
        ("unknown_us", rows["tensor_core"] == "unknown"),
    ):
        rows[column] = us.where(which, 0.0)
    keys = ["name", "tensor_core", "precision", "category"] if by == "kernel" else ["name"]
    parts = ["count", "total_us", "matrix_us", "tensor_us", "unknown_us"]
    table = rows.groupby(keys, as_index=False, sort=False)[parts].sum()
    table["time_frac"] = table["total_us"] / us.sum()
    for column in ("matrix", "tensor", "unknown"):
        table[f"{column}_frac"] = table[f"{column}_us"] / table["total_us"]
    if cpu:
        table[["tensor_frac", "unknown_frac"]] = np.nan
    shown = ["name", "count", "total_us", "time_frac", "matrix_frac", "tensor_frac", "unknown_frac"]
    if by == "kernel":
        longest = rows.sort_values("total_us", ascending=False, kind="stable").drop_duplicates(keys)
        table = table.merge(longest[[*keys, "op", "module", "phase"]], on=keys, how="left")
        windows = window_rows(run, step)
        gpu = profiled_gpu(run, *(str(windows[c].iloc[0]) if len(windows) else "" for c in ("device", "device_name")))
        table["part"] = part_of(table)
        table["label"] = table["part"].map(part_labels(gpu.name, cpu, rows))
        shown += [*keys[1:], "op", "module", "phase", "part", "label"]
    return table[shown].sort_values("total_us", ascending=False, kind="stable").reset_index(drop=True)


def tensor_core_shares(run: Run, step: int | None = None) -> pd.DataFrame:
    """Kernel time by use of tensor cores: one row per `of` (`all kernels`, `matrix kernels`) and answer.

    Columns: of, answer (one of `ANSWERS`), us, frac (of the time that `of` names). Empty on a CPU.
    """
    rows = kernel_rows(run, step)
    rows["answer"] = rows["tensor_core"].where(is_matrix(rows) | (rows["tensor_core"] != "no"), "none")
    rows_by_answer = []
    for group, part in (("all kernels", rows), ("matrix kernels", rows[is_matrix(rows)])):
        us = part.groupby("answer")["total_us"].sum().reindex(ANSWERS, fill_value=0.0)
        whole = float(us.sum())
        if whole > 0 and not on_cpu(rows):
            rows_by_answer += [
                (group, answer, time, time / whole) for answer, time in us.items() if time or answer != "none"
            ]
    return pd.DataFrame(rows_by_answer, columns=["of", "answer", "us", "frac"])


ANSWERS = ("yes", "unknown", "no", "none")
"""Whether a kernel uses tensor cores: `no` if it multiplies matrices, `none` if it does not."""


def _time(rows: pd.DataFrame, answer: str) -> float:
    return float(rows.loc[rows["tensor_core"] == answer, "total_us"].sum())


def _counter(run: Run, windows: pd.DataFrame) -> tuple[float | None, int, str]:
    """Mean tensor-active share of the device samples, their number, and whether they are from the windows."""
    device = run.device
    device = device[device["tensor_active_frac"].notna()]
    if device.empty:
        return None, 0, ""
    steps = attempts(run)
    time_s = steps["time_s"].astype(float).to_numpy()
    within = np.zeros(len(device), dtype=bool)
    at = device["time_s"].astype(float).to_numpy()
    number = steps["step"].to_numpy()
    for first, count in windows[["step", "steps"]].dropna().to_numpy(dtype=np.float64):
        last = time_s[number == first + count - 1]
        before = time_s[number == first - 1]
        if len(last):
            within |= (at >= (before[0] if len(before) else 0.0)) & (at <= last[0])
    chosen, where = device[within], "window"
    if len(chosen) < MIN_COUNTER_SAMPLES:
        warm = warmup_steps(len(steps))
        since = time_s[warm - 1] if warm else -np.inf
        until = time_s[-1] if len(time_s) else np.inf
        chosen, where = device[(at >= since) & (at <= until)], "run"
    if chosen.empty:
        return None, 0, ""
    return float(chosen["tensor_active_frac"].mean()), len(chosen), where


def _why_not(run: Run) -> str:
    """Why the tensor pipe was not counted: the recorder's reason for that column, or for the whole device."""
    parts = [part for detail in not_recorded_reasons(run) for part in detail.split("; ")]
    about = [part for part in parts if "tensor_active_frac" in part or part.startswith("device samples")]
    return about[0].partition(": ")[2] if about else ""
