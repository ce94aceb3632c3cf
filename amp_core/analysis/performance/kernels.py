"""Typed rows of the tables `kernels` and `windows`, of one or all windows.

    rows = kernel_rows(run)                 # without AMPscope's own kernels, null texts as ""
    windows = window_rows(run, step=50)     # those that begin at step 50

If another program recorded operators of the CPU beside kernels of a GPU, only the kernels are kept.
"""

import functools

import numpy as np
import pandas as pd

from amp_core.hardware.kernel_names import COPIES
from amp_core.store.run import Run
from amp_core.traces.collect import COMPILING
from amp_core.traces.operators import is_compiled_code, is_range
from amp_core.traces.replay import REACHES

_TEXTS = (
    *("name", "tensor_core", "precision", "op", "top_op", "module", "phase", "device", "category", "in_shapes"),
    *("in_dtypes", "serves"),
)
_NUMBERS = (
    *("step", "steps", "count", "total_us", "rank", "longest_us", "beside_us", "counted_us", "moved_bytes"),
    "lone_us",
    "scores_us",
    "fused_away_us",
    "op_calls",
    "causal_count",
    "convolution_flops",
)
_FUNCTIONS = (
    "host_function",
    "host_second",
    "data_function",
    "longer_function",
    "longer_call",
    "longer_place",
    "longer_second",
)
_HOST_TEXTS = (
    "host_op",
    "host_call",
    "host_call_kind",
    "host_call_op",
    "host_rest_op",
    "host_kernel",
    "host_range",
    "host_between",
)
_WINDOW_NUMBERS = (
    "step",
    "steps",
    "wall_us",
    "busy_us",
    "idle_us",
    "data_us",
    "idle_data_us",
    "optimizer_us",
    "watch_us",
    "kernel_us",
    "launches",
    "cast_us",
    "communication_us",
    "communication_alone_us",
    "idle_between_collectives_us",
    "copies_alone_us",
    "syncs",
    "last_syncs",
    "inner_syncs",
    "sync_us",
    "rank",
    "idle_sync_us",
    "idle_syncs",
    "idle_wait_us",
    "idle_wait_lost_us",
    "idle_latency_us",
    "idle_filling_us",
    "idle_late_start_us",
    "idle_graph_us",
    "idle_handover_us",
    "idle_profiling_us",
    "idle_dispatch_us",
    "idle_elsewhere_us",
    "idle_copy_us",
    "idle_copy_sync_us",
    "idle_between_waits_us",
    "launches_between_waits",
    "host_op_us",
    "host_function_us",
    "host_second_us",
    "host_function_launches",
    "data_function_us",
    "host_call_us",
    "lead_us",
    "lead_data_us",
    "products",
    "host_call_op_us",
    "host_rest_op_us",
    "host_kernel_us",
    "host_range_us",
    "host_us",
    "idle_sync_op_us",
    "idle_wait_op_us",
    "idle_wait_sync_us",
    "host_outside_us",
    "host_between_us",
    "alone_loading_us",
    "longest_idle_us",
    "longer_gap_steps",
    "longer_optimizer_us",
    "longer_function_us",
    "longer_function_launches",
    "longer_call_us",
    "longer_compile_us",
    "longer_place_us",
    "longer_second_us",
    "longer_host_wait_us",
    "late_until_us",
    "late_us",
    "late_step",
    "late_step_us",
    "lead_outside_us",
    "began_us",
    "pause_us",
    *REACHES,
    "unwaited_us",
    "unwaited_op_us",
    "unwaited_alone_us",
    "optimizer_sooner_us",
)


def kernel_rows(run: Run, step: int | None = None, everything: bool = False) -> pd.DataFrame:
    """Rows of `kernels` with total_us above 0, of the window that begins at `step` or of all; null texts are "".

    Kernels launched outside of the windows are left out.

    `tensor_core` is yes, no, unknown, or "" on a CPU. There, what serves a product has that as `op`. Unless
    `everything` is true, kernels of watching itself, copies and fills are left out.
    """
    return run.cached_frame(["kernels"], _kernel_rows, step, everything)


def _kernel_rows(run: Run, step: int | None, everything: bool) -> pd.DataFrame:
    frame = _typed(run.kernels, _TEXTS, _NUMBERS)
    if frame.empty:
        return frame
    frame = _with_what_serves(frame)
    frame["total_us"] = frame["total_us"].where(np.isfinite(frame["total_us"]), 0.0)
    frame = frame[(frame["total_us"] > 0) & _chosen(frame, step)]
    if frame["step"].notna().any():  # in a trace with marked steps, a row without a step was launched outside of them
        frame = frame[frame["step"].notna()]
    if not everything:
        frame = frame[(frame["phase"] != "watch") & ~frame["category"].isin(COPIES)]
    on_cpu = frame["device"].str.startswith("cpu")
    frame = _accelerators_alone(frame)
    known = frame["tensor_core"].isin(["yes", "no", "unknown", ""])
    frame["tensor_core"] = frame["tensor_core"].where(known, "unknown").where(~on_cpu, "")
    return frame.reset_index(drop=True)


def _with_what_serves(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows of what serves a product, as the copy of its bias, with that product as `op`, and its category."""
    serving = frame["serves"] != ""
    if not serving.any():
        return frame
    own = frame[~serving].drop_duplicates("name").set_index("name")["category"]
    frame["op"] = frame["op"].mask(serving, frame["serves"])
    frame["category"] = frame["category"].mask(serving, frame["serves"].map(own).fillna("gemm"))
    return frame


def window_rows(run: Run, step: int | None = None) -> pd.DataFrame:
    """Rows of `windows` of the window that begins at `step`, or of all; only those of GPUs if there are any. The wait
    before the first kernel is part of a window of several steps."""
    return run.cached_frame(["windows"], _window_rows, step)


def _window_rows(run: Run, step: int | None) -> pd.DataFrame:
    texts = (
        "device",
        "device_name",
        "sync_op",
        "inner_sync_op",
        "idle_sync_op",
        "idle_wait_op",
        "unwaited_op",
        *_HOST_TEXTS,
        *_FUNCTIONS,
    )
    frame = _typed(run.windows, texts, _WINDOW_NUMBERS)
    if frame.empty:
        return frame
    frame = _accelerators_alone(frame[_chosen(frame, step)]).reset_index(drop=True)
    return _with_first_wait(frame)


def _with_first_wait(frame: pd.DataFrame) -> pd.DataFrame:
    """Windows of several steps with the wait before the first kernel, as before those of the other steps: the mean is
    then the time from step to step. One step alone is as long as the device marks it."""
    several = frame["steps"] > 1
    lead, data = (frame[name].where(several, 0.0).fillna(0.0) for name in ("lead_us", "lead_data_us"))
    for name, more in (("wall_us", lead), ("idle_us", lead), ("idle_data_us", data)):
        frame[name] = frame[name] + more
    for name in ("lead_us", "lead_outside_us"):
        frame[name] = frame[name].mask(several, 0.0)
    frame["lead_data_us"] = frame["lead_data_us"].mask(several & frame["lead_data_us"].notna(), 0.0)
    return frame


def is_trace(run: Run) -> bool:
    """Whether the run was imported from traces of torch.profiler."""
    return run.head.config.get("format") == "torch.profiler"


def holds_collectives_alone(run: Run) -> bool:
    """Whether a trace holds collectives and nothing else, as one from which the rest was removed: whether a device
    computes beside and between them is unknown."""
    rows = kernel_rows(run, everything=True)
    without = is_trace(run) and run.head.config.get("without_operators") is True
    return bool(without and len(rows) and (rows["category"] == "communication").all())


def traced_step_us(run: Run) -> float | None:
    """Mean wall time of a step in an imported trace, over its windows, in microseconds, of a CPU without the profiler's
    own work; None for other runs and where the trace has no step markers."""
    if run.head.config.get("source") != "import":
        return None
    windows = window_rows(run)
    steps, wall = float(windows["steps"].sum()), float(windows["wall_us"].sum())
    if windows["device"].str.startswith("cpu").all():
        wall -= float(windows["idle_profiling_us"].fillna(0.0).sum())
    return wall / steps if steps > 0 and np.isfinite(wall) else None


def _accelerators_alone(frame: pd.DataFrame) -> pd.DataFrame:
    """Without the rows of a CPU, where others are among them."""
    on_cpu = frame["device"].str.startswith("cpu")
    return frame[~on_cpu] if not on_cpu.all() else frame


def on_cpu(rows: pd.DataFrame) -> bool:
    """Whether the rows of `kernel_rows` are operators of a CPU."""
    return bool(len(rows)) and bool((rows["tensor_core"] == "").all())


def call_counts(rows: pd.DataFrame) -> "pd.Series[float]":
    """Of each row, by how many calls of its operator: 0 of what serves a product on a CPU, which is no call of it."""
    serves = (rows["tensor_core"] == "") & (rows["op"] != "") & (rows["op"] != rows["name"])
    return rows["count"].where(~serves, 0.0)


def without_ranges(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of a CPU without the ranges of the program's own among its operators: what these take beside operators
    is none's. Those of compiling, and of compiled code, stay."""
    if not rows["op"].str.contains("::").any():  # operators of PyTorch up to 1.4 look like ranges
        return rows
    keeps = rows["op"].str.endswith(COMPILING) | rows["op"].map(is_compiled_code).astype(bool)
    return rows[~rows["op"].map(is_range).astype(bool) | keeps]


MIN_MANY_COLLECTIVES = 50
"""Collectives per step of which the idle time between them is told with them."""


def between_collectives_us(run: Run, least_us: float) -> float:
    """How long per step (or window) devices are idle between the collectives of a loop that makes many of them, the
    mean in microseconds; 0 for others, and below `least_us`."""
    rows, windows = kernel_rows(run), window_rows(run)
    per = float(windows["steps"].fillna(0.0).sum()) or float(max(1, len(windows)))
    if float(rows["count"][rows["category"] == "communication"].sum()) < MIN_MANY_COLLECTIVES * per:
        return 0.0
    us = float(windows["idle_between_collectives_us"].fillna(0.0).sum()) / per
    return us if us >= least_us else 0.0


def mostly_misclocked(run: Run) -> bool:
    """Whether most of a device's work has times that are none of the trace, so that only its length is known."""
    us, kept_us = numbers_of_import(run, "misclocked", "us", "kept_us")
    return us > kept_us


def left_of_operators(run: Run) -> float:
    """The share of the operators that is left in a trace from which the others were removed with their kernels, so that
    neither idle time nor overlap is known; 0 where the kernels are there. Of several ranks, by the first."""
    return numbers_of_import(run, "sampled", "operators_frac")[0]


def numbers_of_import(run: Run, entry: str, *names: str) -> list[float]:
    """Numbers of an entry that the import of a trace keeps; 0 for what is missing or damaged."""
    known = run.head.config.get(entry) if is_trace(run) else None
    values = [known.get(name) for name in names] if isinstance(known, dict) else [None] * len(names)
    return [value if isinstance(value, int | float) else 0 for value in values]


def counted_once(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with times that add up to no more than the device was busy: those of kernels that run at the same time
    as others count once. Rows of runs that do not tell these times stay as they are."""
    share = (rows["counted_us"] / rows["total_us"]).where(rows["total_us"] > 0).fillna(1.0).clip(0.0, 1.0)
    return rows.assign(total_us=rows["total_us"] * share, longest_us=rows["longest_us"] * share)


def _typed(frame: pd.DataFrame, texts: tuple[str, ...], numbers: tuple[str, ...]) -> pd.DataFrame:
    """Only these columns, as text and as floats; a missing column is "" or NaN."""
    if frame.empty:
        return _no_rows(texts, numbers).copy()
    columns: dict[str, pd.Series[str] | pd.Series[float]] = {}
    for name in texts:
        column = frame[name] if name in frame else pd.Series("", index=frame.index, dtype=str)
        is_text = column.dtype == "str"  # from pandas 3 on
        columns[name] = column.fillna("") if is_text else column.astype(object).where(column.notna(), "").astype(str)
    for name in numbers:
        columns[name] = frame[name].astype(float) if name in frame else pd.Series(np.nan, index=frame.index)
    return pd.DataFrame(columns, index=frame.index)


@functools.cache
def _no_rows(texts: tuple[str, ...], numbers: tuple[str, ...]) -> pd.DataFrame:
    dtypes = dict.fromkeys(texts, "str") | dict.fromkeys(numbers, "float64")
    return pd.DataFrame({name: pd.Series(dtype=dtype) for name, dtype in dtypes.items()})


def _chosen(frame: pd.DataFrame, step: int | None) -> "pd.Series[bool]":
    return frame["step"].notna() | True if step is None else frame["step"] == step
