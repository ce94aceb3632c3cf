"""One possible saving in a trace, and how its part of the step is put into words.

>>> Saving("copies", 120.0, 1000.0, "Copies take 12 % of the step", "Memcpy HtoD").how_much("step")
'up to 0.120 of 1.00 ms per step'
"""

import math
import re
from dataclasses import dataclass

import numpy as np
import pandas as pd

from amp_core.analysis.performance.gemm_shapes import Product
from amp_core.analysis.performance.step_cost import StepCost
from amp_core.hardware.data_sheets import Rates
from amp_core.text.formatting import number

MIN_SAVED_FRAC = 0.05
"""Smaller savings are not reported."""
MIN_KERNEL_US = 1e-3
"""Less is no kernel time: a trace may hold copies alone."""
MIN_INSIDE_FRAC = 0.01
"""Share of a saving from which its part within the step is told beside one before it, and the other way round."""


@dataclass(frozen=True)
class Basis:
    """What the savings of a trace are reckoned from."""

    cost: StepCost
    steps: float
    """Profiled steps, of all ranks; windows where no steps are known."""
    unit: str
    """What there is one of for each of `steps`: `step` or `profiled window`."""
    rates: Rates | None
    """The data sheet's; None where it is not listed."""

    def each_us(self, us: "pd.Series[float]") -> float:
        """The sum of microseconds, or of counts, per step."""
        return float(us.sum()) / self.steps

    def taken(self, us: float) -> str:
        """`28 % of the step`: microseconds per step in words."""
        return f"{step_share(us, self.cost)} of the {self.unit}"

    def is_long(self, us: float) -> bool:
        """Whether so many microseconds per step would be reported as a saving."""
        return us >= MIN_SAVED_FRAC * self.cost.step_us


@dataclass(frozen=True)
class Saving:
    """One possible saving. Of idle time, communication, products and memory traffic there are kinds that carry more."""

    code: str
    """Code of the finding."""
    saved_us: float
    """Upper bound in microseconds per step (or window)."""
    step_us: float
    what: str
    where: str
    """The operator, the kernel or the setting concerned; of several the longest."""
    here: str = ""
    """What the trace adds to the finding's advice: sizes to pad to, the rank that others wait for."""
    others: int = 0
    """How many operators or kernels it is of beside `where`."""
    is_of_part: bool = False
    """Whether `where` accounts for a part of it only, and nothing else that could be counted for the rest."""
    lead_us: float = 0.0
    """Part of `saved_us` before the first kernel, with which the step begins where the device marks it; beside it."""
    before_us: float = 0.0
    """All time before the first kernel, of which `lead_us` is a part; the same where that is all."""
    waits_for_idle: bool = False
    """Whether it shortens kernels of a device that is idle for most of the step: most of them delay nothing, so the
    step becomes shorter only once the device no longer waits."""
    waits_for_ranks: bool = False
    """Whether its rank surely waits as long for ranks whose traces are missing: while those are late, a rank that comes
    sooner waits longer."""
    rank_limit_us: float = math.inf
    """By how much it is ranked at most."""
    unlimited: "Saving | None" = None
    """The same as it would be where the host is ahead of the device, if its host limits it."""
    is_sure: bool = True
    """False if the time may be the profiler's own: perhaps a step without it has nothing to save."""

    @property
    def rank_us(self) -> float:
        """By how much it is ranked: one that is not sure by half of it."""
        return min(self.saved_us if self.is_sure else self.saved_us / 2, self.rank_limit_us)

    @property
    def share(self) -> float:
        """The saving as a share of the step; with `lead_us`, of the step and the time before it."""
        return self.saved_us / (self.step_us + (max(self.before_us, self.lead_us) if self.lead_us else 0.0))

    @property
    def in_sentence(self) -> str:
        """What it is of, within a sentence; `GEMM/conv` keeps its capitals."""
        return self.what if self.what[:2].isupper() else f"{self.what[0].lower()}{self.what[1:]}"

    def how_much(self, unit: str = "") -> str:
        """`up to 21.3 of 33.1 ms`, of one `unit` if that is given. What comes before the step is told apart."""
        per, step = f" per {unit}" if unit else "", number(self.step_us / 1e3, "ms")
        when = ", once the device no longer waits" if self.waits_for_idle else ""
        when += ", once no other rank is waited for" if self.waits_for_ranks else ""
        if self.lead_us < MIN_INSIDE_FRAC * self.saved_us or not self.lead_us:
            return f"up to {number(self.saved_us / 1e3)} of {step}{per}{when}"
        inside, before = round(self.saved_us - self.lead_us, 1), number(self.lead_us / 1e3, "ms")
        if inside < MIN_INSIDE_FRAC * self.saved_us:
            return f"up to {before}{f'{per}, all' if per else ''} before the first kernel{when}"
        return f"up to {number(inside / 1e3)} of {step}{per}, and {before} before the first kernel{when}"


@dataclass(frozen=True)
class LateHost:
    """What a host does while its device waits for late launches."""

    calls: str = ""
    """The kind of calls into the device's runtime in which it mostly stays, see `late_launches.CALLS`; empty for
    others."""
    is_in_first_call: bool = False
    """Whether nearly all of its time in the place that is named is in the first calls of that."""
    builds_tensors: bool = False
    """Whether most of its time in no operator is in `torch.tensor`."""
    has_longer_gaps: bool = False
    """Of launches that are slow one by one: whether much of the time is in longer gaps."""


@dataclass(frozen=True)
class IdleSaving(Saving):
    """What a device saves that is idle for late launches, for the host's waits, or with work queued."""

    copies_values: bool = False
    """Whether values are copied to the host one by one."""
    host: LateHost = LateHost()
    """Of late launches: what the host does meanwhile."""
    alone_us: float = math.inf
    """Of the host's waits: what the step gains without those in `where` alone; infinite if not known."""
    waits_for_graph: bool = False
    """Of queued work: whether it mostly waits for a captured graph to start."""
    is_handed_over: bool = False
    """Of queued work: whether it mostly waits for an event of another stream."""
    waits_in: str = ""
    """Of queued work: the operator in which the host waits meanwhile; empty if that explains nothing."""


@dataclass(frozen=True)
class CommunicationSaving(Saving):
    """What overlap, and ranks that are not late, save of communication with nothing beside it."""

    waiting_us: float = 0.0
    """At least that much of `saved_us` is waiting for ranks whose traces are missing."""
    waiting_is_sure: bool = True
    """False if it is that long only where all of the collectives carry as much as the shortest ones."""
    waited_us: float = 0.0
    """Of ranks that are all here: at least that much of `saved_us` is waiting for others."""
    hosts_us: float = 0.0
    """How long the device waits for late launches of its host."""
    hardly_waits: bool = False
    """Whether equal calls tell that a small part of it is waiting at most, whichever ranks' traces are missing."""
    late_hosts_us: float = 0.0
    """Waiting for ranks whose hosts are late, which is no part of `saved_us`, but of what those hosts cost."""
    tells_transfer: bool = False
    """Whether `what` tells the transfer that takes longest."""

    @property
    def surely_waiting_us(self) -> float:
        """At least that much of it is waiting for others, here or missing."""
        return max(self.waited_us, self.waiting_us if self.waiting_is_sure else 0.0)

    @property
    def of_hosts_us(self) -> float:
        """That waiting where the hosts of the ranks that are here launch too late for as long, and so at different
        times; else 0."""
        return self.surely_waiting_us if self.hosts_us >= self.surely_waiting_us else 0.0

    @property
    def rank_us(self) -> float:
        """By how much it is ranked: without what slow hosts explain."""
        return min(self.saved_us - self.of_hosts_us, self.rank_limit_us)


@dataclass(frozen=True)
class LateRankSaving(Saving):
    """What ranks save that wait for late ones for nearly all of the time in which they only communicate."""

    late_ranks: tuple[int, ...] = ()
    """The ranks that the others wait for, the latest first; at least one."""
    held_ranks: tuple[int, ...] = ()
    """Those of them whose GPUs are idle mostly with work queued: their hosts are not late."""
    slower_ratio: float = 0.0
    """How many times as long as the others' GPUs those of the late ranks take for as many kernels; 0 where they do not.
    """
    all_waiting: bool = True
    """Whether the transfer itself is surely a small part of it."""
    all_hosts_us: float = 0.0
    """How long the hosts of the others take for a step by themselves, if that is so long that the late ranks alone
    would save less than half of `saved_us`; else 0."""
    is_of_all_hosts: bool = False
    """Whether that is so, and their hosts are what makes the late ones late."""


@dataclass(frozen=True)
class ProductSaving(Saving):
    """What products of matrices save on tensor cores, or at a good share of their rate."""

    memory_bounds: bool = False
    """Of products in FP32 and TF32: whether memory, and not arithmetic, bounds most of them at the data sheet's
    rates."""
    is_emulated: bool = False
    """Of the same: whether most of them are of inputs in BF16, which the tensor cores of the GPU do not take."""
    ideal_us: float = 0.0
    """Of slow products: what one call of the slowest operator would take at a good share of the peak rate."""
    blocks_per_sm: float | None = None
    """Of slow products: blocks of the slowest operator's grid per multiprocessor; None if not known."""
    slowest: Product | None = None
    """Of slow products: the sizes of the slowest operator; None if not known."""
    gathered_us: float = 0.0
    """What products take per step whose matrices are copied for them, with the copies, if it is of these; else 0."""
    are_shared: bool = False
    """Of the same: whether several of these products share a matrix."""


@dataclass(frozen=True)
class MemorySaving(Saving):
    """What kernels save that memory bounds, if they are fused or left out."""

    fused_us: float = math.inf
    """The part of `saved_us` that fusing alone saves."""
    are_shortest: bool = False
    """Whether most of their time is in kernels as short as any, or in short ones that move hardly anything: starting
    takes it, and not memory."""
    are_small: bool = False
    """Of a GPU that the trace does not name: whether most of their time is in kernels that move hardly anything, at a
    rate that no memory of a GPU has as its limit: starting takes it, or their few blocks."""
    few_blocks_frac: float = 0.0
    """The share of their time in kernels with fewer blocks than the GPU has multiprocessors: memory does not bound
    these."""
    few_blocks_of: tuple[str, str] = ("", "")
    """The kernel and the operator with most of that; empty without such kernels."""
    lone_us: float = 0.0
    """The part in casts between products, which nothing is fused with."""
    attention_us: float = 0.0
    """The part that one kernel of attention saves of its softmax, its products and what lies between these."""


def unit_of(cost: StepCost) -> str:
    """What the times of a trace are of one each: `step`, or `profiled window` where it has no steps."""
    return "step" if cost.steps else "profiled window"


def step_share(us: float, cost: StepCost) -> str:
    """`28 %`: microseconds as a share of the step; `99.7 %` where 100 % would be too much, and `4.6 %` where 5 % would
    look like the share from which a saving is reported."""
    share, least = 100 * us / cost.step_us, 100 * MIN_SAVED_FRAC
    if share < least <= round(share):
        return f"{share:.1f} %" if round(share, 1) < least else f"{share:.2f} %"
    return f"{share:.1f} %" if 99.5 <= share < 99.95 else f"{share:.0f} %"


def time_and_lead(us: float, lead_us: float, basis: Basis) -> str:
    """`28 % of the step and 1.61 ms before its first kernel`."""
    if not basis.is_long(lead_us):
        return basis.taken(us)
    before = number(lead_us / 1e3, "ms")
    if not basis.is_long(us):
        return f"{before} before the first kernel of the {basis.unit}"
    return f"{basis.taken(us)} and {before} before its first kernel"


def without_gpu(text: str) -> str:
    """`text` on a device that is no GPU of NVIDIA's or AMD's: `The device is idle` for `The GPU is idle`."""
    return re.sub(r"\bGPU(s?)\b", r"device\1", text)


def longest_name(rows: pd.DataFrame, column: str) -> str:
    """The value of `column` with most of the time; empty for no rows."""
    us = rows.groupby(column)["total_us"].sum()
    return str(us.idxmax()) if len(us) else ""


def is_mostly_idle(cost: StepCost) -> bool:
    """Whether a device is idle for so much of the step that a shorter kernel mostly makes the wait after it longer."""
    return float(np.nan_to_num(cost.us("gaps", "data"))) > MAX_IDLE_FRAC * cost.step_us


MAX_IDLE_FRAC = 0.5


def others(rows: pd.DataFrame, column: str) -> int:
    """How many values of `column` there are beside that with most of the time."""
    return max(0, rows[column].nunique() - 1)
