"""Why a device was idle, gap by gap.

    >>> causes = idle_causes(idle, starts, launched, returned, in_graph, wait_starts, wait_ends)
    >>> causes.sync_us, causes.dispatch_us
    (90.0, 410.0)

A gap ends with a kernel. If the call that launched the kernel had returned before the gap, the kernel waited for other
work; while the call runs, the host is the cause: the first launch loads the kernel, which takes milliseconds. Otherwise
the host was late: it had waited for the device, it was dispatching operators, or it did something else. A kernel that
was launched in the gap and began much later than the call returned waited for other work, too.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from amp_core.traces import intervals as times
from amp_core.traces.replay import Replay

LATENCY_US = 10.0
"""Gaps up to this between kernels that were both launched are the time to start a kernel."""
START_US = 100.0
"""A kernel that an idle device could begin begins sooner after its launch, also under the profiler."""
DISPATCH_US = 300.0
"""Python and the dispatch of operators between two launches take less than this, also under the profiler. A longer gap
is due to other work of the host: preprocessing, logging, setting up a library."""


@dataclass(frozen=True)
class IdleCauses:
    """Idle time by cause, microseconds. The rest of the idle time is in `host`."""

    sync_us: float
    """After the host waited for the device: no more than it waited, since it would have launched that much earlier."""
    wait_us: float
    """Launched work did not begin, for longer than it takes to start a kernel: it waits for other work, of this device
    or another."""
    lost_us: float
    """Part of `wait_us` that delays nothing: what follows is launched too late in any case."""
    graph_us: float
    """Part of `wait_us` that ends with the work of a captured graph, which starts later than a kernel."""
    latency_us: float
    """The same in shorter gaps."""
    dispatch_us: float
    """The host launched too late, in gaps up to `DISPATCH_US`."""
    host: times.Intervals
    """The longer gaps in which the host launched too late."""
    host_before: npt.NDArray[np.int64]
    """The work that ends each of them, an index of `starts`."""
    late: times.Intervals
    """The same of all lengths."""
    held: times.Intervals
    """When launched work did not begin, as in `wait_us`."""
    between_waits: tuple[float, float]
    """The part of the time in which the host launched too late that is between two waits with few launches between
    them, microseconds, and how many these are on average."""
    after_wait_us: times.Floats
    """`sync_us` by the waits that it came after: of one gap in proportion to their lengths."""


def idle_causes(
    idle: times.Intervals,
    starts: times.Floats,
    launched: times.Floats,
    returned: times.Floats,
    in_graph: npt.NDArray[np.bool_],
    wait_starts: times.Floats,
    wait_ends: times.Floats,
    few: int = 0,
    replay: Replay | None = None,
) -> IdleCauses:
    """The causes of `idle` times of a device. Of its work: `starts`, and when the calls that launched it began
    and `returned`, and whether they are a graph's. The waits are the host's. `few`: the most launches between two
    waits that are told apart. `replay` of the same work tells which waits of it delay nothing."""
    order = np.argsort(starts, kind="stable")
    idle = _cut(idle, starts[order])
    following = np.searchsorted(starts[order], idle[1], side="left")
    known = following < len(starts)
    launch, launch_end = np.full((2, len(idle[0])), np.inf)
    launch[known] = launched[order][following[known]]
    launch_end[known] = returned[order][following[known]]
    of_graph = np.zeros(len(idle[0]), dtype=bool)
    of_graph[known] = in_graph[order][following[known]]
    queued = launch <= idle[0]
    by_end = np.argsort(wait_ends)
    waited = np.concatenate([[0.0], np.cumsum((wait_ends - wait_starts)[by_end])])
    first, last = (np.searchsorted(wait_ends[by_end], edge, side="right") for edge in idle)
    waited_us = waited[last] - waited[first]
    length = idle[1] - idle[0]
    long_wait = length >= LATENCY_US
    launching = np.where(queued & long_wait, np.clip(launch_end - idle[0], 0.0, length), 0.0)
    has_call = launch_end > launch  # otherwise only the operator is known, in which the host may be for long
    start_us = np.where(has_call, np.clip(idle[1] - launch_end, 0.0, length), 0.0)
    late = np.where(queued, launching, length - np.where(start_us >= START_US, start_us, 0.0))
    sync = np.where(queued, 0.0, np.minimum(late, waited_us))
    late_us = late - sync
    dispatch = late_us < DISPATCH_US
    began = idle[0] + sync
    some, rest = late_us > 0, ~dispatch
    waiting = ~queued | long_wait
    held_us = np.where(waiting, length - late, 0.0)
    held_of_work = np.zeros(len(starts))
    np.add.at(held_of_work, order[following[known]], held_us[known])
    return IdleCauses(
        sync_us=float(sync.sum()),
        wait_us=float(held_us.sum()),
        lost_us=float(held_of_work.sum()) - replay.sooner_us(held_of_work) if replay is not None else 0.0,
        graph_us=float(held_us[of_graph].sum()),
        latency_us=float(length[queued & ~long_wait].sum()),
        dispatch_us=float(late_us[dispatch].sum()),
        host=(began[rest], (began + late_us)[rest]),
        host_before=order[np.minimum(following, len(starts) - 1)][rest],
        late=(began[some], (began + late_us)[some]),
        held=((idle[0] + late)[waiting & (late < length)], idle[1][waiting & (late < length)]),
        between_waits=_between_waits(launch, late_us, launched, np.sort(wait_ends), few),
        after_wait_us=_after_each(idle, sync, waited_us, wait_starts, wait_ends),
    )


def _between_waits(
    launch: times.Floats, late_us: times.Floats, launched: times.Floats, wait_ends: times.Floats, few: int
) -> tuple[float, float]:
    """`IdleCauses.between_waits`: of gaps that end with a `launch`, after `late_us`."""
    launches = np.unique(launched[np.isfinite(launched)])
    counts = np.bincount(np.searchsorted(wait_ends, launches), minlength=len(wait_ends) + 1)
    of_gap = np.searchsorted(wait_ends, launch)
    between = (of_gap > 0) & (of_gap < len(wait_ends)) & np.isfinite(launch) & (late_us > 0)
    between &= counts[of_gap] <= few
    us = float(late_us[between].sum())
    return us, float((counts[of_gap] * late_us)[between].sum() / us) if us > 0 else 0.0


def _after_each(
    idle: times.Intervals, sync_us: times.Floats, waited_us: times.Floats, starts: times.Floats, ends: times.Floats
) -> times.Floats:
    """Of each wait, the idle time after it. Of each gap, `sync_us` came after waits of `waited_us` that end in it."""
    gap = np.searchsorted(idle[1], ends, side="left")
    inside = gap < len(idle[0])
    inside[inside] &= idle[0][gap[inside]] < ends[inside]
    share = np.divide(sync_us, waited_us, out=np.zeros(len(sync_us)), where=waited_us > 0)
    us = np.zeros(len(ends))
    us[inside] = (ends - starts)[inside] * share[gap[inside]]
    return us


def long_launches(starts: times.Floats, launched: times.Floats, returned: times.Floats) -> times.Intervals:
    """When the host is in launches of kernels that take `MIN_LONG_LAUNCH_US` or more by themselves, as the first one of
    a kernel. Launches behind `MAX_QUEUED` others wait for the device."""
    queued = np.searchsorted(np.sort(launched), launched) - np.searchsorted(np.sort(starts), launched)
    chosen = np.isfinite(launched) & (returned - launched >= MIN_LONG_LAUNCH_US) & (queued < MAX_QUEUED)
    return times.union(launched[chosen], returned[chosen])


MIN_LONG_LAUNCH_US = 1000.0
MAX_QUEUED = 500
"""A queue of CUDA holds some thousand launches, and a launch waits for room in it."""


def _cut(idle: times.Intervals, starts: times.Floats) -> times.Intervals:
    """The idle times, in parts where work starts within: work of no length, in traces of whole microseconds."""
    if not len(idle[0]):
        return idle
    at = np.searchsorted(idle[0], starts, side="right") - 1
    inside = np.unique(starts[(at >= 0) & (starts > idle[0][at]) & (starts < idle[1][at])])
    return np.sort(np.concatenate([idle[0], inside])), np.sort(np.concatenate([inside, idle[1]]))
