"""Upper bounds on the time that each change could save per step of a trace, the largest first.

    >>> for saving in possible_savings(run).ranked: print(saving.code, saving.saved_us / saving.step_us, saving.what)
    exposed-communication 0.64 The GPU only communicates for 64 % of the step

Each bound stands alone; they do not add up. Idle time and communication can be hidden completely. Products in
FP32 gain the ratio of the data sheet's dense rates; products on tensor cores gain the distance to `GOOD_PEAK_FRAC` of
that rate, or to the time that memory needs. Memory-bound kernels, one per operator, are assumed to fuse to half their
time (`FUSED_FRAC`): each value is then read and written once instead of twice.
"""

import re
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from amp_core.analysis.performance.collectives import collective_rows, gradient_dtype, waited_for
from amp_core.analysis.performance.eligible_ops import matrix_ops
from amp_core.analysis.performance.gemm_shapes import product
from amp_core.analysis.performance.gpus import profiled_gpu
from amp_core.analysis.performance.kernels import is_matrix, is_trace, kernel_rows, window_rows
from amp_core.analysis.performance.step_cost import StepCost, step_cost
from amp_core.formats import memory_bits_of
from amp_core.hardware.data_sheets import Rates, dense_rates
from amp_core.hardware.kernel_names import COPIES
from amp_core.store.run import Run
from amp_core.text.formatting import mean_count, number, percent

MIN_SAVED_FRAC = 0.05
"""Smaller savings are not reported."""
MAX_UNKNOWN_FRAC = 0.2
"""With more unclassified kernel time the shares of GEMM/conv are uncertain."""
GOOD_PEAK_FRAC = 0.6
"""Share of the dense rate that large, well-shaped products reach on current GPUs (cuBLAS: 60 to 75 %)."""
SLOW_PEAK_FRAC = 0.3
"""Products below this share of the dense rate are slow."""
FUSED_FRAC = 0.5
GRAPH_START = "for a captured graph to start"
LAUNCH_US = 10.0
"""Approximate cost of launching a kernel on the host: shorter kernels cannot keep a GPU busy. Decides where the lengths
of the gaps between kernels are not recorded."""
MIN_KERNEL_US = 1e-3
"""Less is no kernel time: a trace may hold copies alone."""
UNKNOWN_RATIO = 2.0
"""Gain of 16 bits over FP32 that is assumed where the data sheet is not listed: half the bytes."""


@dataclass(frozen=True)
class Saving:
    """One possible saving."""

    code: str
    """Code of the finding."""
    saved_us: float
    """Upper bound in microseconds per step (or window)."""
    step_us: float
    what: str
    where: str
    here: str = ""
    """What the trace adds to the finding's advice: sizes to pad to, the rank that others wait for."""
    ideal_us: float = 0.0
    """Of slow products: what one call of the slowest operator would take at a good share of the peak rate."""
    lead_us: float = 0.0
    """Part of `saved_us` before the first kernel, with which the step begins where the device marks it; beside it."""
    is_sure: bool = True
    """False if the time may be the profiler's own: perhaps a step without it has nothing to save."""

    @property
    def rank_us(self) -> float:
        """By how much it is ranked: a saving that is not sure by half of it."""
        return self.saved_us if self.is_sure else self.saved_us / 2

    @property
    def share(self) -> float:
        """The saving as a share of the step; with `lead_us`, of the step and that time."""
        return self.saved_us / (self.step_us + self.lead_us)

    def how_much(self, unit: str = "") -> str:
        """`up to 21.3 of 33.1 ms`, of one `unit` if that is given. What comes before the step is told apart."""
        per, step = f" per {unit}" if unit else "", number(self.step_us / 1e3, "ms")
        if not self.lead_us:
            return f"up to {number(self.saved_us / 1e3)} of {step}{per}"
        inside, before = number(round(self.saved_us - self.lead_us, 1) / 1e3), number(self.lead_us / 1e3, "ms")
        return (
            f"up to {number(self.saved_us / 1e3, 'ms')}{per}: {inside} of {step}, and {before} before the first kernel"
        )


@dataclass(frozen=True)
class Savings:
    """All possible savings in a trace."""

    ranked: tuple[Saving, ...]
    """The largest `rank_us` first."""
    unit: str
    """`step` or `profiled window`."""
    trains: bool
    """Whether the trace contains backward or optimizer kernels."""
    cost: StepCost
    unknown_frac: float
    """Share of the kernel time that cannot be classified by kernel name."""
    unknown_kernel: str
    """The longest of these kernels; empty if there are none."""
    unknown_kernel_frac: float
    """Its share of the step."""
    peak_frac: float | None
    """Achieved share of the data sheet's rate of GEMM/conv on tensor cores; None if not known of half their time."""
    flops_per_s: float | None
    """Achieved rate of the same; None if the shapes of half of them were not recorded."""


def possible_savings(run: Run) -> Savings | None:
    """Possible savings in an imported trace; None for other runs, for a CPU and without a profiled window."""
    if not is_trace(run):
        return None
    return run.cached(["kernels", "windows", "collectives", "steps"], _possible_savings)


def _possible_savings(run: Run) -> Savings | None:
    cost, rows = step_cost(run), kernel_rows(run)
    if cost.source != "profile" or cost.on_cpu or kernel_rows(run, everything=True).empty:
        return None
    windows = window_rows(run)
    steps = float(windows["steps"].sum()) if cost.steps else float(len(windows))
    unit = "step" if cost.steps else "profiled window"
    gpu = profiled_gpu(run, str(windows["device"].iloc[0]), str(windows["device_name"].iloc[0]))
    rates = dense_rates(gpu.name)
    savings = [
        *_idle(windows, rows, cost, steps, unit),
        *_alone(run, cost, rows, unit),
        *_types(rows, cost, rates, steps, unit, has_tensor_cores=gpu.has_tensor_cores is not False),
        *_slow(run, cost, rates, steps, unit),
        *_memory_bound(rows, cost, steps, unit),
    ]
    if not windows["device"].str.startswith("cuda").all():
        savings = [replace(c, what=c.what.replace("The GPU", "The device")) for c in savings]
    worth = [c for c in savings if c.saved_us >= MIN_SAVED_FRAC * cost.step_us]
    unknown = rows[rows["tensor_core"] == "unknown"]
    share = float(unknown["total_us"].sum()) / max(float(rows["total_us"].sum()), MIN_KERNEL_US)
    if (
        share > MAX_UNKNOWN_FRAC
        and not rows["device"].str.startswith(("mtia", "hpu", "xpu", "mlu", "npu", "privateuse")).any()
    ):
        what = f"{100 * share:.0f} % of kernel time is in kernels that cannot be classified by name"
        worth.append(Saving("unknown-kernels", 0.0, cost.step_us, what, _longest(unknown, "name")))
    trains = bool(rows["phase"].isin(["backward", "optimizer"]).any() or rows["name"].str.contains(_OF_TRAINING).any())
    ranked = tuple(sorted(worth, key=lambda c: -c.rank_us))
    unknown_us = float(unknown.groupby("name")["total_us"].sum().max()) / steps if len(unknown) else 0.0
    kernel, its_share = _longest(unknown, "name"), unknown_us / cost.step_us
    return Savings(
        ranked, unit, trains, cost, share, kernel, its_share, _mean(run, "of_peak_frac"), _mean(run, "flops_per_s")
    )


_OF_TRAINING = re.compile(r"(?i)backward|_bwd_|grad_input|multi_tensor_apply")
"""Kernels by whose names a trace without phases is one of training."""


def _mean(run: Run, column: str) -> float | None:
    """The mean of a column of `matrix_ops` over the time on tensor cores; None if not known of half of it."""
    ops = matrix_ops(run)
    ops = ops[ops["tensor_core"] == "yes"]
    known = ops[ops[column].notna()]
    us = float(known["total_us"].sum())
    if not us or us < 0.5 * float(ops["total_us"].sum()):
        return None
    return float((known[column] * known["total_us"]).sum()) / us


def _share(us: float, cost: StepCost) -> str:
    return f"{100 * us / cost.step_us:.0f} %"


def _idle(windows: pd.DataFrame, rows: pd.DataFrame, cost: StepCost, steps: float, unit: str) -> list[Saving]:
    data, gaps = np.nan_to_num(cost.us("data")), np.nan_to_num(cost.us("gaps"))
    sync = min(gaps, float(windows["idle_sync_us"].fillna(0.0).sum()) / steps)
    wait = min(gaps - sync, float(windows["idle_wait_us"].fillna(0.0).sum()) / steps)
    syncing = windows["sync_op"][windows["sync_op"] != ""]
    where = str(syncing.iloc[0]) if len(syncing) else "synchronizing calls"
    in_syncs = f" ({where})" if len(syncing) else ""
    number_of = (
        f"{mean_count(cost.syncs)} synchronization{'s' if cost.syncs != 1 else ''}"
        if cost.syncs
        else "synchronizations"
    )
    unexplained = float(windows["idle_late_start_us"].fillna(0.0).sum()) / steps >= wait / 2 > 0
    waited_for = ": it waits for another GPU or rank, the host, or the start of a CUDA graph"
    if float(windows["idle_graph_us"].fillna(0.0).sum()) / steps >= wait / 2 > 0:
        waited_for = f": it waits {GRAPH_START}"
    elif unexplained:
        waited_for = ", and nothing in the trace shows what it waits for"
        if float(windows["sync_us"].fillna(0.0).sum()) / steps >= wait / 2:  # otherwise the host runs ahead of it
            waited_for += f"; the host waits meanwhile, in {number_of}{in_syncs}"
    latency = float(windows["idle_latency_us"].fillna(0.0).sum()) / steps
    lead, lead_data = (float(windows[name].fillna(0.0).sum()) / steps for name in ("lead_us", "lead_data_us"))
    lead -= lead_data
    host = max(0.0, gaps - sync - wait - latency) + lead
    mean_us = float(rows["total_us"].sum() / max(1.0, rows["count"].sum()))
    dispatch = float(windows["idle_dispatch_us"].sum()) / steps
    known = windows["idle_dispatch_us"].notna().all()  # not in runs that older versions imported
    kind, calls, call_us = _host_calls(windows, steps)
    in_calls = call_us >= host / 2 > 0
    launch_bound = not in_calls and (dispatch >= host / 2 if known else mean_us < LAUNCH_US)
    code = "launch-bound" if launch_bound else "host-bound"
    kernels = f", between kernels of {mean_us:.1f} µs on average" if launch_bound else ""
    op, in_op = ("", "") if launch_bound else _host_op(windows, cost, steps, with_functions=not in_calls)
    loading, in_loading = _longest_of(windows, "data_function", cost, steps)
    calling = f", {number(call_us / 1e3, 'ms')} of it {CALLS[kind]} ({calls})" if in_calls else ""
    why = f" because the host launches too late{kernels}{calling}{in_op}"
    if windows[["idle_sync_us", "idle_wait_us", "idle_dispatch_us"]].isna().all(axis=None):
        code, why = "unexplained-idle", ", and the trace has no launches that would show why"
        if (rows["category"] == "communication").all():
            why = ", or does what the trace lacks: it holds collectives alone"
    return [
        Saving("waiting-for-data", data + lead_data, cost.step_us, f"The GPU waits for data "
               f"{_when(data, lead_data, cost, unit)}{in_loading}", loading or "data loading", lead_us=lead_data),
        Saving(code, host, cost.step_us, f"The GPU is idle for {_when(host - lead, lead, cost, unit)}{why}",
               (calls if in_calls else op) or "host", lead_us=lead),
        Saving("host-syncs", sync, cost.step_us, f"The GPU is idle for {_share(sync, cost)} of the {unit} after "
               f"{number_of} with the host{in_syncs}", where),
        Saving("kernel-wait", wait, cost.step_us, f"The GPU is idle for {_share(wait, cost)} of the {unit} although "
               f"work is queued{waited_for}", "streams", is_sure=not unexplained),
    ]  # fmt: skip


def _host_op(windows: pd.DataFrame, cost: StepCost, steps: float, *, with_functions: bool) -> tuple[str, str]:
    """The operator in which the host spends most of the time in which it should launch, or the Python function if that
    is longer, and that as part of a sentence; empty if it is not much of the step."""
    is_function = windows["host_function_us"].sum() > windows["host_op_us"].sum()
    return _longest_of(windows, "host_function" if is_function and with_functions else "host_op", cost, steps)


def _longest_of(windows: pd.DataFrame, column: str, cost: StepCost, steps: float) -> tuple[str, str]:
    """The value of a column of names with most of its time, and that as part of a sentence; empty if it is not much of
    the step."""
    us = windows.groupby(column)[f"{column}_us"].sum() / steps
    us = us[us.index != ""]
    if us.empty or us.max() < MIN_SAVED_FRAC * cost.step_us:
        return "", ""
    return str(us.idxmax()), f", {number(us.max() / 1e3, 'ms')} of it in {us.idxmax()}"


CALLS = {
    "allocation": "allocating or freeing memory",
    "uncached": "allocating and freeing memory without a cache",
    "compiling": "compiling operators",
    "loading": "launching or loading kernels",
    "graphs": "building or launching graphs",
    "copies": "starting copies and fills",
    "setup": "setting up the device",
    "other": "in one call",
}
"""What the host does in calls into the device's runtime, by their kind."""


def _host_calls(windows: pd.DataFrame, steps: float) -> tuple[str, str, float]:
    """The kind of runtime calls in which the host spends most of the time in which it should launch, the names of the
    longest of them, and their time per step in microseconds."""
    us = windows[windows["host_call_kind"] != ""].groupby("host_call_kind")["host_call_us"].sum() / steps
    if us.empty:
        return "", "", 0.0
    kind = str(us.idxmax())
    longest = windows[windows["host_call_kind"] == kind].sort_values("host_call_us").iloc[-1]
    return kind, str(longest["host_call"]), float(us.max())


def _when(us: float, lead_us: float, cost: StepCost, unit: str) -> str:
    """`28 % of the step and 1.61 ms before its first kernel`."""
    if lead_us < MIN_SAVED_FRAC * cost.step_us:
        return f"{_share(us, cost)} of the {unit}"
    before = number(lead_us / 1e3, "ms")
    if us < MIN_SAVED_FRAC * cost.step_us:
        return f"{before} before the first kernel of the {unit}"
    return f"{_share(us, cost)} of the {unit} and {before} before its first kernel"


def _alone(run: Run, cost: StepCost, rows: pd.DataFrame, unit: str) -> list[Saving]:
    communication, copies = np.nan_to_num(cost.us("communication")), np.nan_to_num(cost.us("copy"))
    everything = kernel_rows(run, everything=True)
    copied = _longest(everything[everything["category"].isin(COPIES)], "name") or "copies"
    exposed = collective_rows(run).groupby("kernel")["alone_us"].sum()
    where = str(exposed.idxmax()) if exposed.sum() > 0 else _longest(rows[rows["category"] == "communication"], "name")
    waits, here = _waits(run, cost)
    return [
        Saving("exposed-communication", communication, cost.step_us, "The GPU only communicates for "
               f"{_share(communication, cost)} of the {unit}{waits}", where, here),
        Saving("copies", copies, cost.step_us, f"Copies and fills take {_share(copies, cost)} of the {unit}", copied),
    ]  # fmt: skip


def _waits(run: Run, cost: StepCost) -> tuple[str, str]:
    """How much of the time in collectives is spent waiting, as part of a sentence; and which rank to look at."""
    waited, dtype = waited_for(run), gradient_dtype(run)
    if waited is not None and 1e3 * waited.all_waiting_ms >= MIN_SAVED_FRAC * cost.step_us:
        share = _share(1e3 * waited.all_waiting_ms, cost)
        ranks = window_rows(run)["rank"].nunique()
        at_least, of_these = "", ""
        if ranks < run.head.world_size:  # a rank whose trace is not here may be later still
            at_least, of_these = "at least ", f" of these {ranks} of {run.head.world_size} ranks"
        return (
            f"; a rank spends {at_least}{share} in collectives waiting for others",
            f"rank {waited.rank} enters {percent(waited.last_frac)} of the collectives last{of_these}, and each other "
            f"rank waits {at_least}{number(waited.waiting_ms, 'ms')} for it: look at what it does before the "
            "collectives",
        )
    if dtype == "float32":
        return "", (
            "gradients are reduced in FP32, and 16 bits halve the bytes: "
            "model.register_comm_hook(None, default_hooks.bf16_compress_hook)"
        )
    return "", f"gradients are already reduced in {dtype}" if dtype else ""


def _types(
    rows: pd.DataFrame, cost: StepCost, rates: Rates | None, steps: float, unit: str, *, has_tensor_cores: bool
) -> list[Saving]:
    if not has_tensor_cores:
        return []
    matrix = rows[is_matrix(rows)]
    fp32 = matrix[(matrix["precision"] == "fp32") & ~matrix["name"].str.contains("gemv", regex=False)]
    tf32 = matrix[matrix["precision"] == "tf32"]
    slow_us, tf32_us = float(fp32["total_us"].sum()) / steps, float(tf32["total_us"].sum()) / steps
    if not matrix["device"].str.startswith("cuda").all():  # other accelerators: neither rates nor settings are known
        return []
    ratio = rates.half / rates.fp32 if rates else UNKNOWN_RATIO
    tf32_ratio = rates.half / rates.tf32 if rates and rates.tf32 else UNKNOWN_RATIO
    parts = [
        f"{_share(us, cost)} of the {unit} in {name}" for us, name in ((slow_us, "FP32"), (tf32_us, "TF32")) if us > 0
    ]
    win = slow_us * (1 - 1 / ratio) + tf32_us * (1 - 1 / tf32_ratio)
    gain = f"by the data sheet, 16 bits are {number(ratio if slow_us >= tf32_us else tf32_ratio, digits=2)} × as fast"
    longest = _longest(fp32 if slow_us >= tf32_us else tf32, "name")
    what = f"GEMM/conv takes {' and '.join(parts)}{f'; {gain}' if rates else ''}"
    return [Saving("fp32-products", win, cost.step_us, what, longest)]


def _slow(run: Run, cost: StepCost, rates: Rates | None, steps: float, unit: str) -> list[Saving]:
    ops = matrix_ops(run)
    ops = ops[(ops["tensor_core"] == "yes") & (ops["of_peak_frac"] < SLOW_PEAK_FRAC)]
    if ops.empty or rates is None:
        return []
    best = [_possible_us(row, rates) for row in ops.to_dict("records")]
    wins = (ops["total_us"] - np.array(best)).clip(lower=0.0)
    worst = ops.loc[wins.idxmax()]
    total = float(ops["total_us"].sum()) / steps
    what = (
        f"GEMM/conv below {percent(SLOW_PEAK_FRAC)} of the tensor-core peak takes {_share(total, cost)} of the {unit}, "
        f"{worst['op']} ({worst['sizes']}) runs at {percent(worst['of_peak_frac'])}"
    )
    saved_us, ideal_us = float(wins.sum()) / steps, best[ops.index.get_loc(wins.idxmax())] / max(1.0, worst["count"])
    return [
        Saving("slow-products", saved_us, cost.step_us, what, str(worst["op"]), str(worst["padded"]), ideal_us=ideal_us)
    ]


def _possible_us(row: Mapping[Hashable, Any], rates: Rates) -> float:
    """Time that the products of a row need at a good share of the rate, or to move their matrices once."""
    us, share = float(str(row["total_us"])), float(str(row["of_peak_frac"]))
    made = product(str(row["op"]), str(row["in_shapes"]))
    bytes_moved = 0.0
    bits = memory_bits_of(str(row["precision"])) or 16
    if made is not None and made.kind == "gemm":
        m, n, k = (made.sizes[name] for name in "MNK")
        bytes_moved = (m * k + k * n + m * n) * made.batch * float(str(row["count"])) * bits / 8
    return max(us * share / GOOD_PEAK_FRAC, bytes_moved / (rates.gb_per_s * 1e3))


_ONE_OPERATOR = "at::native|at6native|cudnn|iopen"
"""In the names of kernels that torch launches for one operator; captured graphs record no operator."""


def unfused_optimizer_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """Kernels of an optimizer among rows of `kernels`, without those of fused ones."""
    stepping = (rows["phase"] == "optimizer") | (rows["category"] == "optimizer")
    fused = rows["op"].str.contains("_fused_", regex=False) | rows["name"].str.contains("triton", regex=False)
    return rows[stepping & ~fused]


def _memory_bound(rows: pd.DataFrame, cost: StepCost, steps: float, unit: str) -> list[Saving]:
    scale = 1.0 / steps
    eager = ~rows["name"].str.contains("triton", regex=False)
    optimizer = rows["phase"] == "optimizer"
    # Other libraries' kernels already do several operators' work.
    eager &= rows["op"].str.startswith("aten::") | rows["name"].str.contains(_ONE_OPERATOR)
    bound = rows[rows["category"].isin(["norm", "elementwise", "reduction", "cast"]) & eager & ~optimizer]
    us = float(bound["total_us"].sum()) * scale
    stepping = unfused_optimizer_rows(rows[eager])
    step_us = float(stepping["total_us"].sum()) * scale
    each = float(stepping["count"].sum()) * scale
    return [
        Saving("memory-bound-kernels", FUSED_FRAC * us, cost.step_us, "Unfused norms, elementwise kernels, casts and "
               f"reductions take {_share(us, cost)} of the {unit}; fusing them halves their memory traffic",
               _longest(bound, "op") or _longest(bound, "name")),
        Saving("unfused-optimizer", FUSED_FRAC * step_us, cost.step_us, f"The optimizer takes {_share(step_us, cost)} "
               f"of the {unit} in {each:,.0f} kernels", _longest(stepping, "op") or "optimizer"),
    ]  # fmt: skip


def _longest(rows: pd.DataFrame, column: str) -> str:
    """The value of `column` with most of the time; empty for no rows."""
    us = rows.groupby(column)["total_us"].sum()
    return str(us.idxmax()) if len(us) else ""
