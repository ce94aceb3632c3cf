"""What the host did during given times, as while a device was idle: in which operator or call it was longest.

>>> longest_op(events, host, causes.host)
('aten::copy_', 9000.0)
"""

import numpy as np

from amp_core.traces import intervals as times
from amp_core.traces.events import OP, TraceEvents
from amp_core.traces.link import EVALUATE, Host
from amp_core.traces.operators import COMPILED_CODE, is_compiled_code

_CHUNK = 2**16  # of the spans at a time, which take hundreds of megabytes in a trace of a gigabyte


def _of_profiler(events: TraceEvents) -> times.Intervals:
    """When the profiler does work of its own, as with its buffers."""
    return times.union(np.asarray(events.profiling.start), np.asarray(events.profiling.end))


def of_program(events: TraceEvents, spans: times.Intervals) -> times.Intervals:
    """The part of `spans` in which the profiler does no work of its own: operators and calls around that work are not
    to blame for it."""
    return times.without(spans, _of_profiler(events)) if len(events.profiling) else spans


def profiling_us(events: TraceEvents, spans: times.Intervals) -> float:
    """How much of `spans` the profiler's own work takes, microseconds."""
    return times.overlap(spans, _of_profiler(events))


def longest_op(events: TraceEvents, host: Host, spans: times.Intervals) -> tuple[str | None, float]:
    """The outermost operator in which the host spent the longest of `spans`, without the profiler's own work, and how
    long, in microseconds; the calls of compiled code are one."""
    spans = of_program(events, spans)
    if not len(events.spans) or not len(spans[0]):
        return None, 0.0
    us = np.zeros(len(events.texts))
    waiting = np.array([events.accelerator == "npu" and text in READING for text in events.texts], dtype=bool)
    columns = (events.spans.kind, events.spans.name, events.spans.start, events.spans.end)
    for low in range(0, len(events.spans), _CHUNK):
        kind, name, start, end = (np.asarray(column[low : low + _CHUNK]) for column in columns)
        chosen = (kind == OP) & (host.parent[low : low + _CHUNK] < 0) & ~waiting[name]
        us += np.bincount(name[chosen], times.overlap_of_each(start[chosen], end[chosen], spans), minlength=len(us))
    longest = int(us.argmax())
    compiled = [number for number in np.flatnonzero(us).tolist() if is_compiled_code(events.texts[number])]
    compiled_us = float(us[compiled].sum())
    if compiled_us > us[longest] and us[compiled].max() < MIN_OF_COMPILED_FRAC * compiled_us:
        return COMPILED_CODE, compiled_us
    return (events.texts[longest].removeprefix(EVALUATE), float(us[longest])) if us[longest] > 0 else (None, 0.0)


READING = ("aten::item", "aten::_local_scalar_dense", "aten::is_nonzero")
"""Operators that only wait for a value: no reason why an NPU idles, whose work a thread of its own launches."""
MIN_OF_COMPILED_FRAC = 0.9
"""Share of the time in compiled code from which one call of it, as that of forward, is named alone."""


def innermost_op(events: TraceEvents, spans: times.Intervals, enough_us: float) -> tuple[str | None, float]:
    """The innermost operator of which one call takes at least `enough_us` of `spans`, and how long, in microseconds."""
    spans = of_program(events, spans)
    if not len(events.spans) or not len(spans[0]):
        return None, 0.0
    start, end = np.asarray(events.spans.start), np.asarray(events.spans.end)
    us = times.overlap_of_each(start, end, spans)
    long = np.flatnonzero((np.asarray(events.spans.kind) == OP) & (us >= enough_us))
    if not len(long):
        return None, 0.0
    innermost = long[(end - start)[long].argmin()]
    return events.texts[events.spans.name[innermost]].removeprefix(EVALUATE), float(us[innermost])


def longest_call(events: TraceEvents, spans: times.Intervals) -> tuple[str | None, float]:
    """The calls of one name into the device's runtime in which the host spent the longest of `spans`, waiting or not,
    and how long, in microseconds."""
    spans = of_program(events, spans)
    if not len(events.calls) or not len(spans[0]):
        return None, 0.0
    start, end, name = (np.asarray(column) for column in (events.calls.start, events.calls.end, events.calls.name))
    us = np.bincount(name, times.overlap_of_each(start, end, spans), minlength=len(events.texts))
    chosen = name == us.argmax()
    longest_us = times.overlap(times.union(start[chosen], end[chosen]), spans)
    return (events.texts[int(us.argmax())], longest_us) if longest_us > 0 else (None, 0.0)


def outside_operators(events: TraceEvents, host: Host, spans: times.Intervals) -> times.Intervals:
    """The part of `spans` in which the host is in no operator and no call; none of it if no operator was recorded."""
    spans = of_program(events, spans)
    if OP not in events.spans.kind or not len(spans[0]):
        return times.NONE
    outermost = (np.asarray(events.spans.kind) == OP) & (host.parent < 0)
    # One after the other: both together take eighty megabytes in a trace of a gigabyte.
    in_ops = times.union(np.asarray(events.spans.start)[outermost], np.asarray(events.spans.end)[outermost])
    outside = times.without(spans, in_ops)
    del in_ops
    return times.without(outside, times.union(np.asarray(events.calls.start), np.asarray(events.calls.end)))


NO_OPERATOR = "no operator"
"""What is said where the host is in none."""
