"""Collectives that follow another one at once, with nothing computed beside them: their time is mostly the transfer's.

>>> following_transfer(run).words
'an all-reduce of 16.8 MiB takes 8.93 ms, 1.97 GB/s'
"""

from amp_core.analysis.performance.collectives import EQUAL_PARTS, Transfer, collective_rows, transfer_of
from amp_core.store.run import Run

MAX_BETWEEN_US = 100.0
"""After the collective before it, in which the ranks have met, so that they enter it nearly together."""
MIN_ALONE_FRAC, MIN_PART_FRAC = 0.95, 1 / 3
"""Share of its time with nothing beside it, and share of such collectives in exposed communication from which they tell
the link's rate."""
MAX_SPREAD, MIN_TIMES = 1.25, 3
"""Longest over shortest time of one that is repeated, and how often at least: waiting for others varies more."""


def following_transfer(run: Run) -> Transfer | None:
    """The transfer of the collective with most time among them that takes equally long each time; None without one."""
    frame = collective_rows(run).sort_values(["rank", "ended_us"])
    before = frame.groupby("rank")["ended_us"].shift()
    between_us = frame["ended_us"] - frame["total_us"] - before
    follows = between_us.between(0.0, MAX_BETWEEN_US) & (frame["alone_us"] >= MIN_ALONE_FRAC * frame["total_us"])
    found = frame[follows & frame["name"].isin(EQUAL_PARTS) & (frame["message_bytes"] > 0) & (frame["total_us"] > 0)]
    if found.empty:
        return None
    _, same = max(found.groupby(["name", "group", "message_bytes"]), key=lambda one: float(one[1]["total_us"].sum()))
    is_told = (
        len(same) >= MIN_TIMES
        and same["total_us"].max() <= MAX_SPREAD * same["total_us"].min()
        and same["alone_us"].sum() >= MIN_PART_FRAC * frame["alone_us"].sum()
    )
    return transfer_of(same, same["total_us"]) if is_told else None
