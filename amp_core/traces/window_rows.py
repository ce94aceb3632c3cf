"""The rows of `windows` from a trace: how long a device was busy, idle, waiting or communicating."""

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from amp_core.hardware.kernel_names import COPIES, classify_kernel
from amp_core.traces import intervals as times
from amp_core.traces.collect import LONG_CALL_US
from amp_core.traces.events import OP, TraceEvents
from amp_core.traces.gpu_work import LinkedWork
from amp_core.traces.idle_causes import (
    DISPATCH_US,
    IdleCauses,
    idle_causes,
    long_launches,
    longest_calls,
    longest_function,
    longest_op,
    of_program,
    outside_operators,
    profiling_us,
)
from amp_core.traces.kernel_rows import Rows, Window, device_name
from amp_core.traces.link import DATA, EVALUATE, OPTIMIZER, WATCH, Host, Ints
from amp_core.traces.operators import operator_category
from amp_core.traces.own_ranges import range_of
from amp_core.traces.passes import filling_passes
from amp_core.traces.products import product_numbers
from amp_core.traces.replay import Replay, reach_frac

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
HELD_UP_BY = re.compile(r"WaitValue|HostFunc|AddCallback")
"""Names of calls by which launched work waits for something other than the work before it on its stream."""
_GRAPH = re.compile(r"Graph")
MAX_LAUNCHES_BETWEEN, MAX_LAUNCHES_WITHOUT_STEPS = 20, 8
"""Launches between two synchronizations up to which a graph of them would hold too few. Without step markers one
synchronization may be that of a whole step."""
MIN_LOADING_FRAC = 0.5
"""Share of exposed communication from which launches in which the host stays meanwhile are its cause."""


def window_rows(
    events: TraceEvents,
    host: Host,
    linked: LinkedWork,
    windows: Sequence[Window],
    window_index: Ints,
    kernels: Rows,
    device_names: Mapping[int, str],
    accelerator: str,
    amd: bool,
) -> Rows:
    """Rows of `windows`, one per window and device; `amp_core.schema` describes the columns.

    `kernels` are the rows of `kernels` of the same trace. `device_names` is by device number, -1 for the CPU.
    `amd` as in `kernel_rows`.
    """
    trace = _trace(events, host, linked, kernels, amd=amd)
    rows: list[dict[str, Any]] = []
    for number, window in enumerate(windows):
        inside = window_index == number
        # An idle device runs no stream that another one of it could wait for, and a collective waits within its kernel.
        alone = not trace.held_up and len(np.unique(linked.device[inside])) == 1
        for device in np.unique(linked.device[inside]).tolist():
            name, selected = device_name(device, accelerator), inside & (linked.device == device)
            spans = _spans(trace, window, selected, on_cpu=device < 0)
            columns = {
                "step": window.first,
                "steps": window.steps,
                "device": name,
                "device_name": device_names.get(device),
                **_busy_columns(trace, window, selected, spans, name),
            }
            lead, first_loads = _before_first_work(trace, window, spans)
            columns |= {
                "lead_us": times.total(lead) + times.total(first_loads),
                "lead_data_us": times.total(first_loads) if len(trace.data[0]) else None,
            }
            if device < 0:
                unaided = times.without(spans.idle, spans.data)
                function, function_us = longest_function(events, host, unaided)
                everything = np.array([spans.low]), np.array([spans.high])
                marked, marked_us = range_of(events, everything, spans.low, spans.high)
                columns |= {"host_function": function, "host_function_us": function_us}
                columns |= {"host_range": marked, "host_range_us": marked_us}
                columns["idle_profiling_us"] = profiling_us(events, unaided)
            else:
                columns |= _sync_columns(trace, window, selected, spans)
                if trace.launches_known:
                    few = MAX_LAUNCHES_WITHOUT_STEPS if window.first is None else MAX_LAUNCHES_BETWEEN
                    others = inside & (linked.device != device)
                    elsewhere = times.union(linked.start_us[others], linked.end_us[others])
                    columns |= _idle_columns(trace, selected, spans, lead, first_loads, elsewhere, few, alone=alone)
            rows.append(columns)
    # Rounded to nanoseconds, the resolution of traces: differences of equal times are 0.
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: [row.get(name) for row in rows] for name in names}
    return {name: [round(v, 3) if isinstance(v, float) else v for v in values] for name, values in columns.items()}


@dataclass(frozen=True)
class _Trace:
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
    """When the host is in operators by itself: without waits for the device, and without long calls, in which it may
    wait for room in the queue of launches."""
    waits: npt.NDArray[np.bool_]
    repeated: npt.NDArray[np.bool_]
    """Waits that come right behind a copy that waited already."""
    held_up: bool
    """Whether work of the device may wait for something that the trace lacks."""
    launches_known: bool


def _trace(events: TraceEvents, host: Host, linked: LinkedWork, kernels: Rows, *, amd: bool) -> _Trace:
    on_cpu = not len(events.work)
    communication = np.array([_is_communication(name, on_cpu=on_cpu) for name in events.texts], dtype=bool)
    copies = np.array([not on_cpu and classify_kernel(name).category in COPIES for name in events.texts], dtype=bool)
    cast_us: dict[tuple[Any, Any], float] = {}
    for step, on, category, us in zip(*(kernels[c] for c in ("step", "device", "category", "total_us")), strict=True):
        if category == "cast":
            cast_us[step, on] = cast_us.get((step, on), 0.0) + us
    waits = waiting_calls(events)
    repeated = _waits_after_copies(events, host, waits, linked.blocking_calls)
    waits[linked.blocking_calls] = True
    # A graph whose work the profiler did not record may run in any gap.
    held_up = _is_called(events, HELD_UP_BY) or (not linked.in_graph.any() and _is_called(events, _GRAPH))
    return _Trace(
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
        working=_working(events, host, waits),
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


@dataclass(frozen=True)
class _Spans:
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


def _spans(trace: _Trace, window: Window, selected: npt.NDArray[np.bool_], *, on_cpu: bool) -> _Spans:
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
    return _Spans(
        low=low,
        high=high,
        busy=busy,
        training=training,
        idle=times.gaps(busy, low, high),
        data=times.clip(trace.data, low, high),
        communication=communication,
        exposed=times.without(communication, when(selected & ~trace.communication)),
    )


def _busy_columns(
    trace: _Trace, window: Window, selected: npt.NDArray[np.bool_], spans: _Spans, device: str
) -> dict[str, Any]:
    """How long the device was busy, and with what."""
    linked, on_cpu = trace.linked, device.startswith("cpu")
    watch = times.clip(trace.watch, spans.low, spans.high)
    watch_us = times.total(spans.busy) - times.total(spans.training) + times.overlap(spans.idle, watch)
    columns: dict[str, Any] = {
        "wall_us": spans.high - spans.low,
        "busy_us": times.total(spans.busy),
        "idle_us": times.total(spans.idle),
        "longest_idle_us": times.longest(times.without(spans.idle, spans.data)),
        "data_us": times.total(spans.data) if len(trace.data[0]) else None,
        "idle_data_us": times.overlap(spans.idle, spans.data) if len(trace.data[0]) else None,
        "optimizer_us": None,
        # On a CPU the time of nested operators is part of the outer ones.
        "watch_us": times.total(watch) if on_cpu else watch_us,
        "kernel_us": float(linked.own_us[selected].sum()),
        "launches": None if on_cpu else int(selected.sum()),
        "cast_us": trace.cast_us.get((window.first, device), 0.0),
        "communication_us": times.total(spans.communication),
        "communication_alone_us": times.total(spans.exposed),
        "idle_between_collectives_us": 0.0 if on_cpu else _between_collectives(trace, selected, spans),
        "products": len(np.unique(trace.products[selected & (trace.products >= 0)])),
    }
    if on_cpu and len(trace.optimizer[0]):
        columns["optimizer_us"] = times.total(times.clip(trace.optimizer, spans.low, spans.high))
    if not on_cpu:
        copying = times.union(*(at[selected & trace.copies] for at in (linked.start_us, linked.end_us)))
        computing = selected & ~trace.communication & ~trace.copies
        computed = times.union(linked.start_us[computing], linked.end_us[computing])
        copies_alone = times.without(copying, computed)
        columns["copies_alone_us"] = times.total(times.clip(copies_alone, spans.low, spans.high))
    return columns


MAX_BETWEEN_COLLECTIVES = 3
"""Kernels between two collectives that belong to a loop over these, as the division of a gradient."""


def _between_collectives(trace: _Trace, selected: npt.NDArray[np.bool_], spans: _Spans) -> float:
    """How long the device is idle between two collectives with hardly a kernel between them, microseconds."""
    order = np.argsort(trace.linked.start_us[selected], kind="stable")
    start, communicates = trace.linked.start_us[selected][order], trace.communication[selected][order]
    places = np.flatnonzero(communicates)
    low, high = spans.idle
    following = np.searchsorted(start, high)
    at = np.searchsorted(places, following)
    inside = (at > 0) & (at < len(places))
    others = places[at[inside]] - places[at[inside] - 1] - 1
    return float((high - low)[inside][others <= MAX_BETWEEN_COLLECTIVES].sum())


def _sync_columns(trace: _Trace, window: Window, selected: npt.NDArray[np.bool_], spans: _Spans) -> dict[str, Any]:
    """How long and how often the host waited for the device."""
    waited = trace.waits & (trace.call_start >= window.start) & (trace.call_start < window.end)
    if window.first is None:  # the profiler itself waits before the first launch and after the last work
        launched = trace.linked.launched_us[selected]
        first = launched[np.isfinite(launched)].min(initial=np.inf)
        waited &= (trace.call_end > first) & (trace.call_start < spans.high)
    us = np.where(waited, trace.call_end - trace.call_start, 0.0)
    return {
        "sync_us": float(us.sum()),
        "syncs": int((waited & ~trace.repeated).sum()),
        "host_us": times.total(times.clip(trace.working, window.start, window.end)),
        "sync_op": _longest_in(trace, us)[0],
    }


def _before_first_work(trace: _Trace, window: Window, spans: _Spans) -> tuple[times.Intervals, times.Intervals]:
    """When the host was in the window already and the device not yet: without loading data, and loading it."""
    # In a loop the work that outlasts the host's last step would run during the start of the next one.
    low, ready = spans.low, window.ready
    if np.isfinite(window.end):
        ready = min(low, window.ready + max(0.0, spans.high - window.end))
    lead = times.without((np.array([ready]), np.array([low])), trace.data) if ready < low else times.NONE
    lead = of_program(trace.events, lead)
    if window.first is None and first_batch(trace.host, low) is not None:
        return lead, times.NONE
    return lead, times.clip(trace.data, window.earlier if window.first is None else ready, low)


def _idle_columns(
    trace: _Trace,
    selected: npt.NDArray[np.bool_],
    spans: _Spans,
    lead: times.Intervals,
    first_loads: times.Intervals,
    elsewhere: times.Intervals,
    few: int,
    *,
    alone: bool,
) -> dict[str, Any]:
    """Why the device was idle, and what the host did then. `elsewhere`: when other devices of the process work, which
    the step waits for. `alone`: nothing in the trace holds its work up."""
    events, host, linked = trace.events, trace.host, trace.linked
    long = trace.waits | (trace.call_end - trace.call_start >= LONG_CALL_US)
    replay = Replay.of(
        linked.start_us[selected],
        linked.end_us[selected],
        linked.launched_us[selected],
        linked.returned_us[selected],
        linked.stream[selected],
        (trace.call_start[long], trace.call_end[long]),
    )
    explain = functools.partial(
        idle_causes,
        starts=linked.start_us[selected],
        launched=linked.launched_us[selected],
        returned=linked.returned_us[selected],
        in_graph=linked.in_graph[selected],
        wait_starts=trace.call_start[trace.waits],
        wait_ends=trace.call_end[trace.waits],
        few=few,
        replay=replay,
    )
    own_idle = times.without(spans.idle, spans.data)
    idle = times.without(own_idle, elsewhere)
    causes, filling_us = explain(idle), 0.0
    filling = times.NONE if host.steps else filling_passes(linked, selected, causes.late)
    if len(filling[0]):
        kept = times.overlap_of_each(*idle, times.intersection(causes.late, filling)) <= 0
        filling_us = times.total(idle) - times.total((idle[0][kept], idle[1][kept]))
        causes = explain((idle[0][kept], idle[1][kept]))
    late, unfed = times.merged(causes.late, lead), times.intersection(spans.idle, spans.data)
    loading = _loading_alone(trace, selected, spans)
    held = times.merged(late, loading)
    in_calls = longest_calls(events, trace.waits, held)
    calling = in_calls.spans if in_calls else times.NONE
    rest = times.without(late, calling)
    longest = {
        "host_op": longest_op(events, host, late),
        "host_function": longest_function(events, host, late),
        "data_function": longest_function(events, host, times.merged(unfed, first_loads)),
        "host_call_op": _op_of_calls(trace, calling),
        "host_rest_op": longest_op(events, host, rest),
        "host_range": range_of(events, late, spans.low, spans.high),
        "longer_function": longest_function(events, host, causes.host),
    }
    longest["host_kernel"] = _longest_before(trace, selected, causes)
    after_us, held_us = np.zeros((2, len(trace.waits)))
    after_us[trace.waits] = causes.after_wait_us
    if len(causes.held[0]):
        held_us = np.where(trace.waits, times.overlap_of_each(trace.call_start, trace.call_end, causes.held), 0.0)
    longest |= {"idle_sync_op": _longest_in(trace, after_us), "idle_wait_op": _longest_in(trace, held_us)}
    is_idle = times.total(spans.idle) >= MIN_IDLE_FRAC * (spans.high - spans.low)
    columns: dict[str, Any] = {}
    for column, (name, us) in longest.items():
        columns |= {column: name, f"{column}_us": us}
    return columns | {
        "idle_sync_us": causes.sync_us,
        "idle_syncs": int(((after_us > 0) & ~trace.repeated).sum()),
        "idle_profiling_us": profiling_us(events, held),
        "idle_wait_us": causes.wait_us,
        "idle_wait_lost_us": causes.lost_us,
        "idle_latency_us": causes.latency_us,
        "idle_filling_us": filling_us,
        "idle_late_start_us": causes.wait_us - causes.graph_us if alone else 0.0,
        "idle_graph_us": causes.graph_us,
        "idle_dispatch_us": causes.dispatch_us,
        "idle_elsewhere_us": times.overlap(own_idle, elsewhere),
        "idle_copy_us": _beside_copies_us(trace, selected, spans, late),
        "longer_gap_steps": _steps_with(host, causes.host, spans),
        "longer_optimizer_us": times.overlap(causes.host, trace.optimizer),
        "lead_outside_us": times.total(outside_operators(events, host, lead)),
        "idle_between_waits_us": causes.between_waits[0],
        "launches_between_waits": causes.between_waits[1],
        "host_call": in_calls.names if in_calls else None,
        "host_call_kind": in_calls.kind if in_calls else None,
        "host_call_us": in_calls.us if in_calls else 0.0,
        "host_outside_us": times.total(outside_operators(events, host, rest)),
        "alone_loading_us": times.total(loading),
        "reach_frac": reach_frac(replay, linked.own_us[selected]) if is_idle else None,
    }


def _beside_copies_us(trace: _Trace, selected: npt.NDArray[np.bool_], spans: _Spans, late: times.Intervals) -> float:
    """How much of the time in which the host launches too late, in gaps up to `DISPATCH_US`, is right before a copy
    from memory that is not pinned, or right after it: the host is in the call that copies, or was until then."""
    pageable = np.array([_PAGEABLE.search(text) is not None for text in trace.events.texts], dtype=bool)
    start, end = trace.linked.start_us[selected], trace.linked.end_us[selected]
    copies = (trace.copies & pageable[trace.linked.name])[selected]
    low, high = spans.idle
    beside = np.isin(high, start[copies]) | np.isin(low, end[copies])
    found = low[beside], high[beside]
    before = (np.array([-np.inf]), np.array([spans.low])) if copies[start.argmin()] else times.NONE
    beside_copies = times.intersection(late, times.merged(before, found))
    us = beside_copies[1] - beside_copies[0]
    return float(us[us < DISPATCH_US].sum())


_PAGEABLE = re.compile(r"Pageable -> Device")
"""In the names of copies that the host begins, from memory that is not pinned."""


def _steps_with(host: Host, gaps: times.Intervals, spans: _Spans) -> int | None:
    """In how many steps of the host a gap begins; None without marks of steps."""
    starts = np.array([start for start, _, _ in host.steps])
    if not len(starts):
        return None
    began = gaps[0][(gaps[0] >= spans.low) & (gaps[0] < spans.high)]
    return len(np.unique(np.searchsorted(starts, began, side="right")))


MIN_IDLE_FRAC = 0.1
"""Share of a window that its device is idle from which its host may be what shorter work waits for."""


def _op_of_calls(trace: _Trace, calling: times.Intervals) -> tuple[str | None, float]:
    """The outermost operator that makes the long calls during `calling` for the longest, on the thread of each, and how
    long; where they are not calls of the runtime, as modules that are loaded, the operator at that time."""
    events, host = trace.events, trace.host
    if not len(calling[0]):
        return None, 0.0
    us = times.overlap_of_each(trace.call_start, trace.call_end, calling) if len(trace.call_start) else np.zeros(0)
    us = np.where(trace.waits | (trace.call_end - trace.call_start < LONG_CALL_US), 0.0, us)
    if us.sum() < MIN_OF_CALLS_FRAC * times.total(calling):
        return longest_op(events, host, calling)
    known = np.flatnonzero((us > 0) & (host.op_of_call >= 0))
    if not len(known):
        return None, 0.0
    op = host.op_of_call[known]
    top = np.where(host.top_of_span[op] >= 0, host.top_of_span[op], op)
    of_name = np.bincount(np.asarray(events.spans.name)[top], us[known], minlength=len(events.texts))
    longest = int(of_name.argmax())
    return events.texts[longest].removeprefix(EVALUATE), min(float(of_name[longest]), times.total(calling))


MIN_OF_CALLS_FRAC = 0.5


def _longest_before(trace: _Trace, selected: npt.NDArray[np.bool_], causes: IdleCauses) -> tuple[str | None, float]:
    """The kernel before whose launches the device is idle the longest, in the longer gaps, and how long."""
    if not len(causes.host_before):
        return None, 0.0
    us = np.bincount(trace.linked.name[selected][causes.host_before], causes.host[1] - causes.host[0])
    longest = int(us.argmax())
    return trace.events.texts[longest], float(us[longest])


def _loading_alone(trace: _Trace, selected: npt.NDArray[np.bool_], spans: _Spans) -> times.Intervals:
    """When the device only communicates while its own host stays in a launch; none if that is little of it."""
    linked, launching = trace.linked, selected & ~trace.copies
    when = long_launches(*(at[launching] for at in (linked.start_us, linked.launched_us, linked.returned_us)))
    loading = times.intersection(spans.exposed, when)
    return loading if times.total(loading) >= MIN_LOADING_FRAC * times.total(spans.exposed) else times.NONE


def first_batch(host: Host, before: float) -> tuple[float, float] | None:
    """Start and end of the first load of data that is marked, if it ends by that time, and later ones are far shorter:
    the first batch of a loader, with the start of its workers, which tells nothing of the loop's batches. None for
    other traces."""
    marks = sorted(host.marks[DATA])
    if not marks or marks[0][1] > before:
        return None
    first_us = marks[0][1] - marks[0][0]
    return marks[0] if all(end - start <= MAX_LATER_FRAC * first_us for start, end in marks[1:]) else None


MAX_LATER_FRAC = 0.1
"""The first batch is far longer than those of which none takes more than this share of it."""


def waiting_calls(events: TraceEvents) -> npt.NDArray[np.bool_]:
    """Which calls into the runtime wait for the device, by their names."""
    waiting = np.array([is_wait(text) for text in events.texts], dtype=bool)
    return waiting[np.asarray(events.calls.name)] if len(events.calls) else np.zeros(0, dtype=bool)


def is_wait(name: str) -> bool:
    """Whether a call of that name into the runtime waits for the device."""
    return _VERSION.sub("", name).endswith(WAITING)


_VERSION = re.compile(r"_(?:v\d+|ptsz)$")
"""What the names of some of the driver's and the runtime's calls end with, as `cudaStreamSynchronize_v3020`."""


def most_frequent_wait(events: TraceEvents) -> str:
    """The name of the calls in which the host waits for the device most often; empty without such calls."""
    names = np.asarray(events.calls.name)[waiting_calls(events)]
    kinds, counts = np.unique(names, return_counts=True)
    return events.texts[int(kinds[counts.argmax()])] if len(kinds) and (counts == counts.max()).sum() == 1 else ""


def _waits_after_copies(
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


def _is_called(events: TraceEvents, pattern: "re.Pattern[str]") -> bool:
    """Whether the trace has a call whose name contains the pattern."""
    names = np.unique(np.asarray(events.calls.name, dtype=np.int64))
    return any(pattern.search(events.texts[name]) is not None for name in names.tolist())


def _longest_in(trace: _Trace, us_of_call: times.Floats) -> tuple[str | None, float]:
    """The operator whose calls have the most of these times, None outside of operators, and how much."""
    us: dict[str, float] = {}
    for call in np.flatnonzero(us_of_call).tolist():
        op = int(trace.host.op_of_call[call])
        name = trace.events.texts[trace.events.spans.name[op]] if op >= 0 else ""
        us[name] = us.get(name, 0.0) + float(us_of_call[call])
    longest = max(us, key=lambda name: us[name], default="")
    return longest or None, us.get(longest, 0.0)


def _is_communication(name: str, on_cpu: bool) -> bool:
    return (operator_category(name) if on_cpu else classify_kernel(name).category) == "communication"


def marked_time(host: Host, region: int) -> times.Intervals:
    """The times that marks of a phase cover."""
    spans = np.array(host.marks[region], dtype=float).reshape(-1, 2)
    return times.union(spans[:, 0], spans[:, 1])
