"""Upper bounds on the time that each change could save per step of a trace, the largest first.

    >>> for saving in possible_savings(run).ranked: print(saving.code, saving.saved_us / saving.step_us, saving.what)
    exposed-communication 0.64 The GPU only communicates for 64 % of the step

Each bound stands alone; they do not add up. Idle time and communication can be hidden completely; what kernels save is
in `product_savings` and `memory_savings`, and how much of that the step becomes shorter by in `reach`.
"""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import pandas as pd

from amp_core.analysis.performance.collectives import with_late_launches
from amp_core.analysis.performance.communication_savings import (
    beside_backward_us,
    communication_saving,
    without_late_hosts,
)
from amp_core.analysis.performance.copy_savings import copies_saving
from amp_core.analysis.performance.eligible_ops import matrix_ops
from amp_core.analysis.performance.few_blocks import few_blocks
from amp_core.analysis.performance.fp64_savings import fp64_saving
from amp_core.analysis.performance.fused_attention import attention_products
from amp_core.analysis.performance.gpus import profiled_gpu
from amp_core.analysis.performance.idle_savings import (
    JUST_BELOW,
    LATE_LAUNCHES,
    idle_of_late_host,
    idle_of_late_rank,
    idle_savings,
)
from amp_core.analysis.performance.kernels import (
    between_collectives_us,
    counted_once,
    holds_collectives_alone,
    is_trace,
    kernel_rows,
    left_of_operators,
    mostly_misclocked,
    window_rows,
)
from amp_core.analysis.performance.late_hosts import late_hosts
from amp_core.analysis.performance.main_device import of_main
from amp_core.analysis.performance.matrix_kinds import is_matrix
from amp_core.analysis.performance.memory_savings import memory_savings
from amp_core.analysis.performance.product_savings import product_savings
from amp_core.analysis.performance.rank_waiting import started_apart
from amp_core.analysis.performance.reach import MIN_BEHIND_IDLE_FRAC, is_behind_host, within_reach
from amp_core.analysis.performance.saving import (
    MIN_KERNEL_US,
    MIN_SAVED_FRAC,
    Basis,
    CommunicationSaving,
    LateRankSaving,
    Saving,
    is_mostly_idle,
    longest_name,
    unit_of,
    without_gpu,
)
from amp_core.analysis.performance.step_cost import StepCost, step_cost
from amp_core.analysis.performance.training_part import in_training
from amp_core.hardware.data_sheets import dense_rates
from amp_core.hardware.gpus import Gpu
from amp_core.store.run import Run

MAX_UNKNOWN_FRAC = 0.2
"""With more unclassified kernel time the shares of GEMM/conv are uncertain."""


_Kind = TypeVar("_Kind", bound=Saving)


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
    """Whether the trace is one of training, see `in_training`."""
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

    def of(self, code: str, kind: type[_Kind]) -> _Kind | None:
        """The saving of that code, also if it is small; None without one of that kind."""
        return _first((*self.ranked, *self.small), code, kind)

    def reported(self, code: str, kind: type[_Kind]) -> _Kind | None:
        """The saving of that code, if it is large enough for a finding; None without one of that kind."""
        return _first(self.ranked, code, kind)

    @property
    def of_late_ranks(self) -> LateRankSaving | None:
        """What ranks save that wait for late ones, if that is reported."""
        return self.reported("exposed-communication", LateRankSaving)


def _first(savings: Iterable[Saving], code: str, kind: type[_Kind]) -> _Kind | None:
    return next((saving for saving in savings if saving.code == code and isinstance(saving, kind)), None)


def possible_savings(run: Run) -> Savings | None:
    """Possible savings in an imported trace; None for other runs, for a CPU, without a profiled window, and where times
    or kernels are missing."""
    if not is_trace(run) or mostly_misclocked(run) or left_of_operators(run):
        return None
    return run.cached(["kernels", "windows", "collectives", "steps", "timeline"], _possible_savings)


def _possible_savings(run: Run) -> Savings | None:
    cost, rows, windows = step_cost(run), of_main(run, kernel_rows(run)), of_main(run, window_rows(run))
    if cost.source != "profile" or cost.on_cpu or kernel_rows(run, everything=True).empty:
        return None
    gpu = profiled_gpu(run, str(windows["device"].iloc[0]), str(windows["device_name"].iloc[0]))
    basis = Basis(
        cost,
        steps=float(windows["steps"].sum()) if cost.steps else float(len(windows)),
        unit=unit_of(cost),
        rates=dense_rates(gpu.name),
    )
    savings = _all_savings(run, rows, windows, basis, gpu)
    if not windows["device"].str.startswith("cuda").all():
        savings = [replace(c, what=without_gpu(c.what), here=without_gpu(c.here)) for c in savings]
    worth = [c for c in savings if basis.is_long(c.saved_us)]
    small = [c for c in savings if c.saved_us > 0 and not basis.is_long(c.saved_us)]
    unknown = rows[rows["tensor_core"] == "unknown"]
    unknown_frac = float(unknown["total_us"].sum()) / max(float(rows["total_us"].sum()), MIN_KERNEL_US)
    if unknown_frac > MAX_UNKNOWN_FRAC and not rows["device"].str.startswith(_OTHER_DEVICES).any():
        of_products = float(unknown["total_us"][is_matrix(unknown)].sum())
        are_products = 2 * of_products > float(unknown["total_us"].sum())
        named = unknown[is_matrix(unknown)] if are_products else unknown
        untold = "whose names do not tell whether they use matrix cores" if are_products else _UNTOLD
        what = f"{100 * unknown_frac:.0f} % of kernel time is in kernels {untold}"
        worth.append(Saving("unknown-kernels", 0.0, cost.step_us, what, longest_name(named, "name")))
    capture_us = _capture_us(run, windows, basis)
    if capture_us:
        worth, small = [], []
    without_op = rows["name"][rows["op"] == ""]  # a recorded operator tells its phase
    unknown_us = float(unknown.groupby("name")["total_us"].sum().max()) / basis.steps if len(unknown) else 0.0
    return Savings(
        ranked=tuple(sorted(worth, key=lambda c: -c.rank_us)),
        small=tuple(sorted(small, key=lambda c: -c.saved_us)),
        unit=basis.unit,
        trains=in_training(run, rows) or bool(without_op.str.contains(_OF_TRAINING).any()),
        cost=cost,
        unknown_frac=unknown_frac,
        unknown_kernel=longest_name(unknown, "name"),
        unknown_kernel_frac=unknown_us / cost.step_us,
        peak_frac=_mean(run, "of_peak_frac"),
        capture_us=capture_us,
        flops_per_s=_mean(run, "flops_per_s"),
    )


_UNTOLD = "that cannot be classified by name"
_OTHER_DEVICES = ("mtia", "hpu", "xpu", "mlu", "npu", "privateuse")
"""Devices whose kernels are not classified by their names."""


def _all_savings(run: Run, rows: pd.DataFrame, windows: pd.DataFrame, basis: Basis, gpu: Gpu) -> list[Saving]:
    """All savings, and what each of them waits for until the step becomes shorter by it."""
    cost, communication = basis.cost, communication_saving(run, rows, basis)
    late = _one_late(run, communication)
    behind = late_hosts(run, basis) if isinstance(communication, CommunicationSaving) else None
    ranks_late = isinstance(communication, LateRankSaving)
    between_us = 0.0 if ranks_late else between_collectives_us(run, MIN_SAVED_FRAC * cost.step_us)
    if late is not None:
        idle = idle_of_late_rank(run, late, basis.unit)
    elif behind is not None:
        idle = idle_of_late_host(run, behind, basis.unit)
    else:
        idle = idle_savings(run, windows, rows, basis, between_us)
    is_idle = is_mostly_idle(cost if late is None else step_cost(run, rank=late.late_ranks[0]))
    is_idle |= is_behind_host(windows, basis)
    is_idle &= not holds_collectives_alone(run)
    if isinstance(communication, CommunicationSaving):
        if behind is not None:
            communication = without_late_hosts(communication, behind)
        host_us = max((c.saved_us - c.lead_us for c in idle if c.code in LATE_LAUNCHES), default=0.0)
        waiting_us = communication.waiting_us if communication.waiting_is_sure else 0.0
        communication = replace(communication, hosts_us=host_us)
        idle = [replace(c, waits_for_ranks=0 < c.saved_us <= waiting_us) for c in idle]
        # A host that waits for a device which waits for ranks waits for these.
        idle = [c for c in idle if c.code != "host-syncs" or not c.waits_for_ranks]
        if is_idle:
            communication = _of_idle_device(communication, beside_backward_us(run, rows, basis), between_us)
    launched = of_main(run, with_late_launches(run, window_rows(run)))
    communicates = bool(np.nan_to_num(cost.us("communication")) > 0)
    copies = copies_saving(run, rows, launched, basis, communicates=communicates)
    # A transfer delays a device that is mostly idle no more than a kernel does; waiting for a late rank does. The host
    # is in copies itself, but loading, by other processes, goes on.
    copies = replace(copies, waits_for_idle=is_idle and basis.is_long(float(np.nan_to_num(cost.us("data")))))
    counted = counted_once(rows)
    attention = attention_products(run, counted, basis)
    of_kernels: list[Saving] = [
        *product_savings(
            run,
            counted,
            basis,
            has_tensor_cores=gpu.has_tensor_cores is not False,
            is_fused_attention=attention is not None,
        ),
        *memory_savings(counted, basis, few_blocks(run), attention),
        fp64_saving(counted_once(of_main(run, kernel_rows(run, everything=True))), basis, gpu),
    ]
    if is_idle:  # what they save only once the device no longer waits comes after what it waits for
        causes_us = (c.rank_us for c in idle if c.share >= MIN_BEHIND_IDLE_FRAC and c.is_sure)
        limit_us = JUST_BELOW * max(causes_us, default=math.inf)
        of_kernels = [replace(c, waits_for_idle=True, rank_limit_us=limit_us) for c in of_kernels]
    return [communication, copies, *idle, *(within_reach(c, rows, windows, basis) for c in of_kernels)]


def _one_late(run: Run, saving: Saving) -> LateRankSaving | None:
    """The saving of waiting for one late rank, whose idle time is what the step consists of; None otherwise. Of ranks
    that began apart, nothing in the traces makes one late."""
    if not isinstance(saving, LateRankSaving) or len(saving.late_ranks) > 1 or saving.share < MIN_SAVED_FRAC:
        return None
    return None if not saving.slower_ratio and started_apart(run) else saving


def _of_idle_device(saving: CommunicationSaving, hidden_us: float, between_us: float) -> CommunicationSaving:
    """The saving on a device that is mostly idle. `hidden_us` of communication stands alone only since the host
    launches nothing beside it; `between_us` of it is idle time between collectives, which fewer calls shorten at
    once."""
    if saving.waiting_us or saving.waited_us:
        return saving
    saved_us = max(0.0, saving.saved_us - hidden_us)
    if between_us and saved_us <= between_us / MIN_BETWEEN_FRAC:
        what = f"{saving.what}; while the host is late, fewer calls save the idle time between them alone"
        return replace(saving, what=what, saved_us=between_us)
    return replace(saving, waits_for_idle=True, saved_us=saved_us)


MIN_BETWEEN_FRAC = 0.9
"""Share of idle time between collectives in what communication saves from which that is told as all of it."""


MIN_CAPTURE_FRAC = 0.5
MAX_CAPTURE_BUSY_FRAC = 0.05
"""A trace with that much of capturing and so little of the device's work, and without a launch of a graph, shows how
its program prepares."""


def _capture_us(run: Run, windows: pd.DataFrame, basis: Basis) -> float:
    """Time per step in which graphs are captured and built, microseconds; 0 if the trace holds more than that."""
    config, busy_us = run.head.config, float(windows["busy_us"].sum())
    if not config.get("captures") or config.get("graph_launches"):
        return 0.0
    us = float(windows["host_call_us"][windows["host_call_kind"] == "graphs"].sum())
    is_capture = us >= MIN_CAPTURE_FRAC * basis.cost.step_us * basis.steps and busy_us <= MAX_CAPTURE_BUSY_FRAC * us
    return us / basis.steps if is_capture else 0.0


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
