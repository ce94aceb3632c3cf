"""Which ranks the others wait for in collectives, and since when those are late.

>>> waited_for(run).rank
2
"""

from collections.abc import Collection
from dataclasses import dataclass

import pandas as pd

from amp_core.analysis.performance.collectives import KEYS, clock_offsets, collective_rows, step_count
from amp_core.analysis.performance.kernels import window_rows
from amp_core.store.run import Run

LATE_FRAC = 0.5
"""Share of the longest wait for a rank from which another rank is named beside it."""


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


def rank_waiting(run: Run) -> pd.DataFrame:
    """One row per rank: rank, ms (in collectives), waiting_ms, transfer_ms, stalled_ms (beyond the transfer after all
    have entered), collectives (how many ranks enter apart, see `NEAR_US`), last_frac (share of them that it enters
    last; where ranks enter nearly together, none does), kept_ms (how long each other rank waits for it, on average),
    caused_ms (how long the second last rank waits for it: near ties cause nothing); times per step. Empty if the traces
    of fewer than two ranks hold the same collectives."""
    frame = collective_rows(run)
    frame = frame[frame["last"].notna()]
    per = 1e3 * step_count(run) / max(1, frame["rank"].nunique())
    waits = frame[frame["rank"] != frame["last"]]
    caused = waits.groupby([waits[key] for key in (*KEYS, "last")], dropna=False)["waiting_us"].min()
    caused_us = caused.groupby(level="last").sum()
    longest_us = frame.groupby(KEYS, dropna=False)["waiting_us"].transform("max")
    apart = longest_us >= NEAR_US
    is_last = apart & (frame["rank"] == frame["last"]) & (longest_us >= NEAR_TIE_FRAC * frame["transfer_us"])
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
                "collectives": int(apart[part.index].sum()),
                "last_frac": float(is_last[part.index].sum()) / max(1, int(apart[part.index].sum())),
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


NEAR_US = 20.0
"""Ranks that enter a collective within this enter it together: their kernels start and end by microseconds apart, as
the device's clocks do."""
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
