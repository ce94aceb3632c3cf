"""The rows of `timeline` from a trace: when each kernel, copy and fill of one step ran.

The step is the one of median length; without marked steps it is the whole trace. At most `MAX_ROWS` rows.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from amp_core.traces.device_times import StepTimes
from amp_core.traces.events import TraceEvents
from amp_core.traces.gpu_work import LinkedWork
from amp_core.traces.kernel_rows import Rows, Window, classed, device_name, parse_types, unnamed_templates
from amp_core.traces.link import PHASES, Host

MAX_ROWS = 100_000


def timeline_rows(
    events: TraceEvents,
    host: Host,
    linked: LinkedWork,
    windows: Sequence[Window],
    step_times: Sequence[StepTimes],
    accelerator: str,
    amd: bool,
) -> Rows:
    """Rows of `timeline`, in order of their start; none for a trace of a CPU. `step_times` of each of
    `host.steps`."""
    if not len(events.work):
        return {}
    number, low, high = _step(host, windows, step_times)
    chosen = np.flatnonzero((linked.start_us < high) & (linked.end_us > low))
    chosen = chosen[np.argsort(linked.start_us[chosen], kind="stable")][:MAX_ROWS]
    spans, texts, work, unnamed = events.spans, events.texts, events.work, unnamed_templates(events)
    rows: Rows = {name: [] for name in _COLUMNS}
    for i in chosen.tolist():
        op, module, start = int(linked.op[i]), int(linked.module[i]), float(linked.start_us[i])
        op_text = texts[spans.name[op]] if op >= 0 else None
        types = parse_types(texts[spans.dtypes[op]]) if op >= 0 and spans.dtypes[op] >= 0 else []
        name = texts[linked.name[i]]
        tensor_core, precision, category = classed(name, op_text, types, events.accelerator, on_cpu=False, amd=amd)
        tensor_core = "unknown" if unnamed[i] else tensor_core
        queue = start - float(linked.launched_us[i])
        before_us = max(0.0, low - start)  # of a kernel that began in the step before, the part in this one
        stream = work.stream[i]
        values: tuple[Any, ...] = (
            number,
            name,
            round(start + before_us - low, 3),
            round(max(0.0, float(linked.own_us[i]) - before_us), 3),
            round(queue, 3) if np.isfinite(queue) and queue > 0 else None,
            stream if stream >= 0 else None,
            device_name(int(linked.device[i]), accelerator),
            category,
            tensor_core,
            precision,
            PHASES[linked.phase[i]],
            host.modules[module] if module >= 0 else None,
            op_text,
            _known(work.occupancy[i] / 100),
            _known(work.blocks_per_sm[i]),
        )
        for column, value in zip(_COLUMNS, values, strict=True):
            rows[column].append(value)
    return rows


_COLUMNS = (
    "step",
    "name",
    "start_us",
    "total_us",
    "queue_us",
    "stream",
    "device",
    "category",
    "tensor_core",
    "precision",
    "phase",
    "module",
    "op",
    "occupancy_frac",
    "blocks_per_sm",
)


def _step(host: Host, windows: Sequence[Window], step_times: Sequence[StepTimes]) -> tuple[int | None, float, float]:
    """The number of the step, its start and its end on the device."""
    if not host.steps:
        return None, windows[0].device_start, windows[0].device_end
    order = np.argsort([step.ends - step.begins for step in step_times], kind="stable")
    middle = int(order[(len(order) - 1) // 2])
    return host.steps[middle][2], step_times[middle].begins, step_times[middle].ends


def _known(value: float) -> float | None:
    return round(value, 6) if np.isfinite(value) else None
