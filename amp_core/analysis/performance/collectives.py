"""Collectives of profiled windows: what they carry, how fast, and how much of their time is waiting for another rank.

    >>> collective_table(run)[["name", "dtype", "ms", "waiting_ms", "gb_per_s"]]

The kernel of a collective runs from the moment its rank enters until the collective is done. All ranks leave nearly
together, so the rank whose kernel is the shortest entered last, and by how much the others' are longer is how long they
waited for it. This needs no clock that the ranks share. It holds for collectives in which every rank needs the data of
every other; the root of a broadcast leaves early. With traces of some of the ranks alone, waiting is at least so long.
"""

from dataclasses import dataclass

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
EQUAL_PARTS = ("all_reduce", "all_gather", "reduce_scatter")
"""Those whose bytes are the same on all ranks, so that one rank's tell how long the transfer takes."""
KEYS = ["step", "group", "number", "name"]
"""Columns of `collectives` that together are one collective of all its ranks."""


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
    per = 1e3 * step_count(run)
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
    return transfer_of(same, same["transfer_us"])


def transfer_of(same: pd.DataFrame, us: "pd.Series[float]") -> Transfer:
    """The transfer of rows of one kind and size that takes `us` each."""
    bytes_, each_us = float(same["message_bytes"].iloc[0]), float(us.median())
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


def step_count(run: Run) -> float:
    """Steps of the windows, of all ranks together; windows where no steps are marked. If these cannot be read, the
    steps in which a collective was launched."""
    windows = window_rows(run)
    if windows.empty:
        return max(1.0, float(len(run.collectives[["rank", "step"]].drop_duplicates())))
    steps = float(windows["steps"].fillna(1.0).sum())
    return max(1.0, steps)
