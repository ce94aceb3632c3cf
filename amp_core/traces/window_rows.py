"""The rows of `windows` from a trace: how long a device was busy, idle, waiting or communicating."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from amp_core.traces import intervals as times
from amp_core.traces.collect import LONG_CALL_US
from amp_core.traces.device_spans import DeviceSpans, LinkedTrace, device_spans, linked_trace, longest_in
from amp_core.traces.events import TraceEvents
from amp_core.traces.gpu_work import LinkedWork
from amp_core.traces.host_functions import longest_function
from amp_core.traces.host_spans import of_program, profiling_us
from amp_core.traces.idle_columns import idle_columns
from amp_core.traces.kernel_rows import Rows, Window, device_name
from amp_core.traces.link import Host, Ints
from amp_core.traces.loading import first_batch
from amp_core.traces.own_ranges import range_of

MAX_LAUNCHES_BETWEEN, MAX_LAUNCHES_WITHOUT_STEPS = 20, 8
"""Launches between two synchronizations up to which a graph of them would hold too few. Without step markers one
synchronization may be that of a whole step."""


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
    origin_us: float = 0.0,
) -> Rows:
    """Rows of `windows`, one per window and device; `amp_core.schema` describes the columns.

    `kernels` are the rows of `kernels` of the same trace. `device_names` is by device number, -1 for the CPU.
    `amd` as in `kernel_rows`. `origin_us`: time 0 of the events on the machine's clock.
    """
    trace = linked_trace(events, host, linked, kernels, amd=amd)
    rows: list[dict[str, Any]] = []
    for number, window in enumerate(windows):
        inside = window_index == number
        # An idle device runs no stream that another one of it could wait for, and a collective waits within its kernel.
        alone = not trace.held_up and len(np.unique(linked.device[inside])) == 1
        for device in np.unique(linked.device[inside]).tolist():
            name, selected = device_name(device, accelerator), inside & (linked.device == device)
            spans = device_spans(trace, window, selected, on_cpu=device < 0)
            columns = {
                "step": window.first,
                "steps": window.steps,
                "device": name,
                "device_name": device_names.get(device),
                "began_us": _began_us(events, window, origin_us),
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
                    columns |= idle_columns(trace, selected, spans, lead, first_loads, elsewhere, few, alone=alone)
            rows.append(columns)
    # Rounded to nanoseconds, the resolution of traces: differences of equal times are 0.
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: [row.get(name) for row in rows] for name in names}
    return {name: [round(v, 3) if isinstance(v, float) else v for v in values] for name, values in columns.items()}


def _began_us(events: TraceEvents, window: Window, origin_us: float) -> float | None:
    """When the host began the window on the machine's clock; None if nothing of the host was recorded."""
    starts = (np.asarray(recorded.start) for recorded in (events.spans, events.calls))
    began = min(start.min(initial=np.inf) for start in starts) if window.first is None else window.start
    return origin_us + float(began) if np.isfinite(began) else None


def _busy_columns(
    trace: LinkedTrace, window: Window, selected: npt.NDArray[np.bool_], spans: DeviceSpans, device: str
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


def _between_collectives(trace: LinkedTrace, selected: npt.NDArray[np.bool_], spans: DeviceSpans) -> float:
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


def _sync_columns(
    trace: LinkedTrace, window: Window, selected: npt.NDArray[np.bool_], spans: DeviceSpans
) -> dict[str, Any]:
    """How long and how often the host waited for the device."""
    waited = trace.waits & (trace.call_start >= window.start) & (trace.call_start < window.end)
    low, high, last = window.start, window.end, -np.inf
    if window.first is None:  # the profiler itself waits before the first launch and after the last work
        inside = selected & np.isfinite(trace.linked.launched_us) & (trace.linked.start_us >= spans.low)
        launched = trace.linked.launched_us[inside]
        low, high, last = launched.min(initial=np.inf), min(high, spans.high), launched.max(initial=-np.inf)
        waited &= (trace.call_end > low) & (trace.call_start < high)
    # Between launches the host may be in no operator, and needs that time too.
    held = trace.waits | (trace.call_end - trace.call_start >= LONG_CALL_US)
    held_us = times.total(times.clip(times.union(trace.call_start[held], trace.call_end[held]), low, max(low, last)))
    launching_us = max(0.0, last - low - held_us)
    high = min(high, trace.events.unrecorded_from_us)  # what it launches from then on is no work of this window
    us = np.where(waited, trace.call_end - trace.call_start, 0.0)
    inner = waited & ~trace.repeated & _between_launches(trace, window, selected)
    return {
        "sync_us": float(us.sum()),
        "syncs": int((waited & ~trace.repeated).sum()),
        "last_syncs": float((waited & ~trace.repeated & (trace.call_start > _last_launch(trace))).sum()),
        "host_us": max(launching_us, times.total(times.clip(trace.working, low, high))) if low < high else 0.0,
        "inner_syncs": float(inner.sum()),
        "sync_op": longest_in(trace, us)[0],
        "inner_sync_op": longest_in(trace, np.where(inner, us, 0.0))[0],
    }


def _between_launches(trace: LinkedTrace, window: Window, selected: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Which calls begin between the first launch and the last one of a step: of kernels, since a value that is read
    at the end of a step launches a copy. What waits before or after, as a timer of steps or the profiler that stops,
    is in the way of no graph of the step."""
    launched = trace.linked.launched_us[selected & ~trace.copies]
    launched = np.sort(launched[np.isfinite(launched)])
    steps = [(start, end) for start, end, _ in trace.host.steps if end > window.start and start < window.end]
    result = np.zeros(len(trace.call_start), dtype=bool)
    for start, end in [(-np.inf, np.inf)] if window.first is None else steps:
        first, last = np.searchsorted(launched, (start, end))
        if first < last:
            result |= (trace.call_start > launched[first]) & (trace.call_start < launched[last - 1])
    return result


def _last_launch(trace: LinkedTrace) -> float:
    """When the trace launches the last of its work, on any device; infinity where no launch is known."""
    launched = trace.linked.launched_us
    return float(launched[np.isfinite(launched)].max(initial=-np.inf)) if trace.launches_known else np.inf


def _before_first_work(
    trace: LinkedTrace, window: Window, spans: DeviceSpans
) -> tuple[times.Intervals, times.Intervals]:
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
