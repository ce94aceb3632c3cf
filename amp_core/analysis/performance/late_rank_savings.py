"""What ranks save that wait for late ones, and what is different on those that are late.

>>> late_rank_saving(run, "step").what
'The other ranks wait 92 % of the step in collectives for rank 2, which enters 45 of 47 last'
"""

from dataclasses import dataclass
from functools import cached_property

import pandas as pd

from amp_core.analysis.performance.collectives import KEYS, collective_rows, has_all_ranks, with_late_launches
from amp_core.analysis.performance.idle import alone_loading_us
from amp_core.analysis.performance.kernels import holds_collectives_alone, window_rows
from amp_core.analysis.performance.rank_waiting import (
    HostLag,
    began_later_us,
    host_lag,
    late_ranks,
    rank_waiting,
    started_apart,
)
from amp_core.analysis.performance.saving import LateRankSaving
from amp_core.store.run import Run
from amp_core.text.formatting import number, share_of

MIN_WAITING_FRAC = 0.85
"""Share of waiting in the exposed communication of the ranks that wait from which the network is no part of the
fault."""
MIN_SURE_FRAC = 0.8
"""Share of it that comes before the last rank enters, whatever hides the rest, from which nothing else shortens it."""
MIN_HELD_FRAC = 0.5
"""Share of a late rank's idle time with work queued from which its GPU, and not its host, is what is late."""
MAX_RANKS_NAMED = 4


def late_rank_saving(run: Run, unit: str) -> LateRankSaving | None:
    """The saving if nearly all exposed communication is waiting for ranks that enter late, by their entering with the
    last of the others; None otherwise. It is that of the ranks that wait: the late ones would save nothing."""
    late = late_ranks(run)
    named = late["rank"].tolist()
    windows = with_late_launches(run, window_rows(run))
    others = windows["rank"].nunique() - len(named)
    if not named or not others:  # each rank is late now and then
        return None
    waits = _Waits(run, unit, late, windows, others)
    if not waits.are_nearly_all:
        return None
    shown = late.head(MAX_RANKS_NAMED)
    at_least, of_these = of_some_ranks(run)
    idle, held = _idle_of_late(windows, named, shown["rank"].tolist(), waits.steps, unit)
    are_held = set(held) == set(named)
    slower = 0.0 if are_held else slower_gpus(windows, named, waits.for_late_us * waits.steps)
    lag = host_lag(waits.rows, named)
    all_hosts_us = waits.all_hosts_us(lag)
    is_of_all_hosts = bool(all_hosts_us and waits.are_sure and not slower and not are_held)
    enters = f"which {'enter' if len(named) > 1 else 'enters'} {' and '.join(entered_last(shown))} last{of_these}"
    if waits.began_later_us:
        began = number(waits.began_later_us / 1e3, "ms")
        enters = f"whose {'step' if unit == 'step' else 'trace'} begins {began} later"
    idle = "" if waits.began_later_us else "" if holds_collectives_alone(run) else f"{idle}; "
    return LateRankSaving(
        "exposed-communication",
        waits.saved_us,
        waits.step_us,
        f"The other ranks wait {at_least}{100 * waits.for_late_us / waits.step_us:.0f} % of the {unit} in collectives "
        f"for {in_words(named)}, {enters}"
        f"{_as_slower(slower, len(named), on_cpu=bool(windows['device'].str.startswith('cpu').all()))}"
        f"{', though their own hosts are nearly as slow' if is_of_all_hosts else ''}",
        f"rank {named[0]}",
        f"{idle}the collectives themselves take {number(float(rank_waiting(run)['transfer_ms'].mean()), 'ms')}"
        f"{'' if waits.are_sure else waits.in_parts()}{_late_before(windows, named, lag, waits.steps, unit)}",
        late_ranks=tuple(named),
        held_ranks=held,
        slower_ratio=slower,
        all_waiting=waits.are_sure,
        all_hosts_us=all_hosts_us,
        is_of_all_hosts=is_of_all_hosts,
    )


@dataclass(frozen=True)
class _Waits:
    """What the ranks that are not late wait for those that are; times in microseconds per step of one rank."""

    run: Run
    unit: str
    late: pd.DataFrame
    """Rows of `late_ranks`."""
    windows: pd.DataFrame
    """Of all ranks, see `with_late_launches`."""
    others: int
    """How many ranks are not late."""

    @cached_property
    def rows(self) -> pd.DataFrame:
        """Of `collective_rows`, of all ranks."""
        return collective_rows(self.run)

    @cached_property
    def _waits(self) -> "pd.Series[bool]":
        """Which of `rows` are of ranks that are not late."""
        return ~self.rows["rank"].isin(self.late["rank"])

    @cached_property
    def _waiting_us(self) -> "pd.Series[float]":
        """How long each of `rows` waits with nothing beside it; 0 where that is not known."""
        return self.rows[["waiting_us", "alone_us"]].min(axis=1).where(self.rows["waiting_us"].notna(), 0.0)

    @property
    def steps(self) -> float:
        """Of each rank."""
        return max(1.0, float(self.windows["steps"].fillna(1.0).sum())) / self.windows["rank"].nunique()

    @cached_property
    def theirs(self) -> pd.DataFrame:
        """Windows of the ranks that are not late."""
        return self.windows[~self.windows["rank"].isin(self.late["rank"])]

    def _each(self, us: float) -> float:
        return us / self.others / self.steps

    @property
    def step_us(self) -> float:
        """How long a step takes."""
        return self._each(float(self.theirs["wall_us"].sum()))

    @property
    def _exposed_us(self) -> float:
        """How long they communicate with nothing beside it, in all steps."""
        return float(self.rows["alone_us"][self._waits].sum())

    @property
    def _sure_us(self) -> float:
        """At least that much of it is waiting. A collective first waits and then transfers: what runs beside it may
        hide either."""
        beside = self.rows["transfer_us"] + self.rows["stalled_us"]
        return float((self.rows["alone_us"] - beside).clip(lower=0.0).fillna(0.0)[self._waits].sum())

    @property
    def are_nearly_all(self) -> bool:
        """Whether they are nearly all of their exposed communication."""
        exposed_us = self._exposed_us
        return exposed_us > 0 and self._waiting_us[self._waits].sum() >= MIN_WAITING_FRAC * exposed_us

    @property
    def are_sure(self) -> bool:
        """Whether they surely are most of it, whatever hides the rest."""
        return self._sure_us >= MIN_SURE_FRAC * self._exposed_us

    @cached_property
    def _for_late(self) -> "pd.Series[float]":
        """How long each of their collectives waits that a late rank enters last."""
        return self._waiting_us[self.rows["last"].isin(self.late["rank"]) & self._waits]

    @property
    def for_late_us(self) -> float:
        """How long a rank waits for the late ones, without what its own host loads."""
        return min(self.step_us, self._each(max(0.0, float(self._for_late.sum()) - alone_loading_us(self.theirs))))

    @property
    def saved_us(self) -> float:
        """By how much the step ends sooner: a collective begins earlier only by as much as the next rank enters before
        the late ones."""
        keys = [self.rows.loc[self._for_late.index, key] for key in KEYS]
        next_us = float(self._for_late.groupby(keys, dropna=False).min().sum())
        return min(self.for_late_us, next_us / self.steps)

    @cached_property
    def began_later_us(self) -> float:
        """How much later the late ranks began what was recorded, if that alone makes them late; else 0."""
        return began_later_us(self.run) if started_apart(self.run) else 0.0

    def all_hosts_us(self, lag: HostLag | None) -> float:
        """How long their own hosts take for a step, if they would wait for these, too, for half as long; else 0."""
        hosts_us = self._each(float(self.theirs["host_us"].sum()))
        if lag is not None:  # where a host waits for its device, it catches up with the late ones
            waited_us = self._each(float(self.theirs["sync_us"].fillna(0.0).sum()))
            hosts_us = max(hosts_us, self.step_us - lag.last_us - waited_us)
        is_as_slow = hosts_us >= self.step_us - self.for_late_us / 2 and not started_apart(self.run)
        return hosts_us if is_as_slow else 0.0

    def in_parts(self) -> str:
        """What of exposed communication is waiting, and what may be transfer, as part of a sentence."""
        exposed_ms, sure_ms = self._each(self._exposed_us) / 1e3, self._each(self._sure_us) / 1e3
        return (
            f"; of the {number(exposed_ms, 'ms')} that another rank only communicates, at least "
            f"{number(sure_ms, 'ms')} are waiting and at most {number(exposed_ms - sure_ms, 'ms')} the transfer"
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


def busiest_rank(run: Run, unit: str) -> LateRankSaving | None:
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
    return LateRankSaving(
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


def idle_instead(run: Run, late: pd.DataFrame, unit: str) -> str:
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


def in_words(ranks: list[int]) -> str:
    """`rank 2`, `ranks 0 and 6`, `ranks 0, 1, 2, 3 and 5 more`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = len(ranks) - MAX_RANKS_NAMED
    last = f"{more} more" if more > 0 else str(ranks[-1])
    return f"ranks {', '.join(map(str, ranks[:-1][:MAX_RANKS_NAMED]))} and {last}"


def entered_last(late: pd.DataFrame) -> list[str]:
    """For each row of `rank_waiting`, how many collectives its rank enters last, `3 of 4`."""
    return [share_of(round(frac * n), n) for frac, n in zip(late["last_frac"], late["collectives"], strict=True)]


def of_some_ranks(run: Run) -> tuple[str, str]:
    """Words for what traces of some of the ranks leave open: one whose trace is not here may be later still."""
    ranks = window_rows(run)["rank"].nunique()
    if ranks >= run.head.world_size:
        return "", ""
    least = "at least " if run.head.config.get("world_size_is_least") else ""
    return "at least ", f" of these {ranks} of {least}{run.head.world_size} ranks"
