"""How long a CPU takes to free large tensors, by what a trace tells of memory.

>>> freeing(events)
Freeing(us=187000.0, of_us=554300.0, count=26, most_bytes=201326592, bytes=2886000000)

Allocators give large blocks back to the system at once, page by page, and the next tensor of that size faults all its
pages in again. The profiler notes a free just before that, so the time lies between the note and whatever follows.
"""

from dataclasses import dataclass

import numpy as np

from amp_core.traces.events import TraceEvents
from amp_core.traces.host_alone import host_range

MIN_BYTES_PER_US, MAX_BYTES_PER_US = 3e3, 60e3
"""Bytes per microsecond at which pages are given back: 14 to 16 GB/s on a desktop (26 frees of 67 to 201 MB in a public
trace), within a factor of four. What takes longer is something else as well, and what is faster stayed with the
allocator."""
MIN_FREES, MIN_FITTING_FRAC = 3, 0.5
"""Frees at such a rate, and their share among all large ones, from which the time is taken for that of freeing."""


@dataclass(frozen=True)
class Freeing:
    """Frees of large tensors on a CPU; times in microseconds."""

    us: float
    of_us: float
    """The time from the first event to the last."""
    count: int
    most_bytes: int
    """Of the largest tensor."""
    bytes: int
    """Of all of them."""


def freeing(events: TraceEvents) -> Freeing | None:
    """That of a trace; None without frees of large tensors that take long."""
    whole = host_range(events)
    if not events.host_frees or whole is None:
        return None
    at, freed = (np.array(column, dtype=np.float64) for column in zip(*events.host_frees, strict=True))
    spans, calls, frames = events.spans, events.calls, events.frames
    ends = [np.asarray(times, dtype=np.float64) for of in (spans, calls, frames) for times in (of.start, of.end)]
    marks = np.sort(np.concatenate([at, *ends]))
    following = np.searchsorted(marks, at, side="right")
    known = following < len(marks)
    us = np.where(known, marks[np.minimum(following, len(marks) - 1)] - at, 0.0)
    rate = freed / np.maximum(us, 1e-3)
    fits = known & (rate >= MIN_BYTES_PER_US) & (rate <= MAX_BYTES_PER_US)
    count = int(fits.sum())
    if count < MIN_FREES or count < MIN_FITTING_FRAC * len(at):
        return None
    low, high = whole
    return Freeing(
        us=float(us[fits].sum()),
        of_us=high - low,
        count=count,
        most_bytes=int(freed[fits].max()),
        bytes=int(freed[fits].sum()),
    )
