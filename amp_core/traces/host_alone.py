"""The operator that keeps the host busy by itself, in a trace that lacks the work of the device.

>>> longest_host_op(events, host, link_work(events, host))
('aten::normal_', 0.8)
"""

import numpy as np

from amp_core.traces.collect import TraceEvents
from amp_core.traces.gpu_work import LinkedWork
from amp_core.traces.link import Host

MIN_HOST_FRAC = 1 / 3
"""Share of the time from which such an operator is named: it is then likely the longest thing in the trace."""


def longest_host_op(events: TraceEvents, host: Host, linked: LinkedWork) -> tuple[str, float] | None:
    """Name of the operator with the most self time of those that never call into the device's runtime, and its share
    of the time from the first event to the last. None if that is little, and in a trace without calls, where every
    operator may be one of the device. `linked` are the operators."""
    if not events.launches or not len(events.calls) or not len(linked):
        return None
    spans = events.spans
    calling = host.op_of_call[host.op_of_call >= 0]
    names = np.asarray(spans.name)
    us = np.bincount(linked.name, linked.own_us, minlength=len(events.texts))
    us[np.unique(names[calling])] = 0.0
    wall_us = max(*spans.end, *events.calls.end) - min(*spans.start, *events.calls.start)
    longest = int(us.argmax())
    share = float(us[longest] / wall_us) if wall_us > 0 else 0.0
    return (events.texts[longest], share) if share >= MIN_HOST_FRAC else None
