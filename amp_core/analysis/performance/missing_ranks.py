"""Waiting for ranks whose traces are missing, as far as the collectives of those that are here tell it.

>>> slow_collectives(run).longest
'an all-reduce of 16 MiB takes 53 ms, one of 144 MiB 9 ms'
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from amp_core.analysis.performance.collectives import EQUAL_PARTS, SYNCHRONIZING, collective_rows, step_count
from amp_core.store.run import Run
from amp_core.text.formatting import number, size

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
    return SlowCollectives(waiting_us / step_count(run), longest) if waiting_us > 0 else None


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
    return UnevenCollectives(waiting_us / step_count(run), len(us), shortest_us)


@dataclass(frozen=True)
class EqualCollectives:
    """Calls of one kernel, group and size that hold most of exposed communication."""

    most_us: float
    """At most that much of all exposed communication is waiting, if the shortest call waits for nobody: what the calls
    take beyond that, and all other collectives; mean over ranks, per step."""
    calls: int
    """Of all ranks."""


def equal_collectives(run: Run) -> EqualCollectives | None:
    """How much waiting there is at most, whichever ranks are missing; None where no kind has enough calls. Where sizes
    are not recorded, longer calls may be larger messages, which counts as waiting here."""
    frame = collective_rows(run)
    frame = frame[frame["total_us"] > 0]
    if frame.empty:
        return None
    alone_us = frame.groupby(["kernel", "group", "message_bytes"], dropna=False)["alone_us"].transform("sum")
    is_main = alone_us == alone_us.max()
    same = frame[is_main]
    if len(same) < MIN_CALLS:
        return None
    beyond = same["total_us"] - same["total_us"].min()  # what runs beside a call may hide its transfer alone
    beyond_us = float(pd.concat([beyond, same["alone_us"]], axis=1).min(axis=1).sum())
    return EqualCollectives((beyond_us + float(frame["alone_us"][~is_main].sum())) / step_count(run), len(same))
