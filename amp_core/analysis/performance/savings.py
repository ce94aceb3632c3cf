"""Upper bounds on the time that each change could save per step of a trace, the largest first.

    >>> for saving in possible_savings(run).ranked: print(saving.code, saving.saved_us / saving.step_us, saving.what)
    exposed-communication 0.64 The GPU only communicates for 64 % of the step

Each bound stands alone; they do not add up. Idle time and communication can be hidden completely. Products in
FP32 gain the ratio of the data sheet's dense rates; products on tensor cores gain the distance to `GOOD_PEAK_FRAC` of
that rate, or to the time that memory needs. Memory-bound kernels, one per operator, are assumed to fuse to half their
time (`FUSED_FRAC`): each value is then read and written once instead of twice.
"""

import math
import re
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from amp_core.analysis.performance.communication_savings import alone_savings
from amp_core.analysis.performance.eligible_ops import matrix_ops
from amp_core.analysis.performance.gemm_shapes import product, tensor_shapes
from amp_core.analysis.performance.gpus import profiled_gpu
from amp_core.analysis.performance.idle_savings import LATE_LAUNCHES, idle_of_late_rank, idle_savings, late_host_us
from amp_core.analysis.performance.kernels import (
    SOFTMAX,
    ZEROING,
    MatrixKinds,
    between_collectives_us,
    counted_once,
    has_attention_in_steps,
    is_matrix,
    is_trace,
    kernel_rows,
    matrix_kinds,
    mostly_misclocked,
    of_main,
    window_rows,
)
from amp_core.analysis.performance.layouts import layout_copies, layout_rows
from amp_core.analysis.performance.memory_rate import far_below_memory
from amp_core.analysis.performance.roofline import in_16_bits
from amp_core.analysis.performance.saving import (
    MIN_SAVED_FRAC,
    Saving,
    is_mostly_idle,
    longest_name,
    others,
    step_share,
    without_gpu,
)
from amp_core.analysis.performance.slower_products import SlowerProduct, slower_product
from amp_core.analysis.performance.step_cost import MATRIX_PARTS, StepCost, step_cost
from amp_core.formats import memory_bits_of
from amp_core.hardware.data_sheets import Rates, dense_rates
from amp_core.hardware.gpus import core_names
from amp_core.store.run import Run
from amp_core.text.formatting import number, percent

MAX_UNKNOWN_FRAC = 0.2
"""With more unclassified kernel time the shares of GEMM/conv are uncertain."""
GOOD_PEAK_FRAC = 0.6
"""Share of the dense rate that large, well-shaped products reach on current GPUs (cuBLAS: 60 to 75 %)."""
SLOW_PEAK_FRAC = 0.3
"""Products below this share of the dense rate are slow."""
FUSED_FRAC = 0.5
CASTS_BETWEEN = "casts between products"
MIN_OF_SCORES_FRAC = 0.1
"""Share of other kernels in those on the scores of attention from which they are told beside the softmax."""
MIN_LONE_FRAC = 0.02
"""Share of the step from which casts that nothing is fused with are told."""
MIN_FUSED_KERNELS = 1.5
"""Kernels per step below which there is no other to fuse one with."""
MIN_KERNEL_US = 1e-3
"""Less is no kernel time: a trace may hold copies alone."""
UNKNOWN_RATIO = 2.0
"""Gain of 16 bits over FP32 that is assumed where the data sheet is not listed: half the bytes."""


@dataclass(frozen=True)
class Savings:
    """All possible savings in a trace."""

    ranked: tuple[Saving, ...]
    """The largest `rank_us` first."""
    small: tuple[Saving, ...]
    """Those below `MIN_SAVED_FRAC` of the step each, the largest first."""
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
    capture_us: float
    """Time per step in which a graph is captured, if the trace holds that and no replay: then it has no savings."""
    flops_per_s: float | None
    """Achieved rate of the same; None if the shapes of half of them were not recorded."""

    def of(self, code: str) -> Saving | None:
        """The saving of that code, also if it is small; None without one."""
        return next((saving for saving in (*self.ranked, *self.small) if saving.code == code), None)


def possible_savings(run: Run) -> Savings | None:
    """Possible savings in an imported trace; None for other runs, for a CPU and without a profiled window."""
    if not is_trace(run) or mostly_misclocked(run):
        return None
    return run.cached(["kernels", "windows", "collectives", "steps", "timeline"], _possible_savings)


def _possible_savings(run: Run) -> Savings | None:
    cost, rows, windows = step_cost(run), of_main(run, kernel_rows(run)), of_main(run, window_rows(run))
    counted = counted_once(rows)
    if cost.source != "profile" or cost.on_cpu or kernel_rows(run, everything=True).empty:
        return None
    steps = float(windows["steps"].sum()) if cost.steps else float(len(windows))
    unit = "step" if cost.steps else "profiled window"
    gpu = profiled_gpu(run, str(windows["device"].iloc[0]), str(windows["device_name"].iloc[0]))
    rates, has_cores = dense_rates(gpu.name), gpu.has_tensor_cores is not False
    alone = alone_savings(run, cost, rows, unit)
    late = next((c for c in alone if len(c.late_ranks) == 1 and c.share >= MIN_SAVED_FRAC), None)
    # Where all wait longer for their own hosts, a late one is not what comes first, unless its GPU is slow.
    if late is not None and not late.slower_ratio and late_host_us(windows, late) > late.saved_us:
        late = None
    between_us = 0.0 if alone[0].late_ranks else between_collectives_us(run, MIN_SAVED_FRAC * cost.step_us)
    idle = (
        idle_savings(run, windows, rows, cost, steps, unit, between_us)
        if late is None
        else idle_of_late_rank(run, late, unit)
    )
    host_us = max((c.saved_us - c.lead_us for c in idle if c.code in LATE_LAUNCHES), default=0.0)
    alone = [replace(c, of_hosts_us=c.waited_us if host_us >= c.waited_us else 0.0) for c in alone]
    is_idle = is_mostly_idle(cost if late is None else step_cost(run, rank=late.late_ranks[0]))
    is_idle |= _is_behind_host(windows, cost)
    # A transfer delays a device that is mostly idle no more than a kernel does; waiting for a late rank does.
    alone = [
        replace(c, waits_for_idle=is_idle and not (c.late_ranks or c.waiting_us or c.waited_us))
        if c.code == "exposed-communication"
        else c
        for c in alone
    ]
    savings = [
        *alone,
        *idle,
        *(
            replace(saving, waits_for_idle=is_idle)
            for saving in (
                *_types(_without_stalls(counted), cost, rates, steps, unit, has_tensor_cores=has_cores),
                *_slow(run, cost, rates, steps, unit),
                *_memory_bound(counted, cost, rates, steps, unit),
                _layouts(counted, cost, steps, unit),
                _layout_copies(counted, cost, steps, unit),
            )
        ),
    ]
    savings = [_beside_none(c, rows, cost) for c in savings]
    limit_us = _host_limit_us(windows, cost, steps)
    savings = [
        replace(c, saved_us=max(limit_us, 0.0), what=f"{c.what}, {_UNTIL_HOST}")
        if c.code in _OF_KERNELS and not c.waits_for_idle and c.saved_us > limit_us
        else c
        for c in savings
    ]
    if not windows["device"].str.startswith("cuda").all():
        savings = [replace(c, what=without_gpu(c.what), here=without_gpu(c.here)) for c in savings]
    worth = [c for c in savings if c.saved_us >= MIN_SAVED_FRAC * cost.step_us]
    unknown = rows[rows["tensor_core"] == "unknown"]
    share = float(unknown["total_us"].sum()) / max(float(rows["total_us"].sum()), MIN_KERNEL_US)
    if (
        share > MAX_UNKNOWN_FRAC
        and not rows["device"].str.startswith(("mtia", "hpu", "xpu", "mlu", "npu", "privateuse")).any()
    ):
        what = f"{100 * share:.0f} % of kernel time is in kernels that cannot be classified by name"
        worth.append(Saving("unknown-kernels", 0.0, cost.step_us, what, longest_name(unknown, "name")))
    capture_us = _capture_us(run, cost, windows, steps)
    small = sorted((c for c in savings if 0 < c.saved_us < MIN_SAVED_FRAC * cost.step_us), key=lambda c: -c.saved_us)
    if capture_us:
        worth, small = [], []
    without_op = rows["name"][rows["op"] == ""]  # a recorded operator tells its phase
    trains = bool(rows["phase"].isin(["backward", "optimizer"]).any() or without_op.str.contains(_OF_TRAINING).any())
    ranked = tuple(sorted(worth, key=lambda c: -c.rank_us))
    unknown_us = float(unknown.groupby("name")["total_us"].sum().max()) / steps if len(unknown) else 0.0
    kernel, its_share = longest_name(unknown, "name"), unknown_us / cost.step_us
    peak_frac, flops_per_s = _mean(run, "of_peak_frac"), _mean(run, "flops_per_s")
    return Savings(
        ranked, tuple(small), unit, trains, cost, share, kernel, its_share, peak_frac, capture_us, flops_per_s
    )


def _beside_none(saving: Saving, rows: pd.DataFrame, cost: StepCost) -> Saving:
    """The saving without the part of its kernels that runs beside collectives, where these take long alone: they
    outlast what runs beside them."""
    if (
        saving.code not in ("fp32-products", "slow-products", "layout-transposes")
        or np.nan_to_num(cost.us("communication")) < MIN_SAVED_FRAC * cost.step_us
    ):
        return saving
    of_it = layout_rows(rows) if saving.code == "layout-transposes" else rows[is_matrix(rows)]
    beside = float(of_it["beside_us"].fillna(0.0).sum()) / max(float(of_it["total_us"].sum()), MIN_KERNEL_US)
    if beside < MIN_BESIDE_FRAC:
        return saving
    what = f"{saving.what}; {percent(beside)} of that time lies beside collectives, and is not counted"
    return replace(saving, saved_us=saving.saved_us * max(0.0, 1 - beside), what=what)


MIN_BESIDE_FRAC = 0.1
"""Share of kernels beside collectives from which what these save is told without it."""


def _host_limit_us(windows: pd.DataFrame, cost: StepCost, steps: float) -> float:
    """What shorter kernels save per step at most, microseconds: then the step takes what the host needs to launch it.
    Where the device is idle after the host has waited for it, each pass, that is the time that the host waits."""
    host_us, sync_us, idle_us = (
        float(windows[name].fillna(0.0).sum()) / steps for name in ("host_us", "sync_us", "idle_sync_us")
    )
    waits = idle_us >= MIN_SAVED_FRAC * cost.step_us
    return max(0.0, min(cost.step_us - host_us, sync_us if waits else cost.step_us))


_OF_KERNELS = ("fp32-products", "slow-products", "memory-bound-kernels")
"""Savings of shorter kernels."""
_UNTIL_HOST = "until the step waits for the host"


def _is_behind_host(windows: pd.DataFrame, cost: StepCost) -> bool:
    """Whether a step hardly ends sooner with shorter kernels, since the host launches them just before they start."""
    known = windows[windows["reach_frac"].notna()]
    wall_us = float(known["wall_us"].sum())
    idle_frac = float(np.nan_to_num(cost.us("gaps", "data"))) / cost.step_us
    if known.empty or wall_us <= 0 or idle_frac < MIN_BEHIND_IDLE_FRAC:
        return False
    return float((known["reach_frac"] * known["wall_us"]).sum()) / wall_us < MAX_REACH_FRAC


MIN_BEHIND_IDLE_FRAC, MAX_REACH_FRAC = 0.15, 0.3
"""Share of the step that a device is idle from which its host may be the one that others wait for, and share of shorter
kernels that reaches the end of the step below which it is."""
MIN_CAPTURE_FRAC = 0.5
MAX_CAPTURE_BUSY_FRAC = 0.05
"""A trace with that much of capturing and so little of the device's work, and without a launch of a graph, shows how
its program prepares."""


def _capture_us(run: Run, cost: StepCost, windows: pd.DataFrame, steps: float) -> float:
    """Time per step in which graphs are captured and built, microseconds; 0 if the trace holds more than that."""
    config, busy_us = run.head.config, float(windows["busy_us"].sum())
    if not config.get("captures") or config.get("graph_launches"):
        return 0.0
    us = float(windows["host_call_us"][windows["host_call_kind"] == "graphs"].sum())
    is_capture = us >= MIN_CAPTURE_FRAC * cost.step_us * steps and busy_us <= MAX_CAPTURE_BUSY_FRAC * us
    return us / steps if is_capture else 0.0


_OF_TRAINING = re.compile(r"(?i)backward|_bwd_|grad_input|multi_tensor_apply")
"""Kernels by whose names a trace without phases is one of training."""
MAX_FLOOR_US, FUSED_KERNELS = 3.0, 2
"""Kernels of that mean length take no longer than one that does nothing, and kernels of a fused optimizer's step."""
_PLAIN_SGD = "BinaryOpListAlphaFunctor"
"""In the name of the kernel that adds each gradient, times the rate, to its parameter: that alone is a fused step."""


def _mean(run: Run, column: str) -> float | None:
    """The mean of a column of `matrix_ops` over the time on tensor cores; None if not known of half of it."""
    ops = matrix_ops(run)
    ops = ops[ops["tensor_core"] == "yes"]
    known = ops[ops[column].notna()]
    us = float(known["total_us"].sum())
    if not us or us < 0.5 * float(ops["total_us"].sum()):
        return None
    return float((known[column] * known["total_us"]).sum()) / us


MIN_STALL_RATIO = 20.0
"""A launch that takes that many times as long as the others of its kernel on the same sizes did something else, such as
wait for a module to be loaded."""


def _without_stalls(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with a launch that takes far longer than the others of its kernel on the same sizes, and longer than all
    of them, taken for one of these: faster arithmetic does not shorten it."""
    kernels = rows.groupby(["name", "in_shapes"])
    longest_us = kernels["longest_us"].transform("max")
    others_us = kernels["total_us"].transform("sum") - longest_us
    usual_us = others_us / (kernels["count"].transform("sum") - 1).clip(lower=1.0)
    stalled = (longest_us > others_us) & (longest_us > MIN_STALL_RATIO * usual_us) & (others_us > 0)
    stalled &= rows["in_shapes"] != ""
    at = stalled & (rows["longest_us"] == longest_us)
    return rows.assign(total_us=rows["total_us"].mask(at, rows["total_us"] - longest_us + usual_us))


def _types(
    rows: pd.DataFrame, cost: StepCost, rates: Rates | None, steps: float, unit: str, *, has_tensor_cores: bool
) -> list[Saving]:
    if not has_tensor_cores:
        return []
    matrix = rows[is_matrix(rows) & ~rows["name"].str.contains(_RECURRENCES)]
    fp32 = matrix[(matrix["precision"] == "fp32") & ~matrix["name"].str.contains("gemv", regex=False)]
    tf32 = matrix[matrix["precision"] == "tf32"]
    slow_us, tf32_us = float(fp32["total_us"].sum()) / steps, float(tf32["total_us"].sum()) / steps
    if not matrix["device"].str.startswith("cuda").all():  # other accelerators: neither rates nor settings are known
        return []
    ratio, tf32_ratio = (
        _mean_ratio(of, in_16_bits(of, tflops, rates), rates.half / tflops) if rates and tflops else UNKNOWN_RATIO
        for of, tflops in ((fp32, rates and rates.fp32), (tf32, rates and rates.tf32))
    )
    parts = [
        (_kinds(of), f"{step_share(us, cost)} of the {unit} in {name}")
        for of, us, name in ((fp32, slow_us, "FP32"), (tf32, tf32_us, "TF32"))
        if us > 0
    ]
    win = slow_us * (1 - 1 / ratio) + tf32_us * (1 - 1 / tf32_ratio)
    times = f"{number(ratio if slow_us >= tf32_us else tf32_ratio, digits=2)} × as fast"
    gain = f"by the data sheet, 16 bits are {times}" if rates else f"16 bits are assumed to be {times}"
    if rates and ratio < MAX_BOUND_FRAC * rates.half / rates.fp32 and slow_us >= tf32_us:
        gain += f", since {MEMORY_BOUNDS}"
    longest = longest_name(fp32 if slow_us >= tf32_us else tf32, "name")
    wide = pd.concat([fp32, tf32])
    if len(parts) == 2 and parts[0][0].subject != parts[1][0].subject:
        (one, in_fp32), (other, in_tf32) = parts
        taken = f"{one.subject} {one.verb} {in_fp32}, and {other.text} {in_tf32}"
    else:
        kinds = _kinds(wide)
        taken = f"{kinds.subject} {kinds.verb} {' and '.join(part for _, part in parts)}"
    what = f"{taken}; {gain}"
    return [Saving("fp32-products", win, cost.step_us, what, longest, others=others(wide, "name"))]


MEMORY_BOUNDS = "memory bounds most of these products"
MAX_BOUND_FRAC = 0.5
"""Of the ratio of the data sheet's rates, what products gain below which memory bounds most of them."""


MIN_FULL_FRAC = 0.9
"""The same from which they are told to gain all of it."""


def _mean_ratio(rows: pd.DataFrame, ratios: "pd.Series[float]", most: float) -> float:
    """How many times as fast all rows together are, of `most` by the rates of arithmetic alone."""
    us = float((rows["total_us"] / ratios).sum())
    ratio = float(rows["total_us"].sum()) / us if us > 0 else most
    return most if ratio >= MIN_FULL_FRAC * most else ratio


_RECURRENCES = "RNN_block|persistRNN"
"""In the names of cuDNN's kernels that run a whole recurrent layer, whose steps wait for one another: 16 bits hardly
make them faster, and whether their products run on tensor cores is unknown."""


def _kinds(rows: pd.DataFrame) -> MatrixKinds:
    return matrix_kinds(rows["total_us"], rows["category"] == "attention")


def _slow(run: Run, cost: StepCost, rates: Rates | None, steps: float, unit: str) -> list[Saving]:
    ops = matrix_ops(run)
    lower = slower_product(ops)
    found = [_far_below(run, ops, cost, rates, steps, unit)] if rates is not None else []
    found += [_lower_rate(lower, cost, steps, unit)] if lower is not None else []
    largest = max((one for one in found if one is not None), key=lambda one: one.saved_us, default=None)
    return [largest] if largest is not None else []


def _far_below(run: Run, ops: pd.DataFrame, cost: StepCost, rates: Rates, steps: float, unit: str) -> Saving | None:
    """What products far below the peak would save at a good share of it; None if there are none."""
    ops = ops[(ops["tensor_core"] == "yes") & (ops["of_peak_frac"] < SLOW_PEAK_FRAC)]
    if ops.empty:
        return None
    best = [_possible_us(row, rates) for row in ops.to_dict("records")]
    wins = (ops["total_us"] - np.array(best)).clip(lower=0.0)
    worst = ops.loc[wins.idxmax()]
    # Products on several streams at a time take no longer together than their part of the step.
    of_step = min(1.0, float(cost.us(*MATRIX_PARTS)) / max(float(ops["total_us"].sum()) / steps, MIN_KERNEL_US))
    total = float(ops["total_us"].sum()) / steps * of_step
    kinds = matrix_kinds(ops["total_us"], ops["op"].str.contains("attention"))
    cores, _ = core_names(cost.device_name)
    best_us = best[ops.index.get_loc(wins.idxmax())]
    reach = float(worst["of_peak_frac"] * worst["total_us"] / best_us)
    # With little work per byte, moving the matrices once takes longer than the products.
    allowed = f", where memory allows {percent(reach)}" if reach < SLOW_PEAK_FRAC else ""
    what = (
        f"{kinds.subject} below {percent(SLOW_PEAK_FRAC)} of the peak of the {cores} {kinds.verb} "
        f"{step_share(total, cost)} of the {unit}, {worst['op']} ({worst['sizes']}) runs at "
        f"{percent(worst['of_peak_frac'])}{allowed}"
    )
    saved_us, ideal_us = float(wins.sum()) / steps * of_step, best_us / max(1.0, worst["count"])
    saving = Saving("slow-products", saved_us, cost.step_us, what, str(worst["op"]), str(worst["padded"]))
    blocks_per_sm = _blocks_per_sm(run, worst.to_dict())
    return replace(saving, ideal_us=ideal_us, blocks_per_sm=blocks_per_sm, others=others(ops, "op"))


def _lower_rate(lower: SlowerProduct, cost: StepCost, steps: float, unit: str) -> Saving:
    """What a product would save at the rate that smaller ones of the same trace reach."""
    what = (
        f"{lower.op} ({lower.sizes}) takes {step_share(lower.us / steps, cost)} of the {unit} at "
        f"{lower.flops_per_s / 1e12:.3g} TFLOP/s, where smaller products reach {lower.others_per_s / 1e12:.3g} TFLOP/s"
    )
    each_us = (lower.us - lower.won_us) / max(1.0, lower.calls)
    return Saving("slow-products", lower.won_us / steps, cost.step_us, what, lower.op, ideal_us=each_us)


ATTENTION_TILE = 128
"""Queries of a head for which one block of a kernel of attention computes (FlashAttention: 64 to 128)."""


def _blocks_per_sm(run: Run, row: Mapping[Hashable, Any]) -> float | None:
    """Blocks per multiprocessor of the kernels of a row of `matrix_ops`, the mean over their time: as recorded, or for
    attention from the input shapes; None if neither is known."""
    frame = run.timeline
    frame = frame[(frame["name"] == row["kernel"]) & (frame["op"] == row["op"]) & frame["blocks_per_sm"].notna()]
    us = frame["total_us"].astype(float)
    if us.sum() > 0:
        return float((frame["blocks_per_sm"].astype(float) * us).sum() / us.sum())
    made = product(str(row["op"]), str(row["in_shapes"]))
    gpus = run.head.environment.get("gpus")
    first = gpus[0] if isinstance(gpus, list) and gpus and isinstance(gpus[0], dict) else {}
    multiprocessors = first.get("multiprocessors")
    if made is None or made.kind != "attention" or not made.queries or not isinstance(multiprocessors, int):
        return None
    return made.batch * -(-made.queries // ATTENTION_TILE) / multiprocessors if multiprocessors > 0 else None


def _possible_us(row: Mapping[Hashable, Any], rates: Rates) -> float:
    """Time that the products of a row need at a good share of the rate, or to move their matrices once."""
    us, share = float(str(row["total_us"])), float(str(row["of_peak_frac"]))
    made = product(str(row["op"]), str(row["in_shapes"]))
    bytes_moved = 0.0
    bits = memory_bits_of(str(row["precision"])) or 16
    if made is not None and made.kind == "gemm":
        m, n, k = (made.sizes[name] for name in "MNK")
        bytes_moved = (m * k + k * n + m * n) * made.batch * float(str(row["count"])) * bits / 8
    elif made is not None:  # the output of attention is as large as its first input; that of others is not recorded
        sizes = [math.prod(shape) for shape in tensor_shapes(str(row["in_shapes"]))]
        elements = sum(sizes) + (sizes[0] if made.kind == "attention" else 0)
        bytes_moved = elements * float(str(row["count"])) * bits / 8
    return max(us * share / GOOD_PEAK_FRAC, bytes_moved / (rates.gb_per_s * 1e3))


_POOLS = r"(?i)pool"
"""In the names of kernels and operators that pool: none of the kinds that the sentence names."""
SCATTERS = r"::_?index_(?:put|add|copy)|(?<!reduce_)scatter|embedding_dense_backward"
"""In the names of operators that write to places that a tensor gives: random access bounds them, and no pass over
memory is saved."""
_AT_RANDOM = r"::(?:normal|uniform|random|exponential|cauchy|log_normal|geometric)_?$"
"""Operators that fill tensors at random: their time goes to computing, and what reads them comes later."""
_GENERATORS = "distribution_(?:elementwise|nullary)"
"""In the names of the kernels that do so."""
_ONE_OPERATOR = "at::native|at6native|cudnn|iopen"
"""In the names of kernels that torch launches for one operator; captured graphs record no operator."""


def unfused_optimizer_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """Kernels of an optimizer among rows of `kernels`, without those of fused ones."""
    stepping = (rows["phase"] == "optimizer") | (rows["category"] == "optimizer")
    stepping &= ~rows["top_op"].isin(ZEROING)
    fused = rows["op"].str.contains("_fused_", regex=False) | rows["name"].str.contains("triton", regex=False)
    return rows[stepping & ~fused]


def _without_twins(ops: "pd.Series[str]") -> "pd.Series[str]":
    """The operators, with those in place named as the others: `aten::add_` as `aten::add`, where both occur."""
    plain = ops.str.removesuffix("_")
    return ops.where(~plain.isin(set(ops)), plain)


def _memory_bound(rows: pd.DataFrame, cost: StepCost, rates: Rates | None, steps: float, unit: str) -> list[Saving]:
    # Other libraries' kernels already do several operators' work.
    by_torch = rows["op"].str.startswith("aten::") | rows["name"].str.contains(_ONE_OPERATOR)
    by_torch &= ~rows["name"].str.contains("triton", regex=False)
    is_slow = far_below_memory(rows, rates.gb_per_s if rates else None)
    unfused = _unfused(rows, by_torch & ~is_slow, cost, steps, unit)
    return [unfused, _optimizer(rows[by_torch], cost, steps, unit)]


def _unfused(rows: pd.DataFrame, by_torch: "pd.Series[bool]", cost: StepCost, steps: float, unit: str) -> Saving:
    """What fusing saves of the rows that torch launches operator by operator, without the optimizer."""
    bound = rows[rows["category"].isin(["norm", "elementwise", "reduction", "cast"]) & by_torch]
    bound = bound[bound["phase"] != "optimizer"]
    others_work = bound["name"].str.contains(f"{_POOLS}|{_GENERATORS}")
    others_work |= bound["op"].str.contains(f"{_POOLS}|{SCATTERS}|{_AT_RANDOM}")
    bound = bound[~others_work]
    in_place = set(bound["op"]) - set(_without_twins(bound["op"]))
    bound = bound.assign(op=_without_twins(bound["op"]))
    apart = ""
    if np.nan_to_num(cost.us("communication")) >= MIN_SAVED_FRAC * cost.step_us:
        # Where communication takes long alone, it outlasts what runs beside it.
        bound = bound.assign(total_us=bound["total_us"] - bound["beside_us"].fillna(0.0))
        apart = " beside no collective" if float(bound["beside_us"].fillna(0.0).sum()) else ""
    if float(rows["count"].sum()) < MIN_FUSED_KERNELS * steps:
        bound = bound[:0]
    us = float(bound["total_us"].sum()) / steps
    lone_us = float(bound["lone_us"].fillna(0.0)[bound["category"] == "cast"].sum()) / steps
    lone_us = lone_us if lone_us >= MIN_LONE_FRAC * cost.step_us else 0.0
    # Fused attention keeps the scores on the chip: neither its softmax nor what scales, masks or casts them remains.
    softmax_us = bound["total_us"].where(bound["op"] == SOFTMAX, 0.0)
    in_steps_us = np.maximum(softmax_us, bound["total_us"].clip(upper=bound["scores_us"].fillna(0.0)))
    is_in_steps = has_attention_in_steps(rows)
    in_steps = float(in_steps_us.sum()) / steps if is_in_steps else 0.0
    beside_us = in_steps - float(softmax_us.sum()) / steps
    longest = longest_name(bound, "op")
    its_us = float(bound["total_us"][bound["op"] == longest].sum()) / steps
    both = f"{longest} with {longest}_" if f"{longest}_" in in_place else longest
    alone = f", {both} alone {step_share(its_us, cost)}" if longest and others(bound, "op") else ""
    why = "fusing them halves their memory traffic"
    if lone_us:
        share = f"{step_share(lone_us, cost)} of the {unit}"
        why = f"fusing halves the memory traffic, and {CASTS_BETWEEN}, {share}, vanish where tensors have their type"
    without = ", and fused attention needs no softmax" if in_steps else ""
    if beside_us >= MIN_OF_SCORES_FRAC * in_steps > 0:
        without += ", nor the other kernels on its scores"
    return Saving(
        "memory-bound-kernels",
        FUSED_FRAC * (us - in_steps - lone_us) + in_steps + lone_us,
        cost.step_us,
        f"Unfused norms, elementwise kernels, casts and reductions take {step_share(us, cost)} of the {unit}{apart}"
        f"{alone}; {why}{without}",
        SOFTMAX if in_steps > us / 2 else longest or longest_name(bound, "name"),
        others=others(bound, "op" if longest else "name"),
    )


def _layouts(rows: pd.DataFrame, cost: StepCost, steps: float, unit: str) -> Saving:
    """What convolutions save whose inputs have the layout that their kernels compute in."""
    turned = layout_rows(rows)
    us = float(turned["total_us"].sum()) / steps
    return Saving(
        "layout-transposes",
        us,
        cost.step_us,
        f"Layout conversions for convolutions take {step_share(us, cost)} of the {unit}",
        longest_name(turned, "op") or "convolutions",
        others=others(turned, "op"),
    )


def _layout_copies(rows: pd.DataFrame, cost: StepCost, steps: float, unit: str) -> Saving:
    """What tensors save that have the layout in which they are read."""
    copies = layout_copies(rows)
    us = float(copies["total_us"].sum()) / steps
    op = longest_name(copies, "top_op")
    what = f"Copies into another layout take {step_share(us, cost)} of the {unit}, most in {op}"
    return Saving("layout-copies", us, cost.step_us, what, op or "aten::contiguous")


def _optimizer(rows: pd.DataFrame, cost: StepCost, steps: float, unit: str) -> Saving:
    """What fusing saves of the optimizer's rows."""
    stepping = unfused_optimizer_rows(rows)
    us, each = (float(stepping[name].sum()) / steps for name in ("total_us", "count"))
    if stepping["name"].str.contains(_PLAIN_SGD, regex=False).all():
        us = 0.0
    saved_us = FUSED_FRAC * us
    if each > FUSED_KERNELS and us <= MAX_FLOOR_US * each:  # as long as any kernel: fewer are shorter by their number
        saved_us = us * (1 - FUSED_KERNELS / each)
    return Saving(
        "unfused-optimizer",
        saved_us,
        cost.step_us,
        f"The optimizer takes {step_share(us, cost)} of the {unit} in {each:,.0f} kernels",
        longest_name(stepping, "op") or "optimizer",
        others=others(stepping, "op"),
    )
