"""What the first sentence says of the CPU, in traces without the work of a device.

cpu_sentence(run)     # 'The trace contains no device activity: on the CPU, aten::addmm takes 62.4 % of the ...'
"""

import numpy as np
import pandas as pd

from amp_core.analysis.performance.gemm_shapes import format_sizes, product
from amp_core.analysis.performance.idle_savings import longest_named
from amp_core.analysis.performance.kernels import (
    ZEROING,
    first_calls_of,
    is_matrix,
    is_trace,
    kernel_rows,
    numbers_of_import,
    on_cpu,
    takes_fused,
    window_rows,
    without_ranges,
)
from amp_core.analysis.performance.saving import MIN_SAVED_FRAC, longest_name
from amp_core.findings.cpu_families import attention_in_steps, family, in_fp64
from amp_core.findings.signals import facts, mappings
from amp_core.store.run import Run
from amp_core.text.formatting import number, percent
from amp_core.traces.collect import COMPILING
from amp_core.traces.operators import is_range

MAX_OUTSIDE_FRAC = 0.5
"""With more of the time outside operators, that comes before the longest operator."""
_SLOW_CONVOLUTIONS = ("aten::_slow_conv2d", "aten::slow_conv", "aten::thnn_conv2d")
_WITHOUT_ONEDNN = (
    " It is the convolution that torch takes where oneDNN is missing, disabled, or lacks the dtype: check "
    "torch.backends.mkldnn.is_available()."
)
"""Of the backends that aten/src/ATen/native/Convolution.cpp selects among, the last one on a CPU."""


MIN_OPTIMIZER_FRAC = 0.25
"""Share of the time from which the optimizer comes before the longest operator, if it takes more."""
MAX_SMALL_US, MAX_SMALL_FRAC = 5.0, 0.25
"""Operators of less on average, none of which takes a larger share, cost as much to call as to compute: torch takes
about a microsecond to dispatch one, and Python a few to call it."""
_ELSEWHERE = " This process waits for others, whose work the trace does not hold: profile these."
MAX_FUSED_CALLS = 3
"""Operators of an optimizer per step that fusing hardly makes fewer."""
_FUSED = ("aten::_fused_", "aten::_foreach_")


def cpu_sentence(run: Run) -> str:
    """What takes longest in a trace of a CPU: loading data, the time outside operators, the optimizer, or an operator.
    Empty for other runs."""
    rows = kernel_rows(run)
    if not is_trace(run) or rows.empty or not on_cpu(rows):
        return ""
    everything = kernel_rows(run, everything=True)  # allocations too, which start the device at their first call
    everything = everything[everything["phase"] != "watch"]
    ranks = max(1, window_rows(run)["rank"].nunique())
    everything = everything.assign(total_us=everything["total_us"] / ranks, count=everything["count"] / ranks)
    beside = _without_loading(run, everything)
    longest_us, operators = _operators(run, beside)
    if len(beside) < len(everything) and "outside of operators" not in operators:
        operators = f"outside of loading data, {operators}"
    sentence = _beside_operators(run, longest_us, operators)
    further = f"{_in_range(run)}{_idle_gpu(run)}{_own_process(run)}"
    return f"The trace contains no device activity: on the CPU, {sentence}{further}"


def _own_process(run: Run) -> str:
    """That the loop loads its data itself, as a further sentence, where loading is told; else empty."""
    windows = _windows(run)
    is_told = float(np.nan_to_num(windows["data_us"]).sum()) >= MIN_SAVED_FRAC * _wall_us(windows) > 0
    is_alone = run.head.config.get("loader") == "own process"
    return " Data is loaded in the loop's own process (num_workers=0)." if is_told and is_alone else ""


def _without_loading(run: Run, rows: pd.DataFrame) -> pd.DataFrame:
    """The rows without the operators that load data, where loading is told and these take much of the time of all."""
    windows, others = _windows(run), rows[rows["phase"] != "data"]
    wall_us, all_us = float(windows["wall_us"].sum()), float(rows["total_us"].sum())
    is_told = float(windows["data_us"].fillna(0.0).sum()) >= MIN_SAVED_FRAC * wall_us > 0
    takes = all_us - float(others["total_us"].sum()) >= MIN_SAVED_FRAC * all_us
    return others if is_told and takes and len(others) else rows


def _in_range(run: Run) -> str:
    """The range that the program marks with most of the time, as a further sentence; empty without one."""
    name, us = longest_named(window_rows(run), "host_range")
    wall_us = float(window_rows(run)["wall_us"].sum())
    if not name or us < MIN_RANGE_FRAC * wall_us:
        return ""
    return f" The program's range {name} takes {percent(us / wall_us)} of the time."


MIN_RANGE_FRAC = 0.5
"""Share of the time from which a range is told."""


def _windows(run: Run) -> pd.DataFrame:
    """Rows of `windows` whose sums are means over the ranks."""
    windows = window_rows(run)
    sums = [
        *("steps", "wall_us", "data_us", "idle_us", "idle_data_us", "optimizer_us", "host_function_us"),
        "idle_profiling_us",
    ]
    return windows.assign(**{name: windows[name] / max(1, windows["rank"].nunique()) for name in sums})


def _operators(run: Run, rows: pd.DataFrame) -> tuple[float, str]:
    """The time of what takes longest among operators in microseconds, and a sentence on it."""
    us, total, count = rows.groupby("op")["total_us"].sum(), float(rows["total_us"].sum()), int(rows["count"].sum())
    longest, longest_us = str(us.idxmax()), float(us.max())
    longest_us = max(longest_us, float(rows["total_us"][rows["name"] == longest].sum()))  # within other operators too
    in_range = is_range(longest) and us.index.str.contains("::").any()
    if not in_range:
        rows = without_ranges(rows)
        total, count = float(rows["total_us"].sum()), int(rows["count"].sum())
    advice = _WITHOUT_ONEDNN if longest.startswith(_SLOW_CONVOLUTIONS) else ""
    if rows["in_dtypes"][rows["op"] == longest].str.contains('"float"').any():  # which oneDNN always has
        advice = advice.replace(", disabled, or lacks the dtype", " or disabled")
    what = f"Python or other code in {longest}, outside of operators," if in_range else longest
    what += _serving(rows, longest, total)
    whole, whole_us = "the operators' time", total
    if in_range and (wall_us := _wall_us(_windows(run))) > 0:
        whole, whole_us = "the time", wall_us
    sentence = f"{what} takes {percent(longest_us / whole_us)} of {whole} ({number(longest_us / 1e3, 'ms')})"
    in_first = first_call(run, longest, longest_us)
    sentence += in_first or _few_calls(rows[rows["name"] == longest]) or _one_call(rows[rows["name"] == longest])
    family_us, of_family = family(rows, longest, longest_us, total)
    further = f"{attention_in_steps(rows, total)}{in_fp64(rows, total)}"
    further += _ELSEWHERE if longest.startswith("rpc_") else ""
    sentence = f"{sentence}{of_family}{WARM_UP if in_first else ''}.{advice}{further}"
    compiling_us = float(us[us.index.str.endswith(COMPILING)].sum())
    if compiling_us >= longest_us:
        share = percent(compiling_us / total)
        return compiling_us, f"torch.compile compiles for {share} of the recorded time: profile after a warm-up."
    windows = _windows(run)
    stepping = rows[(rows["phase"] == "optimizer") & ~rows["top_op"].isin(ZEROING)]
    largest_us = max(longest_us, family_us)
    optimizer_us, within_us, within = float(stepping["total_us"].sum()), total, "of the operators' time"
    if (marked_us := float(windows["optimizer_us"].sum())) > 0:  # with the Python between the operators
        optimizer_us, within_us, within = marked_us, _wall_us(windows), "of the time"
    if optimizer_us > max(largest_us, MIN_OPTIMIZER_FRAC * within_us):
        steps = float(windows["steps"].sum())
        calls = number(stepping["count"].sum() / max(steps, 1)) + (" operators per step" if steps else " operators")
        fuse = (
            ""
            if stepping["name"].str.startswith(_FUSED).any()
            or not takes_fused(run)
            or float(stepping["count"].sum()) <= MAX_FUSED_CALLS * max(steps, 1)
            else ": fused=True, from PyTorch 2.4 on, makes them one"
        )
        each = f"{number(optimizer_us / max(steps, 1) / 1e3, 'ms')}{' per step' if steps else ''}"
        share = f"{percent(optimizer_us / within_us)} {within} ({each})"
        return optimizer_us, f"the optimizer takes {share}, in {calls}{fuse}; {sentence}"
    of_operators = float(without_ranges(rows)["total_us"].sum())
    if told := _slow_calls(run, total) or _slow_steps(run) or _call_cost(run, of_operators):
        return total, f"{told}; {sentence}"
    if total / count < MAX_SMALL_US and largest_us < MAX_SMALL_FRAC * total:
        small = f"{count:,} operators take {number(total / count, 'µs')} each on average, about what it costs to call "
        return total, f"{small}them: batch what they compute, or compile it; {sentence}"
    return largest_us, sentence


def _wall_us(windows: pd.DataFrame) -> float:
    """The profiled time without the profiler's own work, microseconds."""
    return float(windows["wall_us"].sum() - np.nan_to_num(windows["idle_profiling_us"]).sum())


def _slow_steps(run: Run) -> str:
    """That steps of the same operators take unequally long, as part of a sentence; empty for others."""
    us, of_us, least_us, most_us = numbers_of_import(run, "slow_steps", "us", "of_us", "least_us", "most_us")
    if us <= 0:
        return ""
    return (
        f"the same operators take {number(least_us / 1e3)} to {number(most_us / 1e3, 'ms')} per step after the first, "
        f"{number(us / 1e3)} of {number(of_us / 1e3, 'ms')} beyond the pace of the fastest quarter of them: the "
        "processor is shared or throttled, or has fewer cores than the program and its workers have threads"
    )


def _slow_calls(run: Run, total_us: float) -> str:
    """That equal calls take far longer now and then, as part of a sentence; empty for others."""
    count, us, longest_us, usual_us = numbers_of_import(run, "slow_calls", "count", "us", "longest_us", "usual_us")
    if count < 1 or us <= 0:
        return ""
    op = facts(run.head.config, "slow_calls").get("op")
    one = f"one of {op} {number(longest_us / 1e3)} instead of {number(usual_us / 1e3, 'ms')}"
    return (
        f"{number(us / 1e3)} of the {number(total_us / 1e3, 'ms')} of operators ({percent(us / total_us)}) are what "
        f"{count:,.0f} calls take beyond the median of their operator and sizes, {one}: the processor is shared or "
        "throttled, or has fewer cores than the program has threads"
    )


def _call_cost(run: Run, total_us: float) -> str:
    """That calls of operators cost most of the time, as part of a sentence; empty for others."""
    count, each_us = numbers_of_import(run, "call_cost", "count", "each_us")
    if count < 1 or each_us <= 0:
        return ""
    return (
        f"{count:,.0f} calls of operators by others cost {number(each_us, 'µs')} each, "
        f"{percent(count * each_us / total_us)} of the operators' time, whatever they compute: time the program "
        "without the profiler, and call fewer operators, on more data each"
    )


def _serving(rows: pd.DataFrame, product: str, total_us: float) -> str:
    """What serves a product, as copies of its bias, if that takes much of the operators' time."""
    us = rows[(rows["op"] == product) & (rows["name"] != product)].groupby("name")["total_us"].sum()
    if us.empty or us.max() < MIN_SAVED_FRAC * total_us:
        return ""
    return f", with {us.idxmax()} within it ({percent(float(us.max()) / total_us)}),"


def first_call(run: Run, op: str, op_us: float = np.inf) -> str:
    """That nearly all of an operator's time is in its first calls; empty for others."""
    calls = first_calls_of(run, op, op_us)
    return f", {number(calls.us / 1e3, 'ms')} of it in its {calls.which}" if calls is not None else ""


WARM_UP = ": profile after a warm-up"


MIN_OF_FEW_FRAC, MAX_FEW_FRAC = 0.9, 0.1
"""Share of an operator's time from which calls of one size are named, if they are no larger a share of its calls."""


def _few_calls(rows: pd.DataFrame) -> str:
    """The sizes of few calls of a product that take nearly all of its time."""
    shapes, calls = longest_name(rows, "in_shapes"), float(rows["count"].sum())
    of_shapes = rows[rows["in_shapes"] == shapes]
    us, few = float(of_shapes["total_us"].sum()), float(of_shapes["count"].sum())
    made = product(str(rows["op"].iloc[0]), shapes)
    if made is None or us < MIN_OF_FEW_FRAC * float(rows["total_us"].sum()) or few > MAX_FEW_FRAC * calls:
        return ""
    return f", nearly all of it in {few:,.0f} of its {calls:,.0f} calls ({format_sizes(made.sizes)})"


def _one_call(rows: pd.DataFrame) -> str:
    """That nearly all of an operator's time is in one of many calls; empty for others."""
    calls, longest_us = float(rows["count"].sum()), float(rows["longest_us"].max())
    if calls * MAX_FEW_FRAC < 1 or not longest_us >= MIN_OF_FEW_FRAC * float(rows["total_us"].sum()):
        return ""
    return f", nearly all of it in one of its {calls:,.0f} calls"


def _beside_operators(run: Run, longest_us: float, operator: str) -> str:
    """The sentence on operators, with the time in which data is loaded or no operator runs. The longest comes
    first."""
    windows = _windows(run)
    wall_us = _wall_us(windows)
    if wall_us <= 0:  # the windows are damaged
        return operator
    data_us, idle_us, idle_data_us, profiling_us = (
        float(np.nan_to_num(windows[f"{name}_us"]).sum()) for name in ("data", "idle", "idle_data", "idle_profiling")
    )
    outside_us = idle_us - idle_data_us - profiling_us
    if data_us > max(longest_us, outside_us):
        steps = max(1.0, float(windows["steps"].sum()))
        each = f"{number(data_us / steps / 1e3, 'ms')}{' per step' if windows['steps'].sum() else ''}"
        return f"loading data takes {percent(data_us / wall_us)} of the time ({each}); {operator}"
    if outside_us > max(MAX_OUTSIDE_FRAC * wall_us, longest_us):
        share, wall = percent(outside_us / wall_us), number(wall_us / 1e3, "ms")
        within = _in_function(windows, outside_us)
        beside = ", beside loading data" if data_us > 0 else ""
        what = f"in which Python or other code does{within}"
        return f"no operator runs for {share} of the {wall}{beside}, {what}; {operator}"
    if data_us >= MIN_SAVED_FRAC * wall_us:
        return f"{operator} Loading data takes {percent(data_us / wall_us)} of the time."
    return operator


def _in_function(windows: pd.DataFrame, outside_us: float) -> str:
    """The Python function in which most of the time without an operator is, where the trace has Python's stacks."""
    us = windows[windows["host_function"] != ""].groupby("host_function")["host_function_us"].sum()
    if us.empty or us.max() < MIN_FUNCTION_FRAC * outside_us:
        return ""
    return f", {number(float(us.max()) / 1e3, 'ms')} of it in {us.idxmax()}"


MIN_FUNCTION_FRAC = 0.2
"""Share of the time outside of operators from which the function with most of it is named."""


def _idle_gpu(run: Run) -> str:
    """That the machine has a GPU of which the trace has nothing."""
    gpus = mappings(run.head.environment, "gpus")
    name = str(gpus[0].get("name", "")) if gpus else ""
    if not name:
        return ""
    if kernel_rows(run)["op"].str.contains(_OF_THE_CPU).any():
        return f" The machine's GPU, {name}, is not used: move the model to it."
    computes = is_matrix(kernel_rows(run)).any()
    do = "record its activity, or move the model to it" if computes else "record its activity, if the program uses it"
    return f" The machine's GPU, {name}, has nothing in the trace: {do}."


_OF_THE_CPU = r"mkldnn|onednn|_for_cpu$"
"""In the names of operators that run on a CPU alone."""
