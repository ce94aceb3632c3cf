"""Work of a device whose times are not those of the trace, as where a driver writes no start: only how long it took is
known.

>>> drop_misclocked(events)
Misclocked(count=30, us=105400.0, kept_us=80.0, span_us=108500.0, off_us=5.5e12, name='fused_mm', name_us=78500.0)
"""

from dataclasses import dataclass

import numpy as np

from amp_core.traces.events import TraceEvents, Work
from amp_core.traces.merged_ranks import chosen, renumbered

MIN_OFF_US = 60e6
MIN_OFF_RATIO = 10.0
"""Work is off the clock by at least a minute, and by that many times as long as the host's events last: longer than a
queue or an idle server takes."""


@dataclass(frozen=True)
class Misclocked:
    """Work that was left out, for its start lies far outside of the trace."""

    count: int
    us: float
    """How long it took, in all."""
    kept_us: float
    """The same of the work that is in the trace."""
    span_us: float
    """How long the host's events last."""
    off_us: float
    """How far the first of it is from them."""
    name: str
    """The kernel with most of the time, and its time."""
    name_us: float


@dataclass(frozen=True)
class Untimed:
    """Work of which the trace tells neither start nor end, as where the driver gives the profiler none."""

    count: int
    """Kernels, copies and fills."""
    device_us: float
    """From the first to the last time on the device's clock of the ranges that are marked there; 0 without one."""
    host_us: float
    """From the first to the last operator or range of the host."""


def drop_untimed(events: TraceEvents) -> None:
    """Remove and count the work of a device from `events`, if none of it has a length."""
    if not len(events.work) or not np.array_equal(events.work.start, events.work.end):
        return
    events.untimed_work += len(events.work)
    events.work = Work()
    events.messages_of_work, events.moved_bytes, events.kernel_threads = {}, {}, {}


def untimed_work(events: TraceEvents) -> Untimed | None:
    """Such work in a trace that holds no other; None where there is none."""
    if not events.untimed_work or len(events.work):
        return None
    first, last = events.device_range
    spans = events.spans
    host_us = max(spans.end) - min(spans.start) if len(spans) else 0.0
    return Untimed(count=events.untimed_work, device_us=max(0.0, last - first), host_us=host_us)


def drop_misclocked(events: TraceEvents) -> Misclocked | None:
    """Remove such work from `events`. A clock of its own for all of the device's work is none of these: then the times
    of the work are right among each other, unless all of it starts at once."""
    start, end = np.asarray(events.work.start), np.asarray(events.work.end)
    columns = [np.asarray(column) for column in (events.spans.start, events.spans.end, events.calls.start) if column]
    if not columns or not len(start):
        return None
    first, last = min(float(c.min()) for c in columns), max(float(c.max()) for c in columns)
    off_us = np.maximum(first - start, start - last)
    off = off_us > max(MIN_OFF_US, MIN_OFF_RATIO * (last - first))
    if not off.any() or (off.all() and np.ptp(start) > 0):
        return None
    us = np.bincount(np.asarray(events.work.name)[off], (end - start)[off], minlength=len(events.texts))
    found = Misclocked(
        count=int(off.sum()),
        us=float((end - start)[off].sum()),
        kept_us=float((end - start)[~off].sum()),
        span_us=last - first,
        off_us=float(off_us[off].min()),
        name=events.texts[int(us.argmax())],
        name_us=float(us.max()),
    )
    kept = np.flatnonzero(~off)
    events.work = chosen(events.work, kept)
    events.messages_of_work = renumbered(events.messages_of_work, kept)
    events.moved_bytes = renumbered(events.moved_bytes, kept)
    events.kernel_threads = renumbered(events.kernel_threads, kept)
    events.first_us = max(events.first_us, first)
    return found
