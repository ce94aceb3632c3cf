"""Whether the launches of a trace without marked steps repeat, and how long the first of these passes takes.

>>> repeated_passes(events, linked, windows)
Passes(count=3, launches=445, first_us=42200.0, others_us=4830.0)

A loop that is profiled without `prof.step()` launches the same kernels again and again. Its first pass sets up
libraries, loads kernels and fills caches, which says nothing of the loop.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from amp_core.traces import intervals as times
from amp_core.traces.events import TraceEvents
from amp_core.traces.gpu_work import Bools, LinkedWork
from amp_core.traces.kernel_rows import Window
from amp_core.traces.link import Ints

MIN_LAUNCHES = 5
"""A pass of fewer launches is one operator's loop rather than a model's."""
MIN_SHORT_PASSES, MAX_EQUAL_RATIO = 5, 1.5
"""Passes of fewer launches are those of a benchmark, if there are so many, and the first takes no longer than that many
times the median of the others: no warm-up is in the trace."""
MIN_SAME_FRAC = 0.9
"""Share of the launches that equal those of the pass before: the first pass may launch more, to initialize."""
MIN_FIRST_RATIO, MIN_FIRST_FRAC = 3.0, 0.5
"""The first pass is told if it takes that many times as long as the mean of the others, and that share of all."""
MAX_LAST_RATIO = 1.1
"""A last pass that takes so many times as long as the others is followed by what belongs to none."""
MAX_WORK_FRAC = 0.5
"""A first pass in which the device works for more than this share computes more, as that of a prompt."""
MAX_CANDIDATES = 8
"""Kernels, the rarest first, whose distance may be the length of a pass."""


@dataclass(frozen=True)
class Passes:
    """Equal series of launches, of which the first takes most of the time."""

    count: int
    launches: int
    """Launches of each but the first."""
    first_us: float
    """From the first launch to that of the second pass."""
    others_us: float
    """Mean of the others, from first launch to first launch; of the last one, to the end of its work, unless that is
    far longer."""


def equal_passes(events: TraceEvents, linked: LinkedWork, windows: Sequence[Window]) -> int:
    """How often the same launches repeat in a trace without marked steps; 0 if they do not."""
    found = _begins(events, linked, windows)
    if found is not None:
        return len(found[1])
    found = _begins(events, linked, windows, least=1)
    if found is None or len(found[1]) < MIN_SHORT_PASSES:
        return 0
    launched, begins, _ = found
    each = np.diff(linked.launched_us[launched[begins]])
    return len(begins) if each[0] <= MAX_EQUAL_RATIO * np.median(each[1:]) else 0


def repeated_passes(events: TraceEvents, linked: LinkedWork, windows: Sequence[Window]) -> Passes | None:
    """The passes of a trace without marked steps; None if no launches repeat, or the first pass is not far longer."""
    found = _begins(events, linked, windows)
    if found is None:
        return None
    launched, begins, period = found
    moments = np.append(linked.launched_us[launched[begins]], linked.end_us[launched].max())
    moments[0] = max(moments[0], windows[0].device_start)
    each = np.diff(moments)
    others = each[1:]
    if len(others) > 1 and others[-1] > MAX_LAST_RATIO * others[:-1].mean():  # after it comes what is launched once
        others = others[:-1]
    first_us, others_us = float(each[0]), float(others.mean())
    works_us = float(linked.own_us[launched[: begins[1]]].sum())
    if first_us < max(MIN_FIRST_RATIO * others_us, MIN_FIRST_FRAC * float(each.sum()), works_us / MAX_WORK_FRAC):
        return None
    return Passes(len(each), period, first_us, others_us)


def _begins(
    events: TraceEvents, linked: LinkedWork, windows: Sequence[Window], least: int = MIN_LAUNCHES
) -> tuple[Ints, Ints, int] | None:
    """Work in order of its launch, where each pass begins in it, and the launches of a pass, which are at least so
    many; None without passes."""
    if not len(events.work) or windows[0].first is not None or len(np.unique(linked.device)) != 1:
        return None
    inside = linked.start_us >= windows[0].device_start  # the wait before is told as what the trace leaves out
    launched = np.flatnonzero(np.isfinite(linked.launched_us) & ~linked.in_graph & inside)
    launched = launched[np.argsort(linked.launched_us[launched], kind="stable")]
    names = linked.name[launched]
    period = _period(names, least)
    if period is None:
        return None
    begins = np.arange(len(names) % period, len(names), period)  # what is launched beside the loop comes first
    begins[0] = 0
    return launched, begins, period


MIN_SETTLED, MAX_SETTLED_FRAC = 3, 0.01
"""Equal passes at least, half of which have to be settled: a pass is that waits for launches for no more than this
share of it."""


def filling_passes(linked: LinkedWork, selected: Bools, late: times.Intervals) -> times.Intervals:
    """When the first of several equal passes of a device fill the queue of launches: the later half of them never waits
    for its host, so that in a loop none does. None where it waits, and where the first pass sets things up. `late`:
    when the device waits for launches."""
    work = np.flatnonzero(selected & np.isfinite(linked.launched_us))
    work = work[np.lexsort((linked.start_us[work], linked.launched_us[work]))]
    names = linked.name[work]
    period = _period(names, MIN_LAUNCHES) if len(work) and len(late[0]) else None
    # Layers repeat within one pass, which launches something beside them.
    if period is None or len(names) % period or (names[period:] != names[:-period]).any():
        return times.NONE
    begins = np.arange(0, len(work), period)
    ends = np.maximum.accumulate(np.maximum.reduceat(linked.end_us[work], begins))
    starts = np.append(linked.start_us[work].min(), ends[:-1])
    us = ends - starts
    waiting = np.flatnonzero(times.overlap_of_each(starts, ends, late) > MAX_SETTLED_FRAC * us)
    first = int(waiting[-1]) + 1 if len(waiting) else 0
    if len(us) < MIN_SETTLED or not 0 < first <= len(us) / 2 or us[0] >= MIN_FIRST_RATIO * us[first:].mean():
        return times.NONE
    return starts[:1], ends[first - 1 : first]


def _period(names: Ints, least: int) -> int | None:
    """The number of launches after which they repeat; None if they do not."""
    kinds, counts = np.unique(names, return_counts=True)
    rare = kinds[counts >= 2][np.argsort(counts[counts >= 2], kind="stable")][:MAX_CANDIDATES]
    distances = {int(np.median(np.diff(np.flatnonzero(names == kind)))) for kind in rare.tolist()}
    for period in sorted(distances):
        if least <= period <= len(names) // 2 and (names[period:] == names[:-period]).mean() >= MIN_SAME_FRAC:
            return period
    return None
