"""The rank and the device of a trace that do nearly all of its work, if one does.

>>> of_main(run, window_rows(run))["rank"].unique()
array([0])
"""

import numpy as np
import pandas as pd

from amp_core.analysis.performance.kernels import window_rows
from amp_core.store.run import Run

MAIN_RANK_RATIO = 10.0
"""Without step markers the ranks of a trace do the same for equally long; one whose window lasts that many times as
long as that of each other does something else, and a mean over them tells of none. The same of the devices of one
process, by their work."""


def main_rank(run: Run) -> int | None:
    """The rank that alone has nearly all of the profiled time; None for one rank, with marked steps, or where others
    have as much."""
    windows = window_rows(run)
    windows = windows[np.isfinite(windows["wall_us"])]
    us = windows.groupby("rank")["wall_us"].sum().sort_values()
    if len(us) < 2 or windows["steps"].sum() > 0 or us.iloc[-1] < MAIN_RANK_RATIO * us.iloc[-2]:
        return None
    return int(us.index[-1])


def main_device(run: Run) -> str | None:
    """The device that alone does nearly all of the work where one process uses several; None for others."""
    windows, rank = window_rows(run), main_rank(run)
    windows = windows if rank is None else windows[windows["rank"] == rank]
    us = windows.groupby("device")["busy_us"].sum().sort_values()
    if windows["rank"].nunique() > 1 or len(us) < 2 or us.iloc[-1] < MAIN_RANK_RATIO * us.iloc[-2]:
        return None
    return str(us.index[-1])


def of_main(run: Run, frame: pd.DataFrame) -> pd.DataFrame:
    """The rows, with columns `rank` and `device`, of the rank and of the device that do nearly all, if one does."""
    rank, device = main_rank(run), main_device(run)
    frame = frame if rank is None else frame[frame["rank"] == rank]
    return frame if device is None else frame[frame["device"] == device]
