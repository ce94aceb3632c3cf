"""Collectives of profiled windows: what they carry, how fast, and how much of their time is waiting for another rank.

    >>> collective_table(run)[["name", "dtype", "ms", "waiting_ms", "gb_per_s"]]
    >>> waited_for(run).rank, waited_for(run).waiting_ms     # who enters last, and how long others wait
    (3, 17.2)

The kernel of a collective runs from the moment its rank enters until the collective is done. All ranks leave nearly
together, so the rank whose kernel is the shortest entered last, and by how much the others' are longer is how long they
waited for it. This needs no clock that the ranks share. It holds for collectives in which every rank needs the data of
every other; the root of a broadcast leaves early. With traces of some of the ranks alone, waiting is at least so long.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from amp_core.analysis.performance.kernels import window_rows
from amp_core.formats import element_bytes
from amp_core.store.run import Run
from amp_core.text.formatting import number, size
from amp_core.traces.idle_columns import MIN_LOADING_FRAC

SYNCHRONIZING = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
"""Collectives that no rank leaves before the last one has entered."""
_IN_PARTS = r"internode_ll|low_latency"
"""In the names of kernels that ranks do not leave together: one part sends, and another receives later."""
REDUCING = ("all_reduce", "reduce_scatter")
LATE_FRAC = 0.5
"""Share of the longest wait for a rank from which another rank is named beside it."""
EQUAL_PARTS = ("all_reduce", "all_gather", "reduce_scatter")
"""Those whose bytes are the same on all ranks, so that one rank's tell how long the transfer takes."""
KEYS = ["step", "group", "number", "name"]
"""Columns of `collectives` that together are one collective of all its ranks."""


@dataclass(frozen=True)
class WaitedFor:
    """The rank that the others wait for in collectives; times are per step, or per profiled window without steps."""

    rank: int
    waiting_ms: float
    """Mean over the other ranks: how long they wait for it in the collectives that it enters last."""
    last_frac: float
    """Share of the collectives that it enters last."""
    all_waiting_ms: float
    """Mean over ranks: how long a rank waits in collectives, whoever it waits for."""
    late: tuple[tuple[int, float], ...]
    """All ranks for which the others wait at least half as long, this one first, each with its share of the
    collectives that it enters last: then it is not one rank that is slow."""


def collective_rows(run: Run) -> pd.DataFrame:
    """Rows of `collectives` with waiting_us, transfer_us, stalled_us (beyond both, after all ranks have entered; NaN
    where other ranks' traces lack the collective) and last (the rank that entered last; NaN likewise)."""
    return run.cached_frame(["collectives"], _collective_rows)


def _collective_rows(run: Run) -> pd.DataFrame:
    frame: pd.DataFrame = run.collectives
    numbers = ["step", "number", "group_size", "message_bytes", "total_us", "alone_us", "rank"]
    numbers += ["launched_us", "ended_us"]
    frame[numbers] = frame[numbers].astype(float)
    texts = ["name", "group", "dtype", "phase", "kernel"]
    frame[texts] = frame[texts].astype(object).where(frame[texts].notna(), "").astype(str)
    frame = frame[np.isfinite(frame["total_us"])].reset_index(drop=True)
    if not len(frame):  # as in most runs
        return frame.assign(transfer_us=np.nan, waiting_us=np.nan, stalled_us=np.nan, last=np.nan)
    by = frame.groupby(KEYS, dropna=False)["total_us"]
    together = by.transform("size").to_numpy()
    parts = frame.groupby(["step", "group"], dropna=False)
    # A group of some of the ranks has a name of its own; without names every collective is one of all ranks.
    members = parts["rank"].transform("nunique").where(frame["group"] != "", frame["rank"].nunique()).to_numpy()
    made = frame.assign(made=frame.groupby(["step", "group", "rank"], dropna=False)["number"].transform("size"))
    spread = made.groupby(["step", "group"], dropna=False)["made"].transform("nunique").to_numpy()
    # Where the ranks' collectives differ in number or order, their numbers do not belong together.
    kinds = frame.groupby(["step", "group", "number"], dropna=False)["name"].transform("nunique")
    orders = frame.assign(kinds=kinds).groupby(["step", "group"], dropna=False)["kinds"].transform("max").to_numpy()
    matched = (
        (together == members)
        & (members > 1)
        & (spread == 1)
        & (orders == 1)
        & frame["name"].isin(SYNCHRONIZING).to_numpy()
        & ~frame["kernel"].str.contains(_IN_PARTS).to_numpy()
    )
    transfer = by.transform("min").where(matched)
    frame["transfer_us"], frame["waiting_us"] = transfer, frame["total_us"] - transfer
    frame["last"] = frame["rank"].reindex(by.transform("idxmin")).to_numpy()
    frame["last"] = frame["last"].where(matched)
    frame["stalled_us"] = _stalled(frame)
    frame["waiting_us"] -= frame["stalled_us"]
    return frame


MIN_STALLED_US, MIN_STALLED_FRAC = 200.0, 0.25
"""A rank stays in a collective for that long, and that share of what the others explain, after all have entered, before
it counts: the ends of ranks differ by microseconds."""
MAX_CLOCK_ERROR_US = 100.0
"""Two ranks leave a collective within this."""
MIN_COMMON_FRAC, MIN_CLUSTER_FRAC, MIN_ENDS = 0.25, 0.5, 3
"""Shares of the collectives, three at least, whose ends agree: on clocks as they are, and after one offset."""


def clock_offsets(frame: pd.DataFrame) -> "pd.Series[float]":
    """By rank, how far its clock is ahead of that of the first rank, microseconds, for ranks leave a collective
    together: 0 where enough ends agree as they are, as on one machine; NaN where they agree with no offset. Of rows of
    `collective_rows`."""
    matched = frame[frame["last"].notna() & frame["ended_us"].notna()]
    first = matched["rank"].min()
    ends = matched.groupby([*KEYS, "rank"], dropna=False)["ended_us"].first().unstack("rank")
    return pd.Series({rank: _offset((ends[rank] - ends[first]).dropna().to_numpy()) for rank in ends}, dtype=float)


@dataclass(frozen=True)
class HostLag:
    """How far the hosts of some ranks are behind all others where they launch collectives; means over steps."""

    first_us: float
    """At the first collective of a step."""
    longest_us: float
    last_us: float
    """At the last one: hosts that waited for their device in between have caught up with the late ones."""


def host_lag(frame: pd.DataFrame, ranks: Collection[int]) -> HostLag | None:
    """That of these ranks; None where launches or clocks are not known. Of rows of `collective_rows`."""
    matched = frame[frame["last"].notna()]
    launched = matched["launched_us"] - matched["rank"].map(clock_offsets(frame)).astype(float)
    if launched.empty or launched.isna().any():
        return None
    by = [matched[key] for key in KEYS]
    late = matched["rank"].isin(ranks)
    latest = launched[late].groupby([one[late] for one in by], dropna=False).max()
    behind = latest - launched[~late].groupby([one[~late] for one in by], dropna=False).max()
    of_step = behind.iloc[latest.argsort()].clip(lower=0.0).groupby(level="step", dropna=False)
    return HostLag(*(float(us.mean()) for us in (of_step.first(), of_step.max(), of_step.last())))


def started_apart(run: Run) -> bool:
    """Whether ranks wait for one another in their first collective alone, in traces of one step at most: they began the
    work that was recorded at different times, which tells nothing of what makes a rank late in a loop. Where there is
    no later collective, the beginnings tell."""
    frame = collective_rows(run)
    steps = run.windows.groupby("rank")["steps"].sum()
    waiting_us = frame["waiting_us"].fillna(0.0)
    first = _is_first(frame)
    is_first = float(waiting_us[first].sum()) >= MIN_IN_FIRST_FRAC * float(waiting_us.sum()) > 0
    return bool(is_first and ((~first).any() or began_later_us(run) > 0) and steps.fillna(0.0).max() <= 1)


def _is_first(frame: pd.DataFrame) -> "pd.Series[bool]":
    """Which rows of `collective_rows` are the first of their rank."""
    return frame.groupby("rank")["ended_us"].transform("min") == frame["ended_us"]


def began_later_us(run: Run) -> float:
    """How much later the rank that enters the first collective last began what was recorded than the others, where that
    explains most of their waiting in it, microseconds; else 0. The ranks leave it together, so that it needs no clock
    that they share."""
    frame = collective_rows(run)
    first = frame[_is_first(frame) & frame["last"].notna()]
    if first.empty or first["last"].nunique() > 1:
        return 0.0
    took_us = first["ended_us"] - first["rank"].map(window_rows(run).groupby("rank")["began_us"].min())
    is_last = first["rank"] == first["last"]
    later_us = float(took_us[~is_last].mean() - took_us[is_last].mean())
    return later_us if later_us >= MIN_BEGAN_FRAC * float(first["waiting_us"][~is_last].mean()) else 0.0


MIN_IN_FIRST_FRAC = 0.9
"""Share of all waiting in the first collective from which later ones hardly wait."""
MIN_BEGAN_FRAC = 0.5
"""Share of the waiting in it by which its last rank began later from which that is the cause."""


def _offset(apart: npt.NDArray[np.float64]) -> float:
    """How far one clock is ahead of another, whose ends of the same collectives are so far apart; NaN if unknown."""
    if np.sum(np.abs(apart) <= MAX_CLOCK_ERROR_US) >= max(MIN_ENDS, MIN_COMMON_FRAC * len(apart)):
        return 0.0
    apart = np.sort(apart)
    reach = np.searchsorted(apart, apart + MAX_CLOCK_ERROR_US, side="right") - np.arange(len(apart))
    if not len(apart) or reach.max() < max(MIN_ENDS, MIN_CLUSTER_FRAC * len(apart)):
        return float("nan")
    low = int(reach.argmax())
    return float(np.median(apart[low : low + int(reach[low])]))


def _stalled(frame: pd.DataFrame) -> "pd.Series[float]":
    """Of each collective of several ranks: how long its kernel runs beyond the shortest one's time after all ranks have
    entered, which is no waiting for them. 0 where clocks do not tell; NaN where other ranks' traces lack it."""
    entered = frame["ended_us"] - frame["total_us"] - frame["rank"].map(clock_offsets(frame)).astype(float)
    keys = [frame[key] for key in KEYS]
    unknown = entered.isna().groupby(keys, dropna=False).transform("any")
    last = entered.groupby(keys, dropna=False).transform("max").mask(unknown)
    stalled = (frame["waiting_us"] - (last - entered)).clip(lower=0.0)
    counts = (stalled >= MIN_STALLED_US) & (stalled >= MIN_STALLED_FRAC * frame["waiting_us"])
    return stalled.where(counts, 0.0).where(frame["last"].notna())


def with_late_launches(run: Run, windows: pd.DataFrame) -> pd.DataFrame:
    """Rows of `window_rows` in which a device only communicates while its host stays in a launch no longer than other
    ranks launch the same collectives after it has entered: one that all have launched waits for no host. Where the
    other ranks or clocks are not known, as it is."""
    loading_us, frame = windows["alone_loading_us"].fillna(0.0), collective_rows(run)
    if frame.empty or not loading_us.sum() > 0:
        return windows
    clock = frame["rank"].map(clock_offsets(frame)).astype(float)
    launched = (frame["launched_us"] - clock).where(frame["last"].notna())
    keys = [frame[key] for key in KEYS]
    latest = launched.groupby(keys, dropna=False).transform("max")
    unknown = launched.isna().groupby(keys, dropna=False).transform("any")
    late_us = (latest - (frame["ended_us"] - frame["total_us"] - clock)).clip(lower=0.0)
    late_us = late_us.mask(unknown, frame["alone_us"]).clip(upper=frame["alone_us"]).groupby(frame["rank"]).sum()
    of_rank_us = loading_us.groupby(windows["rank"]).transform("sum")
    explained = (windows["rank"].map(late_us) / of_rank_us.where(of_rank_us > 0)).fillna(1.0).clip(upper=1.0)
    left_us = loading_us * explained
    left_us = left_us.where(left_us >= MIN_LOADING_FRAC * windows["communication_alone_us"].fillna(0.0), 0.0)
    calls = {name: (windows[name] - (loading_us - left_us)).clip(lower=0.0) for name in _LOADING_CALLS}
    return windows.assign(alone_loading_us=left_us, **calls)


_LOADING_CALLS = ("host_call_us", "host_call_op_us")
"""Columns of windows whose times contain `alone_loading_us`."""


def collective_table(run: Run) -> pd.DataFrame:
    """One row per kind of collective, dtype, phase and group, the longest first: name, dtype, phase, group, group_size,
    count (per step and rank), message_bytes (mean), ms, alone_ms, waiting_ms, transfer_ms (per step and rank; NaN where
    not known), gb_per_s.

    `gb_per_s` is the algorithm bandwidth, bytes of the message over the time of the transfer; over the whole time where
    waiting is not known, which is a lower bound (`bound`).
    """
    frame = collective_rows(run)
    per = 1e3 * _steps(run)
    rows = []
    for key, part in frame.groupby(["name", "dtype", "phase", "group"], dropna=False):
        known = part["transfer_us"].notna()
        us = part["transfer_us"].where(known, part["total_us"])
        sized = part["message_bytes"].notna() & (us > 0)
        seconds = float(us[sized].sum()) / 1e6
        rows.append(
            dict(zip(("name", "dtype", "phase", "group"), key, strict=True))
            | {
                "group_size": part["group_size"].max(),
                "count": 1e3 * len(part) / per,
                "message_bytes": part["message_bytes"].mean(),
                "ms": part["total_us"].sum() / per,
                "alone_ms": part["alone_us"].sum() / per,
                "waiting_ms": part["waiting_us"].sum() / per if known.any() else np.nan,
                "transfer_ms": part["transfer_us"].sum() / per if known.any() else np.nan,
                "gb_per_s": part["message_bytes"][sized].sum() / seconds / 1e9 if seconds else np.nan,
                "bound": not known.all(),
            }
        )
    return pd.DataFrame(rows, columns=_COLUMNS).sort_values("ms", ascending=False, ignore_index=True)


_COLUMNS = ["name", "dtype", "phase", "group", "group_size", "count", "message_bytes", "ms", "alone_ms", "waiting_ms"]
_COLUMNS += ["transfer_ms", "gb_per_s", "bound"]


def rank_waiting(run: Run) -> pd.DataFrame:
    """One row per rank: rank, ms (in collectives), waiting_ms, transfer_ms, stalled_ms (beyond the transfer after all
    have entered), collectives (their number), last_frac (share of them that it enters last; where ranks enter nearly
    together, none does), kept_ms (how long each other rank waits for it, on average), caused_ms (how long the second
    last rank waits for it: near ties cause nothing); times per step. Empty if the traces of fewer than two ranks hold
    the same collectives."""
    frame = collective_rows(run)
    frame = frame[frame["last"].notna()]
    per = 1e3 * _steps(run) / max(1, frame["rank"].nunique())
    waits = frame[frame["rank"] != frame["last"]]
    caused = waits.groupby([waits[key] for key in (*KEYS, "last")], dropna=False)["waiting_us"].min()
    caused_us = caused.groupby(level="last").sum()
    longest_us = frame.groupby(KEYS, dropna=False)["waiting_us"].transform("max")
    is_last = (frame["rank"] == frame["last"]) & (longest_us >= NEAR_TIE_FRAC * frame["transfer_us"])
    rows = []
    for rank, part in frame.groupby(frame["rank"].astype(int)):
        kept = frame[(frame["last"] == rank) & (frame["rank"] != rank)]
        others = max(1, frame["rank"].nunique() - 1)
        rows.append(
            {
                "rank": rank,
                "ms": part["total_us"].sum() / per,
                "waiting_ms": part["waiting_us"].sum() / per,
                "transfer_ms": part["transfer_us"].sum() / per,
                "stalled_ms": part["stalled_us"].sum() / per,
                "collectives": len(part),
                "last_frac": float(is_last[part.index].mean()),
                "kept_ms": kept["waiting_us"].sum() / per / others,
                "caused_ms": caused_us.get(rank, 0.0) / per,
            }
        )
    columns = ["rank", "ms", "waiting_ms", "transfer_ms", "stalled_ms", "collectives", "last_frac", "kept_ms"]
    columns += ["caused_ms"]
    return pd.DataFrame(rows, columns=columns)


def waited_for(run: Run) -> WaitedFor | None:
    """The rank for which the others wait the longest; None where waiting is not known."""
    table = rank_waiting(run)
    if len(table) < 2 or not table["kept_ms"].max() > 0:
        return None
    late = table[table["kept_ms"] >= LATE_FRAC * table["kept_ms"].max()].sort_values("kept_ms", ascending=False)
    ranks = tuple((int(rank), float(frac)) for rank, frac in zip(late["rank"], late["last_frac"], strict=True))
    (rank, last_frac), waiting_ms = ranks[0], float(late["kept_ms"].iloc[0])
    return WaitedFor(rank, waiting_ms, last_frac, float(table["waiting_ms"].mean()), ranks)


NEAR_TIE_FRAC = 0.05
"""Share of the transfer up to which another rank's longer kernel may be due to how ranks leave a collective."""
MIN_LAST_FRAC, MIN_KEPT_FRAC = 0.2, 0.25
"""A rank that enters at least this share of the collectives last, and for which the others wait at least that part of
the longest wait, is late too."""
MIN_CHANCE_RATIO = 1.5
"""A late rank causes that many times as much of the waiting as it would by chance, which is one part in as many as
there are ranks: three of four with two ranks, three of sixteen with eight."""

MOST_KEPT_FRAC = 0.8
"""A rank for which the others wait that share of all waiting is late, however often it enters last."""


def late_ranks(run: Run) -> pd.DataFrame:
    """Rows of `rank_waiting` of the ranks that the others wait for, the latest first; empty where it is not known."""
    table = rank_waiting(run)
    longest_ms = float(table["kept_ms"].max()) if len(table) > 1 else 0.0
    often = (table["last_frac"] >= MIN_LAST_FRAC) & (table["kept_ms"] >= MIN_KEPT_FRAC * longest_ms)
    late = (table["kept_ms"] >= LATE_FRAC * longest_ms) | often
    late &= table["caused_ms"] >= min(1.0, MIN_CHANCE_RATIO / max(1, len(table))) * table["caused_ms"].sum()
    late |= table["kept_ms"] >= MOST_KEPT_FRAC * table["kept_ms"].sum()
    return table[late & (longest_ms > 0)].sort_values("kept_ms", ascending=False, ignore_index=True)


LATENCY_US = 500.0
"""Time that a collective of any size may need: across many nodes some hundred microseconds. The shortest of
`MIN_CALLS` equal ones tells it better."""
SMALL_RATE_RATIO = 4.0
"""Time per byte over that of a larger collective up to which it may be the transfer's: small messages reach a fraction
of the bandwidth."""
MIN_SLOW_RATIO = 3.0
"""A collective that takes that many times as long as its transfer may take waits: contention with kernels beside it
explains less."""


@dataclass(frozen=True)
class SlowCollectives:
    """Collectives that wait for ranks whose traces are missing, as larger ones of their kind and group take less."""

    waiting_us: float
    """At least that much of what a rank only communicates; mean over ranks, per step."""
    longest: str
    """The one that waits the longest, beside a larger one: `an all-reduce of 16 MiB takes 53 ms, one of 144 MiB 9 ms`.
    """


def slow_collectives(run: Run) -> SlowCollectives | None:
    """Waiting that one rank's trace alone shows; None if there is none. Never where sizes or groups are not recorded,
    for a collective among other ranks may be slower."""
    frame = collective_rows(run)
    frame = frame[frame["name"].isin(EQUAL_PARTS) & (frame["group"] != "") & (frame["message_bytes"] > 0)]
    waiting_us, longest_us, longest = 0.0, 0.0, ""
    for _, part in frame[frame["total_us"] > 0].groupby(["rank", "name", "group"]):
        sizes = {float(str(bytes_)): same for bytes_, same in part.groupby("message_bytes")}
        shortest_us, fastest = np.inf, (1.0, np.inf)  # of those at least as large; bytes and time of the second
        for bytes_ in sorted(sizes, reverse=True):
            same, us = sizes[bytes_], float(sizes[bytes_]["total_us"].min())
            shortest_us, fastest = min(shortest_us, us), min(fastest, (bytes_, us), key=lambda one: one[1] / one[0])
            transfer_us = min(shortest_us, SMALL_RATE_RATIO * bytes_ * fastest[1] / fastest[0])
            transfer_us = max(LATENCY_US if len(same) < MIN_CALLS else 0.0, transfer_us)
            in_host_us = _in_host_us(run, bytes_)
            is_of_host = in_host_us < MIN_SLOW_RATIO * transfer_us
            transfer_us, limit_us = (in_host_us,) * 2 if is_of_host else (transfer_us, MIN_SLOW_RATIO * transfer_us)
            slow = same[same["total_us"] >= limit_us]
            each_us = (slow["alone_us"] - transfer_us).clip(lower=0.0)
            waiting_us += float(each_us.sum())
            if len(slow) and each_us.max() > longest_us:
                worst = slow.iloc[int(each_us.to_numpy().argmax())]
                on = f" on rank {worst['rank']:.0f}" if frame["rank"].nunique() > 1 else ""
                equal = len(same) if us == fastest[1] else 0
                longest_us = float(each_us.max())
                longest = _in_one_host(worst, on) if is_of_host else _beside(worst, on, *fastest, equal=equal)
    return SlowCollectives(waiting_us / _steps(run), longest) if waiting_us > 0 else None


def _beside(slow: "pd.Series[Any]", on: str, bytes_: float, us: float, *, equal: int) -> str:
    """A slow collective beside one of other bytes, or beside the shortest of as many `equal` ones."""
    other = f"the shortest of {equal} such" if equal else f"one of {size(bytes_)}"
    return f"{_takes(slow, on)}, {other} {number(us / 1e3, 'ms')}"


def _in_one_host(slow: "pd.Series[Any]", on: str) -> str:
    """A slow collective of GPUs of one host."""
    rate = number(float(slow["message_bytes"] / slow["total_us"]) / 1e3, "GB/s")
    return f"{_takes(slow, on)}, only {rate} between GPUs of one host"


def _takes(slow: "pd.Series[Any]", on: str) -> str:
    kind, long = str(slow["name"]).replace("_", "-"), number(float(slow["total_us"]) / 1e3, "ms")
    return f"{'an' if kind[0] == 'a' else 'a'} {kind} of {size(float(slow['message_bytes']))} takes{on} {long}"


def _in_host_us(run: Run, bytes_: float) -> float:
    """What a collective may need at most where all ranks have a GPU of the same host, microseconds; infinite where that
    is not known."""
    gpus, ranks = run.head.environment.get("gpus"), run.head.world_size
    is_one_host = isinstance(gpus, list) and len(gpus) >= ranks > 1
    return HOST_LATENCY_US + bytes_ / (1e3 * MIN_HOST_GB_PER_S) if is_one_host else np.inf


HOST_LATENCY_US, MIN_HOST_GB_PER_S = 100.0, 2.0
"""Far more than NCCL needs between GPUs of one host, and far less than what PCIe of the third generation moves (16 GB/s
in each direction with 16 lanes): through the host's memory it passes twice."""


MIN_CALLS = 50
"""Calls of one kernel, without sizes or of one size, from which their distribution tells of waiting."""
FLOOR_QUANTILE = 0.05
MIN_FLOOR_FRAC, ALIKE_RATIO = 0.1, 1.03
"""Share of the calls within that ratio of the shortest ones: equal messages in which nobody waits take equally long."""
MAX_CLUSTER_FRAC = 0.5
"""With more of the longer calls alike than that share of those, they may be larger messages."""


@dataclass(frozen=True)
class UnevenCollectives:
    """Calls of one kernel that take unequally long, though the shortest ones take equally long; without sizes."""

    waiting_us: float
    """What a rank only communicates in them beyond the time of the shortest ones; mean over ranks, per step."""
    calls: int
    """Of all ranks."""
    shortest_us: float


def uneven_collectives(run: Run) -> UnevenCollectives | None:
    """What is waiting for other ranks if all calls of the kernel with most of the time carry as much as its shortest
    ones, where sizes are not recorded; None where the times form several groups, as messages of several sizes do, or
    are equal."""
    frame = collective_rows(run)
    frame = frame[frame["message_bytes"].isna() & frame["name"].isin(SYNCHRONIZING) & (frame["total_us"] > 0)]
    if frame.empty:
        return None
    longest = frame.groupby(["kernel", "group"])["total_us"].transform("sum")
    frame = frame[longest == longest.max()]
    us = np.sort(frame["total_us"].to_numpy(dtype=float))
    shortest_us = float(np.quantile(us, FLOOR_QUANTILE))
    above = us[us > ALIKE_RATIO * shortest_us]
    shortest = len(us) - len(above)
    if len(us) < MIN_CALLS or shortest < MIN_FLOOR_FRAC * len(us) or not len(above):
        return None
    alike = np.searchsorted(above, ALIKE_RATIO * above, side="right") - np.arange(len(above))
    if alike.max() > MAX_CLUSTER_FRAC * shortest:
        return None
    waiting_us = float((frame["alone_us"] - shortest_us).clip(lower=0.0).sum())
    return UnevenCollectives(waiting_us / _steps(run), len(us), shortest_us)


@dataclass(frozen=True)
class Transfer:
    """The transfer of the collectives that take longest."""

    words: str
    """`an all-reduce of 64 MiB takes 6.81 ms, 9.85 GB/s`."""
    message_bytes: float
    gb_per_s: float
    """Bytes of the message over the time: the algorithm bandwidth."""


def longest_transfer(run: Run) -> Transfer | None:
    """That of the kind and size with most time after all ranks have entered; None where sizes or the other ranks are
    not known."""
    frame = collective_rows(run)
    frame = frame[(frame["message_bytes"] > 0) & (frame["transfer_us"] > 0)]
    if frame.empty:
        return None
    _, same = max(frame.groupby(["name", "message_bytes"]), key=lambda one: float(one[1]["transfer_us"].sum()))
    bytes_, each_us = float(same["message_bytes"].iloc[0]), float(same["transfer_us"].median())
    kind, rate = str(same["name"].iloc[0]).replace("_", "-"), bytes_ / each_us / 1e3
    words = (
        f"{'an' if kind[0] == 'a' else 'a'} {kind} of {size(bytes_)} takes {number(each_us / 1e3, 'ms')}, "
        f"{number(rate, 'GB/s')}"
    )
    return Transfer(words, bytes_, rate)


def has_all_ranks(run: Run) -> bool:
    """Whether the traces of all ranks of a run of several are here; several devices in one file are ranks that were
    merged, or those of one process."""
    windows = window_rows(run)
    several = windows.groupby("rank", dropna=False)["device"].nunique().max() > 1
    return bool(several or windows["rank"].nunique() >= run.head.world_size > 1)


def gradient_dtype(run: Run) -> str | None:
    """The dtype in which most bytes of gradients are reduced; None if no collective of backward records it."""
    frame = collective_rows(run)
    frame = frame[(frame["phase"] == "backward") & frame["name"].isin(REDUCING) & (frame["dtype"] != "")]
    us = frame.groupby("dtype")["total_us"].sum()
    largest = str(us.idxmax()) if len(us) else None
    return largest if largest is not None and element_bytes(largest) is not None else None


def _steps(run: Run) -> float:
    """Steps of the windows, of all ranks together; windows where no steps are marked. If these cannot be read, the
    steps in which a collective was launched."""
    windows = window_rows(run)
    if windows.empty:
        return max(1.0, float(len(run.collectives[["rank", "step"]].drop_duplicates())))
    steps = float(windows["steps"].fillna(1.0).sum())
    return max(1.0, steps)
