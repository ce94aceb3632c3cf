"""How long a trace without steps waits for work that was launched before it, and in which call.

>>> wait_for_earlier_work(events, linked, window)
EarlierWork(us=42640.0, frac=0.69, recorded=False, call='cudaStreamSynchronize')

A profiler may start while the device is busy. Then the first work launched in the trace begins long after its launch,
whether the trace holds what runs meanwhile or not. That time is no part of the window.
"""

from dataclasses import dataclass

import numpy as np

from amp_core.traces.collect import TraceEvents
from amp_core.traces.gpu_work import LinkedWork
from amp_core.traces.kernel_rows import Window

MIN_LEFT_OUT_US = 1000.0
MIN_LEFT_OUT_FRAC = 0.2
"""Share of the trace from which the time is told: a reader who compares its length would miss it."""


@dataclass(frozen=True)
class EarlierWork:
    """The time before the window, in which nothing ran that was launched in the trace."""

    us: float
    frac: float
    """Its share of the time from the first event to the last."""
    recorded: bool
    """Whether the trace holds work that was launched before it. If not, the profiler's own start looks the same."""
    call: str
    """The call in which the host is for most of it; "" if it is in none."""


def wait_for_earlier_work(events: TraceEvents, linked: LinkedWork, window: Window) -> EarlierWork | None:
    """That time of a trace without steps; None if it is short, and for a trace with steps."""
    inside = np.isfinite(linked.launched_us) & (linked.start_us >= window.device_start)
    if window.first is not None or not len(events.work) or not inside.any():
        return None
    earlier = float(linked.start_us[np.isneginf(linked.launched_us)].min(initial=np.inf))
    low, high = min(earlier, float(linked.returned_us[inside].min())), window.device_start
    columns = [a for one in (events.spans, events.calls, events.work) if len(one) for a in (one.start, one.end)]
    wall_us = max(map(max, columns)) - min(map(min, columns))
    if high - low < max(MIN_LEFT_OUT_US, MIN_LEFT_OUT_FRAC * wall_us):
        return None
    start, end = np.asarray(events.calls.start), np.asarray(events.calls.end)
    within = np.minimum(end, high) - np.maximum(start, low)
    longest = int(within.argmax()) if len(within) else -1
    is_waiting = longest >= 0 and within[longest] >= (high - low) / 2
    call = events.texts[events.calls.name[longest]] if is_waiting else ""
    return EarlierWork(high - low, (high - low) / wall_us, bool(np.isfinite(earlier)), call)
