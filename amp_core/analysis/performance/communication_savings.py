"""What communication and copies would save, and whether ranks communicate or wait for one another.

    >>> for saving in alone_savings(run, cost, rows, unit="step"): print(saving.code, saving.saved_us, saving.what)
    exposed-communication 21300.0 The GPU only communicates for 64 % of the step

Where nearly all of it is waiting for ranks that enter late, the saving is that of the ranks that wait:

    exposed-communication 1012000.0 The other ranks wait 92 % of the step in collectives for rank 2, which enters ...
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from amp_core.analysis.performance.collectives import (
    KEYS,
    REDUCING,
    HostLag,
    began_later_us,
    collective_rows,
    gradient_dtype,
    has_all_ranks,
    host_lag,
    late_ranks,
    longest_transfer,
    rank_waiting,
    slow_collectives,
    started_apart,
    uneven_collectives,
    waited_for,
    with_late_launches,
)
from amp_core.analysis.performance.copy_savings import copies_saving
from amp_core.analysis.performance.gpus import profiled_gpu
from amp_core.analysis.performance.idle import alone_loading_us
from amp_core.analysis.performance.kernels import (
    between_collectives_us,
    holds_collectives_alone,
    of_main,
    window_rows,
)
from amp_core.analysis.performance.saving import MIN_SAVED_FRAC, Basis, Saving, longest_name, step_share
from amp_core.analysis.performance.step_cost import StepCost
from amp_core.store.run import Run
from amp_core.text.formatting import number, share_of, size

MIN_WAITING_FRAC = 0.85
"""Share of waiting in the exposed communication of the ranks that wait from which the network is no part of the
fault."""
MIN_SURE_FRAC = 0.8
"""Share of it that comes before the last rank enters, whatever hides the rest, from which nothing else shortens it."""
MIN_HELD_FRAC = 0.5
"""Share of a late rank's idle time with work queued from which its GPU, and not its host, is what is late."""
MIN_MISSING_FRAC = 0.25
"""Share of waiting for ranks whose traces are missing in the exposed communication from which it is told."""
MAX_WAITING_FRAC = 0.25
"""Share of waiting in it up to which the rate of the transfer is told."""
MAX_RANKS_NAMED = 4


def alone_savings(run: Run, rows: pd.DataFrame, basis: Basis) -> list[Saving]:
    """The savings of exposed communication and of copies, in a trace with these `kernel_rows`."""
    cost = basis.cost
    communication = np.nan_to_num(cost.us("communication"))
    windows = of_main(run, with_late_launches(run, window_rows(run)))
    measured, loading = communication, alone_loading_us(windows) / basis.steps
    communication = max(0.0, communication - loading)
    by_collective = collective_rows(run)
    exposed = by_collective.groupby("kernel")["alone_us"].sum()
    kernels = longest_name(rows[rows["category"] == "communication"], "name")
    where = str(exposed.idxmax()) if exposed.sum() > 0 else kernels
    waits, here = _waits(run, cost, basis.unit)
    # What runs beside a collective may hide the waiting or the transfer.
    beside = by_collective["transfer_us"] + by_collective["stalled_us"]
    surely_us = float((by_collective["alone_us"] - beside).clip(lower=0.0).fillna(0.0).sum())
    waited_us = surely_us / basis.steps if windows["rank"].nunique() > 1 and has_all_ranks(run) else 0.0
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
    told = f"{in_launch}{in_one}{apart}{missing.words or waits}{carried}"
    takes = "Collectives take" if holds_collectives_alone(run) else "The GPU only communicates for"
    communicates = f"{takes} {basis.taken(measured)}{told}"
    return [
        late_rank_saving(run, basis.unit)
        or (_busiest_rank(run, basis.unit) if not waits else None)
        or Saving(
            "exposed-communication",
            communication + between,
            cost.step_us,
            communicates,
            where,
            here,
            waiting_us=missing.us,
            waiting_is_sure=missing.is_sure,
            others=max(0, int((exposed > 0).sum()) - 1),
            waited_us=min(waited_us, communication),
            tells_transfer=bool(carried),
        ),
        copies_saving(run, rows, windows, basis, communicates=measured > 0),
    ]


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


def late_rank_saving(run: Run, unit: str) -> Saving | None:
    """The saving if nearly all exposed communication is waiting for ranks that enter late, by their entering with the
    last of the others; None otherwise. It is that of the ranks that wait: the late ones would save nothing."""
    rows, late = collective_rows(run), late_ranks(run)
    if late.empty:
        return None
    waiting_us = rows[["waiting_us", "alone_us"]].min(axis=1).where(rows["waiting_us"].notna(), 0.0)
    named, windows = late["rank"].tolist(), with_late_launches(run, window_rows(run))
    waits = ~rows["rank"].isin(named)
    exposed_us = float(rows["alone_us"][waits].sum())
    if waiting_us[waits].sum() < MIN_WAITING_FRAC * exposed_us or exposed_us <= 0:
        return None
    is_for_late = rows["last"].isin(named) & waits
    for_late = waiting_us[is_for_late]
    # The collective begins earlier only by as much as the next rank enters before them.
    next_us = float(for_late.groupby([rows.loc[is_for_late, key] for key in KEYS], dropna=False).min().sum())
    ranks = windows["rank"].nunique()
    others = ranks - len(named)
    if not others:  # each rank is late now and then
        return None
    steps = max(1.0, float(windows["steps"].fillna(1.0).sum())) / ranks
    hidden_us = alone_loading_us(windows[~windows["rank"].isin(named)])
    their_step_us = float(windows["wall_us"][~windows["rank"].isin(named)].sum()) / others / steps
    theirs_us = min(their_step_us, max(0.0, float(for_late.sum()) - hidden_us) / others / steps)
    saved_us = min(theirs_us, next_us / steps)
    # A collective first waits and then transfers: what runs beside it may hide either.
    beside = rows["transfer_us"] + rows["stalled_us"]
    surely_us = float((rows["alone_us"] - beside).clip(lower=0.0).fillna(0.0)[waits].sum())
    is_sure = surely_us >= MIN_SURE_FRAC * exposed_us
    mean_ms = 1e3 * others * steps
    parts = (
        f"; of the {number(exposed_us / mean_ms, 'ms')} that another rank only communicates, at least "
        f"{number(surely_us / mean_ms, 'ms')} are waiting and at most "
        f"{number((exposed_us - surely_us) / mean_ms, 'ms')} the transfer"
    )
    shown = late.head(MAX_RANKS_NAMED)
    at_least, of_these = _of_some_ranks(run)
    idle, held = _idle_of_late(windows, named, shown["rank"].tolist(), steps, unit)
    idle = "" if holds_collectives_alone(run) else f"{idle}; "
    slower = slower_gpus(windows, named, theirs_us * steps) if set(held) != set(named) else 0.0
    theirs = windows[~windows["rank"].isin(named)]
    hosts_us = float(theirs["host_us"].sum()) / others / steps
    lag = host_lag(rows, named)
    if lag is not None:  # where a host waits for its device, it catches up with the late ones
        waited_us = float(theirs["sync_us"].fillna(0.0).sum()) / others / steps
        hosts_us = max(hosts_us, their_step_us - lag.last_us - waited_us)
    apart = started_apart(run)
    later_us = began_later_us(run) if apart else 0.0
    all_hosts_us = hosts_us if hosts_us >= their_step_us - theirs_us / 2 and not apart else 0.0
    is_of_all_hosts = bool(all_hosts_us and is_sure and not slower and set(held) != set(named))
    enters = f"which {'enter' if len(named) > 1 else 'enters'} {' and '.join(_last(shown))} last{of_these}"
    if later_us:
        enters = f"whose {'step' if unit == 'step' else 'trace'} begins {number(later_us / 1e3, 'ms')} later"
    idle = "" if later_us else idle
    return Saving(
        "exposed-communication",
        saved_us,
        their_step_us,
        f"The other ranks wait {at_least}{100 * theirs_us / their_step_us:.0f} % of the {unit} in collectives for "
        f"{_ranks(named)}, {enters}"
        f"{_as_slower(slower, len(named), on_cpu=bool(windows['device'].str.startswith('cpu').all()))}"
        f"{', though their own hosts are nearly as slow' if is_of_all_hosts else ''}",
        f"rank {named[0]}",
        f"{idle}the collectives themselves take {number(float(rank_waiting(run)['transfer_ms'].mean()), 'ms')}"
        f"{'' if is_sure else parts}{_late_before(windows, named, lag, steps, unit)}",
        all_waiting=is_sure,
        all_hosts_us=all_hosts_us,
        is_of_all_hosts=is_of_all_hosts,
        late_ranks=tuple(named),
        held_ranks=held,
        slower_ratio=slower,
    )


def _late_before(windows: pd.DataFrame, late: list[int], lag: HostLag | None, steps: float, unit: str) -> str:
    """That one late rank is as far behind at the first collective of a step as later, since it began to launch that
    much later, as part of a sentence; else empty."""
    if lag is None or len(late) > 1 or lag.longest_us > MAX_GROWTH_RATIO * lag.first_us or lag.longest_us <= 0:
        return ""
    us = windows.groupby("rank")[["lead_us", "lead_data_us", "idle_data_us"]].sum() / steps
    begins_us, data_us = us["lead_us"] + us["idle_data_us"], us["lead_data_us"] + us["idle_data_us"]
    later_us, loads_us = (one[late[0]] - one.drop(late).mean() for one in (begins_us, data_us))
    if later_us < MIN_EXPLAINED_FRAC * lag.first_us:
        return ""
    does = "what it does before that makes it late"
    if loads_us >= MIN_EXPLAINED_FRAC * lag.first_us:
        theirs = number(float(data_us.drop(late).mean()) / 1e3, "ms")
        does = f"it loads data for {number(data_us[late[0]] / 1e3)} instead of {theirs} before"
    behind = number(lag.first_us / 1e3, "ms")
    return f"; rank {late[0]} is {behind} behind at the first collective of the {unit}, and hardly more later: {does}"


MAX_GROWTH_RATIO = 1.25
"""How many times as far a late rank may be behind at later collectives as at the first, for what comes before that to
be the cause."""
MIN_SLOWER_RATIO = 1.3
"""A GPU that takes that many times as long for as many kernels is slower: others' sizes differ by less."""
MIN_OF_WAITING_FRAC = 0.25
"""Share of the waiting in what the late ranks' kernels take longer from which that is what makes them late."""
MAX_LAUNCHES_SPREAD = 0.1
"""Difference of the ranks' numbers of kernels, as a share of their mean, up to which they do the same."""


def slower_gpus(windows: pd.DataFrame, late: list[int], waited_us: float) -> float:
    """How many times as long as the others' the kernels of the late ranks take, without communication, if all ranks
    launch as many and this is much of the `waited_us` that another rank waits; 0 where it is not, or they take about
    as long."""
    sums = windows.groupby("rank")[["kernel_us", "communication_us", "launches"]].sum()
    launches, own_us = sums["launches"], sums["kernel_us"] - sums["communication_us"]
    is_late = sums.index.isin(late)
    if (
        not (is_late.any() and (~is_late).any())
        or launches.max() - launches.min() > MAX_LAUNCHES_SPREAD * launches.mean()
    ):
        return 0.0
    late_us, others_us = float(own_us[is_late].min()), float(own_us[~is_late].mean())
    ratio = late_us / max(others_us, 1e-3)
    return ratio if ratio >= MIN_SLOWER_RATIO and late_us - others_us >= MIN_OF_WAITING_FRAC * waited_us else 0.0


MIN_BUSIER_RATIO, MAX_BUSIEST_FRAC = 1.5, 0.5
"""A rank computes that many times as long as the others, and communicates for no more than that part of their time."""


def _busiest_rank(run: Run, unit: str) -> Saving | None:
    """The saving where one rank computes far longer than the others, which only communicate meanwhile, and the
    collectives themselves do not tell who waits, as those of experts; None otherwise."""
    windows = window_rows(run)
    ranks = windows["rank"].nunique()
    if ranks < MIN_RANKS or not has_all_ranks(run):
        return None
    steps = max(1.0, float(windows["steps"].fillna(1.0).sum()) / ranks)
    sums = windows.groupby("rank")[["kernel_us", "communication_us", "wall_us"]].sum() / steps
    sums = sums.assign(own_us=sums["kernel_us"] - sums["communication_us"]).sort_values("own_us")
    busiest, others = sums.iloc[-1], sums.iloc[:-1]
    own_us, theirs_us = float(busiest["own_us"]), float(others["own_us"].mean())
    waited_us = float((others["communication_us"] - busiest["communication_us"]).clip(lower=0.0).mean())
    beside_us = own_us - theirs_us
    if (
        own_us < MIN_BUSIER_RATIO * float(others["own_us"].max())
        or busiest["communication_us"] > MAX_BUSIEST_FRAC * others["communication_us"].min()
        or waited_us < MIN_WAITING_FRAC * beside_us
    ):
        return None
    rank, step_us = int(float(str(busiest.name))), float(others["wall_us"].mean())
    return Saving(
        "exposed-communication",
        min(waited_us, beside_us * (ranks - 1) / ranks),  # shared out, all compute the mean
        step_us,
        f"The other ranks wait {100 * waited_us / step_us:.0f} % of the {unit} in collectives for rank {rank}, whose "
        f"GPU computes for {number(own_us / 1e3)} instead of {number(theirs_us / 1e3, 'ms')}",
        f"rank {rank}",
        late_ranks=(rank,),
        slower_ratio=own_us / max(theirs_us, 1e-3),
    )


MIN_RANKS = 3
"""Ranks from which one of them is an exception."""


def _as_slower(ratio: float, count: int, *, on_cpu: bool) -> str:
    """That the late ranks' GPUs are slower, as part of a sentence; empty where they are not."""
    if not ratio:
        return ""
    if on_cpu:
        return f": {'its' if count == 1 else 'their'} operators take {ratio:.1f} × as long"
    return f": {'its GPU takes' if count == 1 else 'their GPUs take'} {ratio:.1f} × as long for as many kernels"


def _idle_of_late(
    windows: pd.DataFrame, late: list[int], shown: list[int], steps: float, unit: str
) -> tuple[str, tuple[int, ...]]:
    """How long the GPUs of the late ranks `shown` are idle, and those of ranks that are not `late`, in words; and the
    late ranks whose GPU is idle although work is queued."""
    ms = windows.groupby("rank")[["idle_us", "idle_late_start_us"]].sum() / steps / 1e3
    idle_ms, queued_ms = ms["idle_us"], ms["idle_late_start_us"]
    held = tuple(rank for rank in late if queued_ms[rank] >= MIN_HELD_FRAC * idle_ms[rank] > 0)
    each = ", ".join(
        f"rank {rank}'s GPU is idle for {number(idle_ms[rank], 'ms')}"
        + (f" ({number(queued_ms[rank], 'ms')} of it although work is queued)" if rank in held else "")
        for rank in shown
    )
    return f"{each} of the {unit}, the others' for {number(float(idle_ms.drop(late).mean()), 'ms')}", held


def _most_waited_for(run: Run) -> pd.DataFrame:
    """Rows of `rank_waiting` of the fewest ranks that more than half of the waiting is for, the latest first."""
    table = rank_waiting(run).sort_values("kept_ms", ascending=False, ignore_index=True)
    before_ms = table["kept_ms"].cumsum() - table["kept_ms"]
    return table[before_ms <= table["kept_ms"].sum() / 2]


def _idle_instead(run: Run, late: pd.DataFrame, unit: str) -> str:
    """How long the GPUs of the late ranks are idle, and those of the others, in words; empty where that does not
    explain why the others wait for each of them. `late`: rows of `rank_waiting`."""
    if holds_collectives_alone(run):
        return ""
    windows, ranks = window_rows(run), late["rank"].tolist()
    steps = max(1.0, float(windows["steps"].fillna(1.0).sum()) / windows["rank"].nunique())
    idle_ms = windows.groupby("rank")["idle_us"].sum() / steps / 1e3
    beyond_ms = idle_ms[ranks].to_numpy() - idle_ms.drop(ranks).mean()
    if not (beyond_ms >= MIN_EXPLAINED_FRAC * late["kept_ms"].to_numpy()).all():
        return ""
    return _idle_of_late(windows, ranks, ranks, steps, unit)[0]


MIN_EXPLAINED_FRAC = 0.5
"""Share of the waiting for one rank that its GPU is idle beyond the others' from which that is told."""


def _ranks(ranks: list[int]) -> str:
    """`rank 2`, `ranks 0 and 6`, `ranks 0, 1, 2, 3 and 5 more`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = len(ranks) - MAX_RANKS_NAMED
    last = f"{more} more" if more > 0 else str(ranks[-1])
    return f"ranks {', '.join(map(str, ranks[:-1][:MAX_RANKS_NAMED]))} and {last}"


def _last(late: pd.DataFrame) -> list[str]:
    """For each row of `rank_waiting`, how many collectives its rank enters last, `3 of 4`."""
    return [share_of(round(frac * n), n) for frac, n in zip(late["last_frac"], late["collectives"], strict=True)]


@dataclass(frozen=True)
class _Missing:
    """How much of exposed communication is waiting for ranks whose traces are missing."""

    us: float = 0.0
    words: str = ""
    """For it, or for what is not known."""
    is_sure: bool = True
    """Whether it is at least that long; else only if all collectives carry equally much."""


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
    ranks, least = window_rows(run)["rank"].nunique(), "at least " if run.head.config.get("world_size_is_least") else ""
    of_all = f" of {least}{run.head.world_size} ranks" if run.head.world_size > ranks else f" rank{'s' * (ranks > 1)}"
    traces = "the trace of one" if ranks == 1 else f"the traces of {ranks}"
    does_not = "does not" if ranks == 1 else "do not"
    return _Missing(words=f"; {traces}{of_all} {does_not} show how much of that is waiting for others")


def _of_some_ranks(run: Run) -> tuple[str, str]:
    """Words for what traces of some of the ranks leave open: one whose trace is not here may be later still."""
    ranks = window_rows(run)["rank"].nunique()
    if ranks >= run.head.world_size:
        return "", ""
    least = "at least " if run.head.config.get("world_size_is_least") else ""
    return "at least ", f" of these {ranks} of {least}{run.head.world_size} ranks"


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
        at_least, of_these = _of_some_ranks(run)
        late, ranks = late_ranks(run), window_rows(run)["rank"].nunique()
        stalls = _stalls(run, cost)
        words = f"; a rank spends {at_least}{share} in collectives waiting for others{stalls}"
        if late.empty or len(late) > max(2.0, ranks / 2):
            late = late if len(late) else rank_waiting(run)
            often = f"up to {_last(late.nlargest(1, 'last_frac'))[0]} collectives last{of_these}"
            who = f"{len(late)} of {ranks} ranks each enter"
            varies = "" if stalls else _varies(run)
            return words, f"no rank is late alone: {who} {often}{varies}"
        if len(late) == 1 and len(most := _most_waited_for(run)) <= max(2.0, ranks / 2):
            late = most if len(most) > 1 else late
            words = words.replace(" for others", f" for others, most of it for {_ranks(late['rank'].tolist())}", 1)
        late = late.head(MAX_RANKS_NAMED)
        first, *others = [
            f"rank {rank} enters {share} collectives last{of_these}, and each other rank waits "
            f"{at_least}{number(kept_ms, 'ms')} per {unit} for it"
            for rank, share, kept_ms in zip(late["rank"], _last(late), late["kept_ms"], strict=True)
        ]
        look_at = "look at what it does before the collectives" if not others else "look at what they do before them"
        look_at = _idle_instead(run, late, unit) or look_at
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
