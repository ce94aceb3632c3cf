"""The rows of `steps` and `ops` from a trace."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from amp_core.formats import dtype_of, element_bytes
from amp_core.hardware.kernel_names import GEMM_CATEGORIES
from amp_core.traces import intervals as times
from amp_core.traces.device_times import DeviceClock, StepTimes
from amp_core.traces.events import OP, TraceEvents
from amp_core.traces.host_spans import profiling_us
from amp_core.traces.kernel_rows import Rows, Window, parse_types, text_at
from amp_core.traces.link import BACKWARD, DATA, OPTIMIZER, PHASES, WATCH, Host, Ints
from amp_core.traces.loading import marked_time
from amp_core.traces.operators import operator_category


def step_rows(events: TraceEvents, host: Host, step_times: Sequence[StepTimes], clock: DeviceClock) -> Rows:
    """Rows of `steps`, one per marked step; all times are of the device if there is one, and of a CPU without the
    profiler's own work. `step_times` of each of `host.steps`."""
    if not host.steps:
        return {}
    data, backward, optimizer = (marked_time(host, region) for region in (DATA, BACKWARD, OPTIMIZER))
    rows: Rows = {name: [] for name in _STEP_COLUMNS}
    origin = step_times[0].begins
    for (start, end, number), step in zip(host.steps, step_times, strict=True):
        loaded = times.clip(data, start, end)
        back = times.clip(backward, start, end)
        stepped = times.clip(optimizer, start, end)
        has_backward = len(back[0]) > 0
        forward = (
            float(loaded[1][-1]) if len(loaded[0]) and (not has_backward or loaded[1][-1] <= back[0][0]) else start
        )
        first, last = (clock.at(float(back[0][0])), clock.at(float(back[1][-1]))) if has_backward else (None, None)
        rows["step"].append(number)
        rows["time_s"].append((step.ends - origin) / 1e6)
        rows["skipped"].append(None)  # not in a trace
        own_us = 0.0 if len(events.work) else profiling_us(events, (np.array([start]), np.array([end])))
        rows["step_ms"].append(max(0.0, step.ends - step.begins - own_us) / 1e3)
        rows["data_ms"].append(times.total(loaded) / 1e3 if len(data[0]) else None)
        began = max(step.first_work, clock.at(forward))
        rows["forward_ms"].append(None if first is None else max(0.0, first - began) / 1e3)
        rows["backward_ms"].append(None if first is None or last is None else (last - first) / 1e3)
        ended = None if last is None or not len(stepped[0]) else max(0.0, clock.at(float(stepped[1][-1])) - last)
        rows["optimizer_ms"].append(None if ended is None else ended / 1e3)
    return {name: [_to_ns(value, name) for value in values] for name, values in rows.items()}


def _to_ns(value: Any, column: str) -> Any:
    """Times rounded to nanoseconds, the resolution of traces: differences of equal times are 0."""
    return round(value, 9 if column.endswith("_s") else 6) if isinstance(value, float) else value


_STEP_COLUMNS = ("step", "time_s", "skipped", "step_ms", "data_ms", "forward_ms", "backward_ms", "optimizer_ms")


def op_rows(events: TraceEvents, host: Host, windows: Sequence[Window], phase: Ints) -> Rows:
    """Rows of `ops`: the operators that do the work, in the first marked step; without steps, in the whole trace.

    `phase` is by span.
    """
    spans, texts = events.spans, events.texts
    low, high, step = windows[0].start, windows[0].end, windows[0].first
    if host.steps:
        low, high, step = host.steps[0]
    start = np.asarray(spans.start)
    working = _working(events, host) & (start >= low) & (start < high) & (host.region_of_span != WATCH)
    sums: dict[tuple[int, int, int, int, int], int] = {}
    for i in np.flatnonzero(working).tolist():
        key = (spans.name[i], int(host.module_of_span[i]), int(phase[i]), spans.shapes[i], spans.dtypes[i])
        sums[key] = sums.get(key, 0) + 1
    rows: Rows = {n: [] for n in ("step", "module", "op", "phase", "in_dtypes", "in_shapes", "count", "cast_bytes")}
    for (name, module, region, shapes, dtypes), count in sums.items():
        if not texts[name].startswith("aten::"):
            continue
        types = parse_types(texts[dtypes]) if dtypes >= 0 else []
        rows["step"].append(step)
        rows["module"].append(host.modules[module] if module >= 0 else None)
        rows["op"].append(texts[name])
        rows["phase"].append(PHASES[region])
        rows["in_dtypes"].append(", ".join(dict.fromkeys(filter(None, map(dtype_of, types)))) or None)
        rows["in_shapes"].append(text_at(texts, shapes))
        rows["count"].append(count)
        rows["cast_bytes"].append(_cast_bytes(texts[name], types, texts[shapes] if shapes >= 0 else "") * count)
    return rows


def _working(events: TraceEvents, host: Host) -> npt.NDArray[np.bool_]:
    """Which spans are operators that do the work themselves: they call no other operator except views, allocations and
    fills. Products, convolutions and attention always count: on a CPU a product copies its bias first."""
    names = np.asarray(events.spans.name)
    is_op = np.asarray(events.spans.kind) == OP
    idle, filling, gemm = (
        np.isin(names, [i for i, name in enumerate(events.texts) if matches(name)])
        for matches in (
            _NO_WORK.__contains__,
            _FILLS.__contains__,
            lambda name: operator_category(name) in GEMM_CATEGORIES,
        )
    )
    gemm &= is_op
    parent = host.parent
    above = np.zeros(len(names), dtype=bool)  # has GEMM/conv inside
    within = np.flatnonzero(gemm)
    while len(within):
        outer = parent[within]
        outer = np.unique(outer[outer >= 0])
        within = outer[~above[outer]]
        above[within] = True
    unit = gemm & ~above
    working = is_op & ~idle
    calls_work = (parent >= 0) & ~idle & ~filling
    working[parent[calls_work]] = False
    inside = parent.copy()  # walks up through the operators around each span
    while (inside >= 0).any():
        working[(inside >= 0) & unit[inside]] = False
        inside = np.where(inside >= 0, parent[inside], -1)
    result: npt.NDArray[np.bool_] = working | unit
    return result


_VIEWS_AND_ALLOCATIONS = (
    "empty empty_like empty_strided new_empty new_empty_strided resize_ resize_as_ set_ record_stream view "
    "_unsafe_view reshape _reshape_alias as_strided t transpose permute expand expand_as select slice narrow split "
    "split_with_sizes chunk unbind squeeze unsqueeze flatten unflatten detach detach_ alias lift_fresh conj "
    "resolve_conj resolve_neg broadcast_tensors is_floating_point _has_compatible_shallow_copy_type "
    "item _local_scalar_dense"
)
_NO_WORK = frozenset(f"aten::{name}" for name in _VIEWS_AND_ALLOCATIONS.split())
"""Operators that view memory or allocate it."""
_FILLS = frozenset({"aten::fill_", "aten::zero_"})


def _cast_bytes(op: str, types: list[str], shapes: str) -> int:
    """Bytes that a copy between types writes."""
    if op != "aten::copy_" or len(types) < 2 or types[0] == types[1]:
        return 0
    written = element_bytes(types[0])
    if written is None or element_bytes(types[1]) is None:
        return 0
    sizes = json.loads(shapes) if shapes else []
    first = sizes[0] if sizes else None
    if not isinstance(first, list) or not all(isinstance(n, int) and 0 <= n < 2**40 for n in first):
        return 0
    elements = 1
    for n in first:
        elements *= n
    return min(elements, 2**50) * written
