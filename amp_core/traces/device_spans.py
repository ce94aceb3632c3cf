"""What a trace tells of its devices' work, shared by all windows, and when a device does what within one window.

>>> trace = linked_trace(events, host, linked, kernels, amd=False)
>>> spans = device_spans(trace, window, selected, on_cpu=False)
>>> times.total(spans.idle)
410.0
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from amp_core.hardware.kernel_names import COPIES, classify_kernel
from amp_core.traces import intervals as times
from amp_core.traces.collect import LONG_CALL_US
from amp_core.traces.events import OP, TraceEvents
from amp_core.traces.gpu_work import LinkedWork
from amp_core.traces.host_spans import of_program
from amp_core.traces.kernel_rows import Rows, Window
from amp_core.traces.link import DATA, OPTIMIZER, WATCH, Host, Ints
from amp_core.traces.loading import marked_time
from amp_core.traces.operators import operator_category
from amp_core.traces.products import product_numbers
from amp_core.traces.waits import waiting_calls, waits_after_copies

HELD_UP_BY = re.compile(r"WaitValue|HostFunc|AddCallback")
"""Names of calls by which launched work waits for something other than the work before it on its stream."""
_GRAPH = re.compile(r"Graph")


@dataclass(frozen=True)
class LinkedTrace:
    """What all windows of a trace share. Arrays of numbers are by launched work, those of calls by call."""

    events: TraceEvents
    host: Host
    linked: LinkedWork
    communication: npt.NDArray[np.bool_]
    copies: npt.NDArray[np.bool_]
    products: Ints
    cast_us: Mapping[tuple[Any, Any], float]
    """By step and device."""
    data: times.Intervals
    optimizer: times.Intervals
    watch: times.Intervals
    call_start: times.Floats
    call_end: times.Floats
    working: times.Intervals
    """When the host is in operators by itself: without waits for the device, without long calls, in which it may wait
    for room in the queue of launches, and without the end of an operator that outlasts its own long work."""
    waits: npt.NDArray[np.bool_]
    repeated: npt.NDArray[np.bool_]
    """Waits that come right behind a copy that waited already."""
    held_up: bool
    """Whether work of the device may wait for something that the trace lacks."""
    launches_known: bool


def linked_trace(events: TraceEvents, host: Host, linked: LinkedWork, kernels: Rows, *, amd: bool) -> LinkedTrace:
    """What the windows share. `kernels` are the rows of `kernels` of the same trace; `amd` as in `kernel_rows`."""
    on_cpu = not len(events.work)
    communication = np.array([_is_communication(name, on_cpu=on_cpu) for name in events.texts], dtype=bool)
    copies = np.array([not on_cpu and classify_kernel(name).category in COPIES for name in events.texts], dtype=bool)
    cast_us: dict[tuple[Any, Any], float] = {}
    for step, on, category, us in zip(*(kernels[c] for c in ("step", "device", "category", "total_us")), strict=True):
        if category == "cast":
            cast_us[step, on] = cast_us.get((step, on), 0.0) + us
    waits = waiting_calls(events) & host.launching
    repeated = waits_after_copies(events, host, waits, linked.blocking_calls)
    waits[linked.blocking_calls] = True
    # A graph whose work the profiler did not record may run in any gap.
    held_up = _is_called(events, HELD_UP_BY) or (not linked.in_graph.any() and _is_called(events, _GRAPH))
    return LinkedTrace(
        events=events,
        host=host,
        linked=linked,
        communication=communication[linked.name],
        copies=copies[linked.name],
        products=product_numbers(events, host, linked, amd=amd),
        cast_us=cast_us,
        data=of_program(events, marked_time(host, DATA)),
        optimizer=marked_time(host, OPTIMIZER),
        watch=marked_time(host, WATCH),
        call_start=np.asarray(events.calls.start),
        call_end=np.asarray(events.calls.end),
        working=times.without(_working(events, host, waits), _outlasted_in(events, host, linked)),
        waits=waits,
        repeated=repeated,
        held_up=held_up,
        launches_known=bool((linked.launched_us < linked.start_us).any()),
    )


def _working(events: TraceEvents, host: Host, waits: npt.NDArray[np.bool_]) -> times.Intervals:
    chosen = np.flatnonzero((np.asarray(events.spans.kind) == OP) & (host.parent < 0))
    in_operators = times.union(np.asarray(events.spans.start)[chosen], np.asarray(events.spans.end)[chosen])
    start, end = np.asarray(events.calls.start), np.asarray(events.calls.end)
    held = waits | (end - start >= LONG_CALL_US)
    return times.without(in_operators, times.union(start[held], end[held]))


def _outlasted_in(events: TraceEvents, host: Host, linked: LinkedWork) -> times.Intervals:
    """When long work runs that the operator which launches it outlasts, without a call or an operator in between: the
    operator waits for it, though nothing was recorded that does."""
    low, high = np.maximum(linked.returned_us, linked.start_us), linked.end_us
    found = np.flatnonzero((linked.op >= 0) & (linked.device >= 0) & (high - low >= LONG_CALL_US))
    found = found[high[found] <= np.asarray(events.spans.end)[linked.op[found]]]
    # The last that each operator calls, by itself or in another operator.
    last = np.full(len(events.spans), -np.inf)
    for of, start in ((host.parent, events.spans.start), (host.op_of_call, events.calls.start)):
        inside = of >= 0
        np.maximum.at(last, of[inside], np.asarray(start)[inside])
    found = found[last[linked.op[found]] <= linked.launched_us[found]]
    return times.union(low[found], high[found])


@dataclass(frozen=True)
class DeviceSpans:
    """When a device does what, within one window."""

    low: float
    high: float
    busy: times.Intervals
    training: times.Intervals
    """The part of it that is not recording."""
    idle: times.Intervals
    data: times.Intervals
    """When the host loads data."""
    communication: times.Intervals
    exposed: times.Intervals
    """The part of it with nothing else running."""


def device_spans(trace: LinkedTrace, window: Window, selected: npt.NDArray[np.bool_], *, on_cpu: bool) -> DeviceSpans:
    """The times of the device whose work is `selected`, within the window."""
    linked, low, high = trace.linked, window.device_start, window.device_end

    def when(chosen: npt.NDArray[np.bool_]) -> times.Intervals:
        return times.clip(times.union(linked.start_us[chosen], linked.end_us[chosen]), low, high)

    watching = linked.phase == WATCH
    busy, training = when(selected), when(selected & ~watching)
    if on_cpu:  # hooks run inside operators
        training = times.intersection(training, times.gaps(trace.watch, low, high))
        own_ops = times.union(linked.start_us[selected & watching], linked.end_us[selected & watching])
        busy = times.clip(times.merged(training, own_ops), low, high)
    communication = when(selected & trace.communication)
    return DeviceSpans(
        low=low,
        high=high,
        busy=busy,
        training=training,
        idle=times.gaps(busy, low, high),
        data=times.clip(trace.data, low, high),
        communication=communication,
        exposed=times.without(communication, when(selected & ~trace.communication)),
    )


def _is_called(events: TraceEvents, pattern: "re.Pattern[str]") -> bool:
    """Whether the trace has a call whose name contains the pattern."""
    names = np.unique(np.asarray(events.calls.name, dtype=np.int64))
    return any(pattern.search(events.texts[name]) is not None for name in names.tolist())


def _is_communication(name: str, on_cpu: bool) -> bool:
    return (operator_category(name) if on_cpu else classify_kernel(name).category) == "communication"


def longest_in(trace: LinkedTrace, us_of_call: times.Floats) -> tuple[str | None, float]:
    """The operator whose calls have the most of these times, None outside of operators, and how much."""
    us: dict[str, float] = {}
    for call in np.flatnonzero(us_of_call).tolist():
        op = int(trace.host.op_of_call[call])
        name = trace.events.texts[trace.events.spans.name[op]] if op >= 0 else ""
        us[name] = us.get(name, 0.0) + float(us_of_call[call])
    longest = max(us, key=lambda name: us[name], default="")
    return longest or None, us.get(longest, 0.0)


def is_in(trace: LinkedTrace, name: str | None, calls: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Which of these calls are in an operator of that name; None is in none."""
    op, found = trace.host.op_of_call, calls.copy()
    for call in np.flatnonzero(calls).tolist():
        found[call] = (trace.events.texts[trace.events.spans.name[op[call]]] if op[call] >= 0 else None) == name
    return found
