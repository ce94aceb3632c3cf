"""Waiting in collectives for ranks that are late because of their own hosts: it is part of what those hosts cost.

>>> late_hosts(run, basis)
LateHosts(rank=2, waiting_us=39700.0, others_us=59500.0)
"""

from dataclasses import dataclass

import pandas as pd

from amp_core.analysis.performance.collectives import collective_rows
from amp_core.analysis.performance.kernels import holds_collectives_alone, window_rows
from amp_core.analysis.performance.late_rank_savings import MIN_EXPLAINED_FRAC
from amp_core.analysis.performance.main_device import main_rank
from amp_core.analysis.performance.rank_waiting import started_apart
from amp_core.analysis.performance.saving import Basis
from amp_core.store.run import Run


@dataclass(frozen=True)
class LateHosts:
    """The rank whose host is the latest where the others wait for that; times in microseconds per step."""

    rank: int
    waiting_us: float
    """How long a rank surely waits, with nothing beside it, for ranks whose hosts are late; mean over all ranks."""
    others_us: float
    """The same as a mean over the others than `rank`."""


def late_hosts(run: Run, basis: Basis) -> LateHosts | None:
    """The waiting that late hosts explain, if it is long and most of it is for the rank whose host is the latest, or
    for ones that are about as late; None for others. A wait is explained if the device of the rank that enters last is
    idle for its own host for longer than the waiting rank's, by at least half of the wait: seen from the others,
    that time is waiting."""
    windows, frame = window_rows(run), collective_rows(run)
    if windows["rank"].nunique() < 2 or main_rank(run) is not None or not frame["last"].notna().any():
        return None
    if holds_collectives_alone(run) or started_apart(run):
        return None
    late_us = pd.Series({rank: late_host_us(own) for rank, own in windows.groupby("rank")}) * steps_of_rank(windows)
    frame = frame[frame["last"].notna() & (frame["rank"] != frame["last"])]
    # A collective first waits and then transfers: what runs beside it may hide either.
    sure = (frame["alone_us"] - frame["transfer_us"] - frame["stalled_us"]).clip(lower=0.0)
    waits = frame.assign(sure_us=sure).groupby(["rank", "last"])[["waiting_us", "sure_us"]].sum().reset_index()
    beyond_us = waits["last"].map(late_us) - waits["rank"].map(late_us)
    waits = waits[beyond_us >= MIN_EXPLAINED_FRAC * waits["waiting_us"]]
    total_us = float(waits["sure_us"].sum())
    if not basis.is_long(total_us / basis.steps):
        return None
    rank, is_late = int(float(str(late_us.idxmax()))), late_us >= LATE_RATIO * late_us.max()
    if waits["sure_us"][waits["last"].map(is_late)].sum() < MIN_FOR_LATE_FRAC * total_us:
        return None
    others = len(late_us) - 1
    theirs_us = float(waits["sure_us"][waits["rank"] != rank].sum())
    return LateHosts(rank, total_us / basis.steps, theirs_us / others / steps_of_rank(windows))


LATE_RATIO, MIN_FOR_LATE_FRAC = 0.8, 0.5
"""Part of the latest host's time from which another one is about as late, and share of that waiting for these from
which the latest host is the one to look at."""


def steps_of_rank(windows: pd.DataFrame) -> float:
    """Steps of each rank; 1 where no steps are marked."""
    return max(1.0, float(windows["steps"].fillna(0.0).sum()) / windows["rank"].nunique())


def late_host_us(windows: pd.DataFrame) -> float:
    """How long per step devices are idle because their own hosts launch too late, the mean in microseconds. Of rows of
    `window_rows`."""
    causes = ["idle_data_us", "idle_sync_us", "idle_wait_us", "idle_latency_us", "idle_filling_us"]
    causes += ["idle_elsewhere_us", "idle_profiling_us"]
    us = windows["idle_us"].fillna(0.0) - windows[causes].fillna(0.0).sum(axis=1)
    return float(us.clip(lower=0.0).sum()) / max(1.0, float(windows["steps"].fillna(0.0).sum()) or float(len(windows)))
