"""The rows of `windows` from a trace: how long a device was busy, idle, waiting or communicating."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from amp_core.hardware.kernel_names import COPIES, classify_kernel
from amp_core.traces import intervals as times
from amp_core.traces.events import TraceEvents
from amp_core.traces.gpu_work import LinkedWork
from amp_core.traces.idle_causes import (
    idle_causes,
    long_launches,
    longest_calls,
    longest_function,
    longest_op,
    outside_operators,
)
from amp_core.traces.kernel_rows import Rows, Window, device_name
from amp_core.traces.link import DATA, WATCH, Host, Ints
from amp_core.traces.operators import operator_category
from amp_core.traces.products import product_numbers

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
    rows: list[dict[str, Any]] = []
    communication = np.array(
        [_is_communication(name, on_cpu=not len(events.work)) for name in events.texts], dtype=bool
    )[linked.name]
    copied = [not len(events.work) or classify_kernel(name).category not in COPIES for name in events.texts]
    copies = ~np.array(copied, dtype=bool)[linked.name]
    casts = list(zip(*(kernels[c] for c in ("step", "device", "category", "total_us")), strict=True))
    data = marked_time(host, DATA)
    watch = marked_time(host, WATCH)
    call_start, call_end = np.asarray(events.calls.start), np.asarray(events.calls.end)
    waits = waiting_calls(events)
    repeated = _waits_after_copies(events, host, waits, linked.blocking_calls)
    waits[linked.blocking_calls] = True
    products = product_numbers(events, host, linked, amd=amd)
    held_up = _is_called(events, HELD_UP_BY)
    # A graph whose work the profiler did not record may run in any gap.
    held_up |= not linked.in_graph.any() and _is_called(events, _GRAPH)
    launches = (linked.start_us, linked.launched_us, linked.returned_us)
    launches_known = bool((linked.launched_us < linked.start_us).any())
    for number, window in enumerate(windows):
        inside = window_index == number
        # An idle device runs no stream that another one of it could wait for, and a collective waits within its kernel.
        alone = not held_up and len(np.unique(linked.device[inside])) == 1
        for device in np.unique(linked.device[inside]).tolist():
            selected = inside & (linked.device == device)
            on_cpu, name = device < 0, device_name(device, accelerator)
            # On a CPU the time of nested operators is part of the outer ones.
            starts, ends = linked.start_us[selected], linked.end_us[selected]
            low, high = window.device_start, window.device_end
            busy = times.clip(times.union(starts, ends), low, high)
            watching = linked.phase[selected] == WATCH
            training = times.clip(times.union(starts[~watching], ends[~watching]), low, high)
            if on_cpu:  # hooks run inside operators
                training = times.intersection(training, times.gaps(watch, low, high))
                own_ops = times.union(starts[watching], ends[watching])
                busy = times.clip(times.merged(training, own_ops), low, high)
            idle = times.gaps(busy, low, high)
            communicating = communication[selected]
            communication_time = times.clip(times.union(starts[communicating], ends[communicating]), low, high)
            computing = times.clip(times.union(starts[~communicating], ends[~communicating]), low, high)
            copying = copies[selected]
            copying_time = times.clip(times.union(starts[copying], ends[copying]), low, high)
            neither = ~communicating & ~copying
            kernel_time = times.clip(times.union(starts[neither], ends[neither]), low, high)
            data_inside, watch_inside = times.clip(data, low, high), times.clip(watch, low, high)
            waited = waits & (call_start >= window.start) & (call_start < window.end)
            if window.first is None:  # the profiler itself waits before the first launch and after the last work
                launched = linked.launched_us[selected]
                waited &= (call_end > launched[np.isfinite(launched)].min(initial=np.inf)) & (call_start < high)
            own = linked.own_us[selected]
            causes = None
            if not on_cpu and launches_known:
                without_data = times.without(idle, data_inside)
                causes = idle_causes(
                    without_data,
                    starts,
                    linked.launched_us[selected],
                    linked.returned_us[selected],
                    linked.in_graph[selected],
                    call_start[waits],
                    call_end[waits],
                )
            # In a loop the work that outlasts the host's last step would run during the start of the next one.
            ready = min(low, window.ready + max(0.0, high - window.end)) if np.isfinite(window.end) else window.ready
            lead = times.without((np.array([ready]), np.array([low])), data) if ready < low else times.NONE
            first_loads = times.clip(data, window.earlier if window.first is None else ready, low)
            if window.first is None and first_batch(host, low) is not None:
                first_loads = times.NONE
            late = times.merged(causes.host, lead) if causes else times.NONE
            host_op, host_op_us = longest_op(events, host, late) if causes else (None, None)
            unaided = times.without(idle, data_inside) if on_cpu else late
            function, function_us = longest_function(events, host, unaided) if causes or on_cpu else (None, None)
            unfed = times.intersection(idle, data_inside)
            unfed = times.merged(unfed, first_loads)
            data_function, data_function_us = longest_function(events, host, unfed) if causes else (None, None)
            loading = times.NONE if on_cpu else long_launches(*(at[selected & ~copies] for at in launches))
            exposed = times.without(communication_time, computing)
            loading = times.intersection(exposed, loading)
            if times.total(loading) < MIN_LOADING_FRAC * times.total(exposed):
                loading = times.NONE
            held = times.merged(times.merged(causes.late, lead), loading) if causes else times.NONE
            in_calls = longest_calls(events, waits, held)
            calling = in_calls.spans if in_calls else times.NONE
            call_op, call_op_us = longest_op(events, host, calling) if causes else (None, None)
            rest = times.without(late, calling)
            rest_op, rest_op_us = longest_op(events, host, rest) if causes else (None, None)
            rows.append(
                {
                    "step": window.first,
                    "steps": window.steps,
                    "device": name,
                    "device_name": device_names.get(device),
                    "wall_us": high - low,
                    "busy_us": times.total(busy),
                    "idle_us": times.total(idle),
                    "data_us": times.total(data_inside) if len(data[0]) else None,
                    "idle_data_us": times.overlap(idle, data_inside) if len(data[0]) else None,
                    "watch_us": (
                        times.total(watch_inside)
                        if on_cpu
                        else times.total(busy) - times.total(training) + times.overlap(idle, watch_inside)
                    ),
                    "kernel_us": float(own.sum()),
                    "launches": None if on_cpu else int(selected.sum()),
                    "cast_us": sum(
                        us for step, on, sort, us in casts if (step, on, sort) == (window.first, name, "cast")
                    ),
                    "communication_us": times.total(communication_time),
                    "communication_alone_us": times.total(exposed),
                    "idle_sync_us": causes.sync_us if causes else None,
                    "idle_wait_us": causes.wait_us if causes else None,
                    "idle_latency_us": causes.latency_us if causes else None,
                    "idle_late_start_us": (causes.wait_us - causes.graph_us if alone else 0.0) if causes else None,
                    "idle_graph_us": causes.graph_us if causes else None,
                    "idle_dispatch_us": causes.dispatch_us if causes else None,
                    "host_op": host_op,
                    "host_op_us": host_op_us,
                    "host_function": function,
                    "host_function_us": function_us,
                    "data_function": data_function,
                    "data_function_us": data_function_us,
                    "host_call": in_calls.names if in_calls else None,
                    "host_call_kind": in_calls.kind if in_calls else None,
                    "host_call_us": in_calls.us if in_calls else 0.0 if causes else None,
                    "host_call_op": call_op,
                    "host_call_op_us": call_op_us,
                    "host_rest_op": rest_op,
                    "host_rest_op_us": rest_op_us,
                    "host_outside_us": times.total(outside_operators(events, host, rest)) if causes else None,
                    "alone_loading_us": times.total(loading) if causes else None,
                    "lead_us": times.total(lead) + times.total(first_loads),
                    "lead_data_us": times.total(first_loads) if len(data[0]) else None,
                    "copies_alone_us": None
                    if on_cpu
                    else times.total(copying_time) - times.overlap(copying_time, kernel_time),
                    "sync_op": None if on_cpu else _longest_wait(events, host, waited),
                    "sync_us": None if on_cpu else float((call_end - call_start)[waited].sum()),
                    "syncs": None if on_cpu else int((waited & ~repeated).sum()),
                    "products": len(np.unique(products[selected & (products >= 0)])),
                }
            )
    # Rounded to nanoseconds, the resolution of traces: differences of equal times are 0.
    columns = {name: [row[name] for row in rows] for name in rows[0]} if rows else {}
    return {name: [round(v, 3) if isinstance(v, float) else v for v in values] for name, values in columns.items()}


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
    waiting = np.array([text.endswith(WAITING) for text in events.texts], dtype=bool)
    return waiting[np.asarray(events.calls.name)] if len(events.calls) else np.zeros(0, dtype=bool)


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


def _longest_wait(events: TraceEvents, host: Host, waited: npt.NDArray[np.bool_]) -> str | None:
    """The operator in which the host waited the longest for the device; None outside of operators."""
    us: dict[str, float] = {}
    for call in np.flatnonzero(waited).tolist():
        op = int(host.op_of_call[call])
        name = events.texts[events.spans.name[op]] if op >= 0 else ""
        us[name] = us.get(name, 0.0) + events.calls.end[call] - events.calls.start[call]
    return max(us, key=lambda name: us[name], default="") or None


def _is_communication(name: str, on_cpu: bool) -> bool:
    return (operator_category(name) if on_cpu else classify_kernel(name).category) == "communication"


def marked_time(host: Host, region: int) -> times.Intervals:
    """The times that marks of a phase cover."""
    spans = np.array(host.marks[region], dtype=float).reshape(-1, 2)
    return times.union(spans[:, 0], spans[:, 1])
