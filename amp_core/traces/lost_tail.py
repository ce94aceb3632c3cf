"""Work of a device that a trace lacks at its end, as the host tells that waits for it.

>>> lost_tail_us(events, linked)
9300.0

A host may also wait for another device or another process there, or for the profiler. So the trace lacks work only
where it holds launches without theirs, or where some may have been launched before it began.
"""

import numpy as np

from amp_core.traces.events import TraceEvents
from amp_core.traces.gpu_work import LinkedWork, may_lack_work
from amp_core.traces.waits import waiting_calls

MIN_LOST_US = 500.0
"""A call that waits returns within this after what it waits for has ended, also where processors are busy."""
MIN_LOST_FRAC = 0.1
"""Share of the recorded time of the device from which what is lacking is told."""
MIN_EARLY_WAIT_US = 100.0
"""A wait before the first launch that takes this long waits for what was launched before the trace."""


def lost_tail_us(events: TraceEvents, linked: LinkedWork) -> float:
    """How long the host still waits for the device after the last work that was recorded, microseconds: a full buffer,
    or one that the profiler did not flush, loses the rest. 0 where it does not, not long, or for nothing that the trace
    may lack."""
    if not len(linked):
        return 0.0
    first, last = float(linked.start_us.min()), float(linked.end_us.max())
    waits = waiting_calls(events)
    start, end = (np.asarray(edge)[waits] for edge in (events.calls.start, events.calls.end))
    after_us = end - np.maximum(start, last)
    us = float(after_us.max(initial=0.0))
    if us < max(MIN_LOST_US, MIN_LOST_FRAC * (last - first)):
        return 0.0
    launched_us = linked.launched_us[np.isfinite(linked.launched_us)]
    early = start < launched_us.min(initial=np.inf)
    is_queued = bool(np.isneginf(linked.launched_us).any() or (end - start)[early].max(initial=0.0) > MIN_EARLY_WAIT_US)
    return us if is_queued or may_lack_work(events, float(end[after_us.argmax()])) else 0.0
