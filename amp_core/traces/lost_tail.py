"""Work of a device that a trace lacks at its end, as the host tells that waits for it.

>>> lost_tail_us(events, linked)
9300.0
"""

import numpy as np

from amp_core.traces.events import TraceEvents
from amp_core.traces.gpu_work import LinkedWork
from amp_core.traces.waits import waiting_calls

MIN_LOST_US = 500.0
"""A call that waits returns within this after what it waits for has ended, also where processors are busy."""
MIN_LOST_FRAC = 0.1
"""Share of the recorded time of the device from which what is lacking is told."""


def lost_tail_us(events: TraceEvents, linked: LinkedWork) -> float:
    """How long the host still waits for the device after the last work that was recorded, microseconds: a full buffer,
    or one that the profiler did not flush, loses the rest. 0 where it does not, or not long."""
    if not len(linked):
        return 0.0
    first, last = float(linked.start_us.min()), float(linked.end_us.max())
    waits = waiting_calls(events)
    start, end = (np.asarray(edge)[waits] for edge in (events.calls.start, events.calls.end))
    us = float((end - np.maximum(start, last)).max(initial=0.0))
    return us if us >= max(MIN_LOST_US, MIN_LOST_FRAC * (last - first)) else 0.0
