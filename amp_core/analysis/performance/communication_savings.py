"""What communication would save, and whether ranks communicate or wait for one another.

    >>> communication_saving(run, rows, basis).what
    'The GPU only communicates for 64 % of the step'

Where nearly all of it is waiting for ranks that enter late, the saving is that of the ranks that wait, see
`late_rank_savings`.
"""

from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from amp_core.analysis.performance.collectives import (
    REDUCING,
    collective_rows,
    gradient_dtype,
    has_all_ranks,
    longest_transfer,
    step_count,
    with_late_launches,
)
from amp_core.analysis.performance.gpus import profiled_gpu
from amp_core.analysis.performance.idle import alone_loading_us
from amp_core.analysis.performance.kernels import between_collectives_us, holds_collectives_alone, window_rows
from amp_core.analysis.performance.late_hosts import LateHosts
from amp_core.analysis.performance.late_rank_savings import (
    MAX_RANKS_NAMED,
    busiest_rank,
    entered_last,
    idle_instead,
    in_words,
    late_rank_saving,
    of_some_ranks,
)
from amp_core.analysis.performance.main_device import of_main
from amp_core.analysis.performance.missing_ranks import equal_collectives, slow_collectives, uneven_collectives
from amp_core.analysis.performance.rank_waiting import late_ranks, rank_waiting, waited_for
from amp_core.analysis.performance.saving import (
    MIN_SAVED_FRAC,
    Basis,
    CommunicationSaving,
    LateRankSaving,
    longest_name,
    step_share,
)
from amp_core.analysis.performance.step_cost import StepCost
from amp_core.store.run import Run
from amp_core.text.formatting import number, size

MIN_MISSING_FRAC = 0.25
"""Share of waiting for ranks whose traces are missing in the exposed communication from which it is told."""
MAX_WAITING_FRAC = 0.25
"""Share of waiting in it up to which the rate of the transfer is told."""


def communication_saving(run: Run, rows: pd.DataFrame, basis: Basis) -> CommunicationSaving | LateRankSaving:
    """The saving of exposed communication in a trace with these `kernel_rows`; that of waiting where nearly all of it
    is waiting for late ranks."""
    waits, here = _waits(run, basis.cost, basis.unit)
    late = late_rank_saving(run, basis.unit) or (busiest_rank(run, basis.unit) if not waits else None)
    return late or _of_transfer(run, rows, basis, waits, here)


def _of_transfer(run: Run, rows: pd.DataFrame, basis: Basis, waits: str, here: str) -> CommunicationSaving:
    """The saving of overlap, and of waiting as far as it is known; `waits` and `here`: of `_waits`."""
    cost, by_collective = basis.cost, collective_rows(run)
    measured = float(np.nan_to_num(cost.us("communication")))
    windows = of_main(run, with_late_launches(run, window_rows(run)))
    loading = alone_loading_us(windows) / basis.steps
    communication = max(0.0, measured - loading)
    exposed = by_collective.groupby("kernel")["alone_us"].sum()
    kernels = longest_name(rows[rows["category"] == "communication"], "name")
    waited_us = (
        _surely_waiting_us(by_collective) / basis.steps if windows["rank"].nunique() > 1 and has_all_ranks(run) else 0.0
    )
    missing = _missing_ranks(run, cost, communication, is_told=bool(waits))
    between = between_collectives_us(run, MIN_SAVED_FRAC * cost.step_us)
    many = basis.each_us(rows["count"][rows["category"] == "communication"])
    apart = f", and is idle for {step_share(between, cost)} between its {many:,.0f} collectives" if between else ""
    in_launch = f", {number(loading / 1e3, 'ms')} of it while its host stays in a launch" if loading else ""
    transfer = longest_transfer(run) if not missing.words and not by_collective["last"].isna().all() else None
    waited_ms = float(rank_waiting(run)["waiting_ms"].mean()) if transfer is not None else 0.0
    is_transfer = transfer is not None and waited_ms * 1e3 < MAX_WAITING_FRAC * measured
    carried = f"; {transfer.words}" if transfer is not None and is_transfer else ""
    in_one = "" if carried or waits or missing.us else _in_one(by_collective, measured * basis.steps)
    takes = "Collectives take" if holds_collectives_alone(run) else "The GPU only communicates for"
    return CommunicationSaving(
        "exposed-communication",
        communication + between,
        cost.step_us,
        f"{takes} {basis.taken(measured)}{in_launch}{in_one}{apart}{missing.words or waits}{carried}",
        str(exposed.idxmax()) if exposed.sum() > 0 else kernels,
        here,
        others=max(0, int((exposed > 0).sum()) - 1),
        waiting_us=missing.us,
        waiting_is_sure=missing.is_sure,
        waited_us=min(waited_us, communication),
        hardly_waits=missing.is_little,
        tells_transfer=bool(carried),
    )


def without_late_hosts(saving: CommunicationSaving, late: LateHosts) -> CommunicationSaving:
    """The saving of communication without the waiting for ranks whose hosts are late: what these cost holds it."""
    us = min(late.waiting_us, saving.saved_us)
    parts = f"{number(us / 1e3)} of the {number(saving.saved_us / 1e3, 'ms')}"
    return replace(
        saving,
        saved_us=saving.saved_us - us,
        what=f"{saving.what}; {parts} are waiting for ranks whose hosts are late, and part of what those cost",
        waiting_us=0.0,
        waited_us=0.0,
        late_hosts_us=us,
    )


def _in_one(rows: pd.DataFrame, exposed_us: float) -> str:
    """How much of exposed communication is in one of several collectives that each step makes, as part of a sentence;
    empty where none has most of it. `rows` of `collective_rows`."""
    calls = rows.groupby(["group", "number", "name"])["alone_us"]
    us = calls.median() * calls.size()
    if len(us) < 2 or us.max() < MIN_IN_ONE_FRAC * exposed_us or exposed_us <= 0:
        return ""
    same = calls.get_group(us.idxmax())
    bytes_ = rows["message_bytes"][same.index].median()
    kind = str(rows["name"][same.index[0]]).replace("_", "-")
    of_size = f" of {size(float(bytes_))}" if bytes_ > 0 else ""
    each = number(float(same.median()) / 1e3, "ms")
    return f", {each} of it in one {kind}{of_size}"


MIN_IN_ONE_FRAC = 0.5
"""Share of exposed communication in one collective of each step from which that is told."""


MIN_BUCKETS = 3
"""All-reduces of one backward from which gradients are reduced in buckets while it goes on."""


def beside_backward_us(run: Run, rows: pd.DataFrame, basis: Basis) -> float:
    """How much of exposed communication per step stands alone only because the host launches nothing beside it: all
    buckets of gradients but the last of each backward, after which it launches more; no more than backward computes.
    0 without marked steps. `rows`: of `kernel_rows`."""
    if not basis.cost.steps:
        return 0.0
    reduced = collective_rows(run)
    reduced = reduced[(reduced["name"] == "all_reduce") & (reduced["phase"] == "backward")]
    passes = reduced.groupby(["rank", "step"])
    is_last = reduced["ended_us"] == passes["ended_us"].transform("max")
    is_bucket = (passes["ended_us"].transform("size") >= MIN_BUCKETS) & ~is_last
    computing = (rows["phase"] == "backward") & (rows["category"] != "communication")
    return min(basis.each_us(reduced["alone_us"][is_bucket]), basis.each_us(rows["total_us"][computing]))


def _most_waited_for(run: Run) -> pd.DataFrame:
    """Rows of `rank_waiting` of the fewest ranks that more than half of the waiting is for, the latest first."""
    table = rank_waiting(run).sort_values("kept_ms", ascending=False, ignore_index=True)
    before_ms = table["kept_ms"].cumsum() - table["kept_ms"]
    return table[before_ms <= table["kept_ms"].sum() / 2]


@dataclass(frozen=True)
class _Missing:
    """How much of exposed communication is waiting for ranks whose traces are missing."""

    us: float = 0.0
    words: str = ""
    """For it, or for what is not known."""
    is_sure: bool = True
    """Whether it is at least that long; else only if all collectives carry equally much."""
    is_little: bool = False
    """Whether it is a small part at most, as far as equal calls tell it."""


def _missing_ranks(run: Run, cost: StepCost, exposed_us: float, *, is_told: bool) -> _Missing:
    """How much of exposed communication is waiting for ranks whose traces are missing. `is_told`: whether a
    comparison of the ranks that are here tells of waiting."""
    slow, waited, is_whole = slow_collectives(run), waited_for(run), has_all_ranks(run)
    waiting_us = min(slow.waiting_us, exposed_us) if slow is not None else 0.0
    known_us = 1e3 * waited.all_waiting_ms if waited is not None else 0.0
    enough_us = max(MIN_MISSING_FRAC * exposed_us, MIN_SAVED_FRAC * cost.step_us, (1 + is_whole) * known_us)
    if slow is not None and waiting_us >= enough_us:
        parts = f"at least {number(waiting_us / 1e3)} of {number(exposed_us / 1e3, 'ms')}"
        for_whom = "waiting for something other than these ranks" if is_whole else "waiting for other ranks"
        return _Missing(waiting_us, f", {parts} of it {for_whom}: {slow.longest}")
    if is_told or is_whole:
        return _Missing()
    uneven = uneven_collectives(run)
    uneven_us = min(uneven.waiting_us, exposed_us) if uneven is not None else 0.0
    if uneven is not None and uneven_us >= max(MIN_MISSING_FRAC * exposed_us, MIN_SAVED_FRAC * cost.step_us):
        words = (
            f", about {number(uneven_us / 1e3)} of {number(exposed_us / 1e3, 'ms')} of it waiting for other ranks if "
            f"all {uneven.calls:,} calls carry as much as the shortest, which take {number(uneven.shortest_us, 'µs')}"
        )
        return _Missing(uneven_us, words, is_sure=False)
    known_us = min(_surely_waiting_us(collective_rows(run)) / step_count(run), exposed_us)
    is_told = known_us >= MIN_TOLD_FRAC * exposed_us > 0
    parts, equal = number(known_us / 1e3, "ms") if is_told else "", equal_collectives(run)
    if equal is not None and MIN_TOLD_FRAC * exposed_us <= equal.most_us < MAX_WAITING_FRAC * exposed_us:
        at_least = f"at least {number(known_us / 1e3)} and " if is_told else ""
        words = (
            f", {at_least}at most {number(equal.most_us / 1e3)} of {number(exposed_us / 1e3, 'ms')} of it waiting for "
            f"other ranks, if the shortest of {equal.calls:,} such calls waits for none"
        )
        return _Missing(words=words, is_little=True)
    ranks, least = window_rows(run)["rank"].nunique(), "at least " if run.head.config.get("world_size_is_least") else ""
    of_all = f" of {least}{run.head.world_size} ranks" if run.head.world_size > ranks else f" rank{'s' * (ranks > 1)}"
    traces = "the trace of one" if ranks == 1 else f"the traces of {ranks}"
    does_not = "does not" if ranks == 1 else "do not"
    at_least = f", at least {parts}" if parts else ""
    return _Missing(words=f"; {traces}{of_all} {does_not} show how much of that is waiting for others{at_least}")


MIN_TOLD_FRAC = 0.05
"""Share of exposed communication that surely is waiting from which that is told as the least."""


def _surely_waiting_us(rows: pd.DataFrame) -> float:
    """At least that much of exposed communication is waiting, in all steps of all ranks. What runs beside a collective
    may hide the waiting or the transfer. `rows` of `collective_rows`."""
    beside = rows["transfer_us"] + rows["stalled_us"]
    return float((rows["alone_us"] - beside).clip(lower=0.0).fillna(0.0).sum())


def _stalls(run: Run, cost: StepCost) -> str:
    """How long a rank stays in collectives that all have entered, as part of a sentence; empty if not long."""
    ms = float(rank_waiting(run)["stalled_ms"].mean())
    if not 1e3 * ms >= MIN_SAVED_FRAC * cost.step_us:
        return ""
    return f", and {number(ms, 'ms')} in them after all have entered, for no reason that the traces show"


MAX_EQUAL_SPREAD = 0.05
"""Difference of the ranks' own kernel time, as a share of its mean, up to which they do equally much."""
MAX_EXPLAINED_FRAC = 0.25
"""The same as a share of the time that a rank waits, which it hardly explains."""


def _varies(run: Run) -> str:
    """What makes each rank late now and then, as part of a sentence: their own work, if it takes unequally long."""
    us = window_rows(run).groupby("rank")[["kernel_us", "communication_us"]].sum()
    steps = max(1.0, float(window_rows(run)["steps"].fillna(0.0).sum()) / len(us))
    own_us = (us["kernel_us"] - us["communication_us"]) / steps
    waited_us = rank_waiting(run)["waiting_ms"].mean() * 1e3
    if own_us.max() - own_us.min() <= max(MAX_EQUAL_SPREAD * own_us.mean(), MAX_EXPLAINED_FRAC * waited_us):
        return ", though their kernels take equally long in all"
    return ", as where the work of the ranks varies"


def compress_hook(run: Run) -> str:
    """The hook of DistributedDataParallel that reduces gradients in 16 bits which the device computes with itself. That
    of BF16 is refused where torch is not built for NVIDIA's or AMD's GPUs (`_check_comm_hook`)."""
    windows = window_rows(run)
    device = str(windows["device"].iloc[0])
    gpu = profiled_gpu(run, device, str(windows["device_name"].iloc[0]))
    takes_bf16 = device.startswith("cuda") and gpu.takes("bf16") is not False
    return f"{'bf16' if takes_bf16 else 'fp16'}_compress_hook"


def _waits(run: Run, cost: StepCost, unit: str) -> tuple[str, str]:
    """How much of the time in collectives is spent waiting, as part of a sentence; and which ranks to look at."""
    waited, dtype = waited_for(run), gradient_dtype(run)
    if waited is not None and 1e3 * waited.all_waiting_ms >= MIN_SAVED_FRAC * cost.step_us:
        share = step_share(1e3 * waited.all_waiting_ms, cost)
        at_least, of_these = of_some_ranks(run)
        late, ranks = late_ranks(run), window_rows(run)["rank"].nunique()
        stalls = _stalls(run, cost)
        words = f"; a rank spends {at_least}{share} in collectives waiting for others{stalls}"
        if late.empty or len(late) > max(2.0, ranks / 2):
            late = late if len(late) else rank_waiting(run)
            often = f"up to {entered_last(late.nlargest(1, 'last_frac'))[0]} collectives last{of_these}"
            who = f"{len(late)} of {ranks} ranks each enter"
            varies = "" if stalls else _varies(run)
            return words, f"no rank is late alone: {who} {often}{varies}"
        if len(late) == 1 and len(most := _most_waited_for(run)) <= max(2.0, ranks / 2):
            late = most if len(most) > 1 else late
            words = words.replace(" for others", f" for others, most of it for {in_words(late['rank'].tolist())}", 1)
        late = late.head(MAX_RANKS_NAMED)
        waiters, mean = ("the other rank waits", "") if ranks == 2 else ("the others wait", " on average")
        first, *others = [
            f"rank {rank} enters {share} collectives last{of_these}, and {waiters} {at_least}{number(kept_ms, 'ms')} "
            f"per {unit} for it{mean}"
            for rank, share, kept_ms in zip(late["rank"], entered_last(late), late["kept_ms"], strict=True)
        ]
        look_at = "look at what it does before the collectives" if not others else "look at what they do before them"
        look_at = idle_instead(run, late, unit) or look_at
        if of_these:
            look_at = "a rank whose trace is missing may enter later still"
        return words, f"{'; '.join([first, *others])}: {look_at}"
    rows = collective_rows(run)
    reduces_us = float(rows["alone_us"][rows["name"].isin(REDUCING)].sum())
    steps = float(window_rows(run)["steps"].sum()) or float(len(window_rows(run)))
    if reduces_us / max(steps, 1.0) < MIN_SAVED_FRAC * cost.step_us:
        return "", ""
    if dtype == "float32":
        return "", (
            "gradients are reduced in FP32, and 16 bits halve the bytes: "
            f"model.register_comm_hook(None, default_hooks.{compress_hook(run)})"
        )
    return "", f"gradients are already reduced in {dtype}" if dtype else ""
