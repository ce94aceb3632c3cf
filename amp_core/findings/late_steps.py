"""One step that holds nearly all of the time for which a device waits for late launches: its mean is of no step.

>>> in_one_step(run, ms, savings)
'In it lies 94 % of the time for which the device is idle because the host launches too late; in the other steps that …'
"""

import pandas as pd

from amp_core.analysis.performance.idle_savings import LATE_LAUNCHES
from amp_core.analysis.performance.kernels import window_rows
from amp_core.analysis.performance.savings import Savings
from amp_core.store.run import Run
from amp_core.text.formatting import percent

MIN_IN_ONE_FRAC = 0.8
"""Share of that time in one step of several from which it is told of that step."""
_NO_WORK = ("data", "gaps", "watch", "communication")
"""Parts of a step in which the device computes nothing."""


def late_step(run: Run, savings: Savings | None) -> tuple[float, float] | None:
    """The step that holds nearly all of the time for which devices wait for late launches, where that is the largest
    possible saving, and the share of it; None for others, and in runs that older versions imported."""
    if savings is None or not savings.ranked or savings.ranked[0].code not in LATE_LAUNCHES:
        return None
    windows = window_rows(run)
    windows = windows[windows["late_step"].notna()]
    total_us, us = float(windows["late_us"].sum()), windows.groupby("late_step")["late_step_us"].sum()
    if us.empty or us.max() < MIN_IN_ONE_FRAC * total_us or total_us <= 0:
        return None
    return float(str(us.idxmax())), float(us.max()) / total_us


def in_one_step(run: Run, ms: "pd.Series[float]", savings: Savings | None) -> str:
    """A sentence on that step after one that tells its time, and what the others have instead; empty for others. `ms`:
    the time of each step, several of them."""
    late = late_step(run, savings)
    if late is None or savings is None or late[0] not in ms.index:
        return ""
    (step, frac), windows = late, window_rows(run)
    others_us = 1e3 * float(ms.drop(step).mean())
    of_all_us = float(windows["late_us"].sum()) / max(1, windows["rank"].nunique())
    rest = percent((1 - frac) * of_all_us / (others_us * (len(ms) - 1)))
    parts = savings.cost.parts[~savings.cost.parts["part"].isin(_NO_WORK)]
    most = parts.iloc[int(parts["us"].to_numpy().argmax())]
    share = f"{100 * min(1.0, float(most['us']) / others_us):.0f} %"
    return (
        f" In it lies {100 * frac:.0f} % of the time for which the device is idle because the host launches too late; "
        f"in the other steps that is {rest} of the time, and the longest part is {most['label']}, about {share}."
    )
