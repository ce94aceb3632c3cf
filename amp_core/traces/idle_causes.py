"""Why a device was idle, gap by gap, and what the host did in the meantime.

    >>> causes = idle_causes(idle, starts, launched, returned, wait_starts, wait_ends)
    >>> causes.sync_us, causes.dispatch_us, longest_op(events, host, causes.host)
    (90.0, 410.0, ('aten::copy_', 9000.0))

A gap ends with a kernel. If the call that launched the kernel had returned before the gap, the kernel waited for other
work; while the call runs, the host is the cause: the first launch loads the kernel, which takes milliseconds. Otherwise
the host was late: it had waited for the device, it was dispatching operators, or it did something else.
"""

from dataclasses import dataclass

import numpy as np

from amp_core.traces import intervals as times
from amp_core.traces.collect import OP, TraceEvents
from amp_core.traces.link import EVALUATE, Host

LATENCY_US = 10.0
"""Gaps up to this between kernels that were both launched are the time to start a kernel."""
DISPATCH_US = 300.0
"""Python and the dispatch of operators between two launches take less than this, also under the profiler. A longer gap
is due to other work of the host: preprocessing, logging, setting up a library."""


@dataclass(frozen=True)
class IdleCauses:
    """Idle time by cause, microseconds. The rest of the idle time is in `host`."""

    sync_us: float
    """After the host waited for the device: no more than it waited, since it would have launched that much earlier."""
    wait_us: float
    """Launched work did not begin, in gaps longer than the time to start a kernel: it waits for other work, of this
    device or another."""
    latency_us: float
    """The same in shorter gaps."""
    dispatch_us: float
    """The host launched too late, in gaps up to `DISPATCH_US`."""
    host: times.Intervals
    """The longer gaps in which the host launched too late."""


def idle_causes(
    idle: times.Intervals,
    starts: times.Floats,
    launched: times.Floats,
    returned: times.Floats,
    wait_starts: times.Floats,
    wait_ends: times.Floats,
) -> IdleCauses:
    """The causes of `idle` times of a device. Of its work: `starts`, and when the calls that launched it began
    and `returned`. The waits are the host's."""
    order = np.argsort(starts, kind="stable")
    following = np.searchsorted(starts[order], idle[0], side="left")
    known = following < len(starts)
    launch, launch_end = np.full((2, len(idle[0])), np.inf)
    launch[known] = launched[order][following[known]]
    launch_end[known] = returned[order][following[known]]
    queued = launch <= idle[0]
    by_end = np.argsort(wait_ends)
    waited = np.concatenate([[0.0], np.cumsum((wait_ends - wait_starts)[by_end])])
    first, last = (np.searchsorted(wait_ends[by_end], edge, side="right") for edge in idle)
    length = idle[1] - idle[0]
    sync = np.where(queued, 0.0, np.minimum(length, waited[last] - waited[first]))
    long_wait = length >= LATENCY_US
    launching = np.where(queued & long_wait, np.clip(launch_end - idle[0], 0.0, length), 0.0)
    late_us = np.where(queued, launching, length - sync)
    dispatch = late_us < DISPATCH_US
    rest = ~dispatch
    return IdleCauses(
        sync_us=float(sync.sum()),
        wait_us=float((length - launching)[queued & long_wait].sum()),
        latency_us=float(length[queued & ~long_wait].sum()),
        dispatch_us=float(late_us[dispatch].sum()),
        host=((idle[0] + sync)[rest], (idle[0] + sync + late_us)[rest]),
    )


def longest_op(events: TraceEvents, host: Host, spans: times.Intervals) -> tuple[str | None, float]:
    """The outermost operator in which the host spent the longest of `spans`, and how long, in microseconds."""
    if not len(events.spans) or not len(spans[0]):
        return None, 0.0
    edges = np.stack(spans, axis=1).reshape(-1)
    covered = np.repeat(np.concatenate([[0.0], np.cumsum(spans[1] - spans[0])]), 2)[1:-1]
    us = np.zeros(len(events.texts))
    columns = (events.spans.kind, events.spans.name, events.spans.start, events.spans.end)
    for low in range(0, len(events.spans), _CHUNK):
        kind, name, start, end = (np.asarray(column[low : low + _CHUNK]) for column in columns)
        chosen = (kind == OP) & (host.parent[low : low + _CHUNK] < 0)
        inside = np.interp(end[chosen], edges, covered) - np.interp(start[chosen], edges, covered)
        us += np.bincount(name[chosen], inside, minlength=len(us))
    longest = int(us.argmax())
    return (events.texts[longest].removeprefix(EVALUATE), float(us[longest])) if us[longest] > 0 else (None, 0.0)


_CHUNK = 2**16  # of the spans at a time, which take hundreds of megabytes in a trace of a gigabyte
