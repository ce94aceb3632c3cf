"""The rows of `windows` that a trace gives: how long a device was busy, idle, waiting, talking to others."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from amp_core.hardware.kernel_names import classify_kernel
from amp_core.traces import intervals as times
from amp_core.traces.collect import Kept
from amp_core.traces.gpu_work import Tied
from amp_core.traces.kernel_rows import Rows, Window, device_name
from amp_core.traces.link import DATA, WATCH, Host, Ints
from amp_core.traces.operators import sort_of_operator

WAITING = ("Synchronize", "cudaMemcpy", "hipMemcpy", "hipMemcpyWithStream", "hipMemcpyDtoH")
"""Ends of the names of calls in which the host waits for the device."""


def window_rows(
    kept: Kept,
    host: Host,
    tied: Tied,
    windows: Sequence[Window],
    of_window: Ints,
    kernels: Rows,
    device_names: Mapping[int, str],
    accelerator: str,
) -> Rows:
    """Rows of `windows`, one per window and device; what the columns mean is in `amp_core.schema`.

    `kernels`: the rows of `kernels` of the same trace. `device_names`: by number of the device, -1 for the CPU.
    """
    rows: list[dict[str, Any]] = []
    talking = np.array([_talks(name, on_cpu=not len(kept.work)) for name in kept.texts], dtype=bool)[tied.name]
    casts = list(zip(*(kernels[c] for c in ("step", "device", "category", "total_us")), strict=True))
    data = marked(host, DATA)
    watch = marked(host, WATCH)
    waiting = np.array([text.endswith(WAITING) for text in kept.texts], dtype=bool)
    calls = kept.calls
    call_start, call_end = np.asarray(calls.start), np.asarray(calls.end)
    waits = waiting[np.asarray(calls.name)] if len(calls) else np.zeros(0, dtype=bool)
    for number, window in enumerate(windows):
        inside = of_window == number
        for device in np.unique(tied.device[inside]).tolist():
            mine = inside & (tied.device == device)
            on_cpu, name = device < 0, device_name(device, accelerator)
            # On a CPU the time of operators inside others is theirs already.
            starts, ends = tied.start_us[mine], tied.end_us[mine]
            high = window.end if on_cpu else max(window.end, float(ends.max()))
            busy = times.clip(times.union(starts, ends), window.start, high)
            ours = tied.phase[mine] == WATCH
            users = times.clip(times.union(starts[~ours], ends[~ours]), window.start, high)
            if on_cpu:  # hooks run inside of operators
                users = times.both(users, times.gaps(watch, window.start, high))
                own_ops = times.union(starts[ours], ends[ours])
                busy = times.clip(times.together(users, own_ops), window.start, high)
            idle = times.gaps(busy, window.start, high)
            is_talk = talking[mine]
            talk = times.clip(times.union(starts[is_talk], ends[is_talk]), window.start, high)
            others = times.clip(times.union(starts[~is_talk], ends[~is_talk]), window.start, high)
            data_inside, watch_inside = times.clip(data, window.start, high), times.clip(watch, window.start, high)
            waited = waits & (call_start >= window.start) & (call_start < window.end)
            own = tied.own_us[mine]
            rows.append(
                {
                    "step": window.first,
                    "steps": window.steps,
                    "device": name,
                    "device_name": device_names.get(device),
                    "wall_us": high - window.start,
                    "busy_us": times.total(busy),
                    "idle_us": times.total(idle),
                    "data_us": times.total(data_inside) if len(data[0]) else None,
                    "idle_data_us": times.common(idle, data_inside) if len(data[0]) else None,
                    "watch_us": (
                        times.total(watch_inside)
                        if on_cpu
                        else times.total(busy) - times.total(users) + times.common(idle, watch_inside)
                    ),
                    "kernel_us": float(own.sum()),
                    "launches": None if on_cpu else int(mine.sum()),
                    "cast_us": sum(
                        us for step, on, sort, us in casts if (step, on, sort) == (window.first, name, "cast")
                    ),
                    "communication_us": times.total(talk),
                    "communication_alone_us": times.total(talk) - times.common(talk, others),
                    "sync_us": None if on_cpu else float((call_end - call_start)[waited].sum()),
                    "syncs": None if on_cpu else int(waited.sum()),
                }
            )
    return {name: [row[name] for row in rows] for name in rows[0]} if rows else {}


def _talks(name: str, on_cpu: bool) -> bool:
    return (sort_of_operator(name) if on_cpu else classify_kernel(name).category) == "communication"


def marked(host: Host, region: int) -> times.Intervals:
    """The time that marks of a phase cover."""
    spans = np.array(host.marks[region], dtype=float).reshape(-1, 2)
    return times.union(spans[:, 0], spans[:, 1])
