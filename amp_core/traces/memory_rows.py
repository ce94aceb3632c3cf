"""The rows of `memory` from a trace that was recorded with `profile_memory=True`.

torch's allocator records each allocation and free, with the total after it. A row is a group of these within one module
or, outside of modules, within one operator: what was held at its end, and the highest in between.
"""

from typing import Any

import numpy as np

from amp_core.traces.events import TraceEvents
from amp_core.traces.kernel_rows import Rows, device_name
from amp_core.traces.link import EVALUATE, PHASES, Host, Ints
from amp_core.traces.phases import infer_phases

MAX_MOMENTS = 2000
"""Most rows of a step; neighbours are merged beyond."""


def memory_rows(events: TraceEvents, host: Host, accelerator: str) -> Rows:
    """Rows of `memory`, for each marked step; all in step 0 without steps. Of several devices, the one with the most
    events. Empty without memory events."""
    allocations = events.allocations
    rows: Rows = {name: [] for name in _COLUMNS}
    if not len(allocations):
        return {}
    device = int(np.bincount(np.asarray(allocations.device)).argmax())
    chosen = np.flatnonzero(np.asarray(allocations.device) == device)
    call = np.asarray(allocations.call)[chosen]
    at = np.asarray(events.calls.start)[call]
    order = np.argsort(at, kind="stable")
    chosen, call, at = chosen[order], call[order], at[order]
    phase = infer_phases(host, host.region_of_call[call], at)
    name, names = _names(events, host, call)
    allocated, reserved = np.asarray(allocations.allocated)[chosen], np.asarray(allocations.reserved)[chosen]
    for start, end, step in host.steps or [(-np.inf, np.inf, 0)]:
        low, high = np.searchsorted(at, [start, end], side="left")
        if low == high:
            continue
        bounds = _stretches(name[low:high], phase[low:high]) + low
        for number, (first, last) in enumerate(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)):
            top = first + int(allocated[first:last].argmax())
            module = host.module_of_call[call[top]] >= 0
            forward = PHASES[phase[top]] == "forward"
            values: tuple[Any, ...] = (
                step,
                number,
                "module" if module and forward else "operator" if names[name[top]] else "allocation",
                names[name[top]],
                PHASES[phase[top]],
                device_name(device, accelerator),
                int(allocated[last - 1]),
                int(allocated[top]),
                int(reserved[last - 1]) if reserved[last - 1] >= 0 else None,
            )
            for column, value in zip(_COLUMNS, values, strict=True):
                rows[column].append(value)
    return rows


_COLUMNS = (
    "step",
    "number",
    "moment",
    "name",
    "phase",
    "device",
    "allocated_bytes",
    "peak_bytes",
    "reserved_bytes",
)


def add_step_memory(steps: Rows, memory: Rows) -> None:
    """Add what was held at the end of each step, and the highest so far, to the rows of `steps`."""
    if not memory or not steps:
        return
    held: dict[int, int] = dict(zip(memory["step"], memory["allocated_bytes"], strict=True))  # the last of each step
    highest: dict[int, int] = {}
    for step, peak in zip(memory["step"], memory["peak_bytes"], strict=True):
        highest[step] = max(peak, highest.get(step, 0))
    so_far = 0
    steps["memory_allocated_bytes"], steps["memory_peak_bytes"] = [], []
    for step in steps["step"]:
        so_far = max(so_far, highest.get(step, 0))
        steps["memory_allocated_bytes"].append(held.get(step))
        steps["memory_peak_bytes"].append(so_far or None)


def _names(events: TraceEvents, host: Host, call: Ints) -> tuple[Ints, list[str]]:
    """The number of the module of each allocation, or of its outermost operator, and the names."""
    names: dict[str, int] = {"": 0}
    numbers = np.zeros(len(call), np.int32)
    for n, one in enumerate(call.tolist()):
        module, op = int(host.module_of_call[one]), int(host.op_of_call[one])
        top = int(host.top_of_span[op]) if op >= 0 else -1
        span = top if top >= 0 else op
        text = host.modules[module] if module >= 0 else events.texts[events.spans.name[span]] if span >= 0 else ""
        numbers[n] = names.setdefault(text.removeprefix(EVALUATE), len(names))
    return numbers, list(names)


def _stretches(name: Ints, phase: Ints) -> Ints:
    """Where stretches of one name and phase begin, and the end; evenly fewer if there are too many."""
    change = np.flatnonzero((name[1:] != name[:-1]) | (phase[1:] != phase[:-1])) + 1
    bounds = np.concatenate([[0], change])
    if len(bounds) > MAX_MOMENTS:
        bounds = bounds[np.linspace(0, len(bounds) - 1, MAX_MOMENTS).astype(int)]
    return np.append(bounds, len(name))
