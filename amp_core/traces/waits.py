"""Calls in which the host waits for the device.

>>> is_wait("cudaStreamSynchronize_v3020")
True
"""

import re

import numpy as np
import numpy.typing as npt

from amp_core.traces import intervals as times
from amp_core.traces.events import TraceEvents
from amp_core.traces.host_spans import outside_operators
from amp_core.traces.idle_causes import DISPATCH_US
from amp_core.traces.link import Host, Ints

WAITING = (
    "Synchronize",
    "cudaMemcpy",
    "hipMemcpy",
    "hipMemcpyWithStream",
    "hipMemcpyDtoH",
    "SynchronizeStream",
    "SynchronizeStreamWithTimeout",
    "SynchronizeDevice",
    "SynchronizeEvent",
)
"""Suffixes of the names of calls in which the host waits for the device."""


def waiting_calls(events: TraceEvents) -> npt.NDArray[np.bool_]:
    """Which calls into the runtime wait for the device, by their names; none that asks for an event that is over, as
    a timer of earlier work."""
    if not len(events.calls):
        return np.zeros(0, dtype=bool)
    waiting, of_events = np.array([[is_wait(text), _of_event(text)] for text in events.texts], dtype=bool).T
    name, calls = np.asarray(events.calls.name), events.calls
    is_over = of_events[name] & (np.asarray(calls.end) - np.asarray(calls.start) < MIN_EVENT_WAIT_US)
    result: npt.NDArray[np.bool_] = waiting[name] & ~is_over
    return result


MIN_EVENT_WAIT_US = 10.0
"""A synchronization with an event that takes less finds it over already: a thread that waits is woken later."""


def _of_event(name: str) -> bool:
    return _VERSION.sub("", name).endswith(("EventSynchronize", "SynchronizeEvent"))


def is_wait(name: str) -> bool:
    """Whether a call of that name into the runtime waits for the device."""
    return _VERSION.sub("", name).endswith(WAITING)


_VERSION = re.compile(r"_(?:v\d+|ptsz)$")
"""What the names of some of the driver's and the runtime's calls end with, as `cudaStreamSynchronize_v3020`."""


def main_wait(events: TraceEvents) -> str:
    """The name of the calls in which the host waits for the device most often; or that of waits for the whole device,
    which a program asks for itself, if these take half of the time of all. Empty without such calls."""
    waits = waiting_calls(events)
    names = np.asarray(events.calls.name, dtype=np.int64)[waits]
    us = (np.asarray(events.calls.end) - np.asarray(events.calls.start))[waits]
    kinds, counts = np.unique(names, return_counts=True)
    if not len(kinds):
        return ""
    times_us = np.bincount(names, us)[kinds]
    longest = events.texts[int(kinds[times_us.argmax()])]
    if longest.endswith("DeviceSynchronize") and times_us.max() >= us.sum() / 2:
        return longest
    return events.texts[int(kinds[counts.argmax()])] if (counts == counts.max()).sum() == 1 else ""


def waits_after_copies(
    events: TraceEvents, host: Host, waits: npt.NDArray[np.bool_], blocking: Ints
) -> npt.NDArray[np.bool_]:
    """Which waiting calls come right behind a copy that waited already, in the same operator: together they are one
    synchronization."""
    result = np.zeros(len(waits), dtype=bool)
    if not len(waits):
        return result
    copies = np.zeros(len(waits), dtype=bool)
    copies[blocking] = True
    order = np.argsort(np.asarray(events.calls.start), kind="stable")
    before, after = order[:-1], order[1:]
    same_op = host.op_of_call[before] == host.op_of_call[after]
    result[after] = copies[before] & ~waits[before] & waits[after] & same_op
    return result


def waits_for_results(
    events: TraceEvents, host: Host, waits: npt.NDArray[np.bool_], copying: Ints, launched: times.Floats
) -> npt.NDArray[np.bool_]:
    """Which waiting calls copy results to the host that the program then works on: they are in one of the operators
    `copying` to the host, which reads no single value, and the host is in no operator for `DISPATCH_US` or more before
    it launches again, at one of the times `launched`."""
    result = np.zeros(len(waits), dtype=bool)
    names = np.asarray(events.spans.name, dtype=np.int64)
    copies = np.array([text in _COPYING for text in events.texts], dtype=bool)
    copying = copying[copies[names[copying]]]
    chosen = np.flatnonzero(waits & np.isin(host.op_of_call, copying))
    launched = np.sort(launched[np.isfinite(launched)])
    start = np.asarray(events.calls.end)[chosen]
    following = np.searchsorted(launched, start)
    known = following < len(launched)
    chosen, start, end = chosen[known], start[known], launched[following[known]]
    outside = outside_operators(events, host, times.union(start, end))
    if len(outside[0]):
        result[chosen] = times.overlap_of_each(start, end, outside) >= DISPATCH_US
    return result


_COPYING = ("aten::copy_", "aten::to", "aten::_to_copy")
"""Operators that copy tensors, and read no single value as `aten::item` does."""
