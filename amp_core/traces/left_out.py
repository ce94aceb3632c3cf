"""What a trace without marked steps holds outside of its window: how long it is, and what takes that time.

>>> parts_left_out(events, host, linked, windows)
(PartLeftOut(kind='start', us=6072000.0, frac=0.55, name='aten::empty_strided', name_us=6070000.0),)

A window begins with the first work of the device, or where an optimizer's step ends, and ends with the last work. So
the start of a program, its first iteration and what the host does after the last kernel are no part of it. A profiler
may also start while the device is busy: then the first work launched in the trace begins long after its launch, whether
the trace holds what runs meanwhile or not.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from amp_core.traces import intervals as times
from amp_core.traces.events import TraceEvents
from amp_core.traces.gpu_work import LinkedWork
from amp_core.traces.host_functions import longest_function
from amp_core.traces.host_spans import (
    NO_OPERATOR,
    innermost_op,
    longest_call,
    longest_op,
    outside_operators,
    profiling_us,
)
from amp_core.traces.kernel_rows import Window
from amp_core.traces.link import DATA, Host
from amp_core.traces.loader_workers import WITH_WORKERS
from amp_core.traces.loading import first_batch, marked_time
from amp_core.traces.long_calls import longest_calls
from amp_core.traces.own_ranges import range_around
from amp_core.traces.waits import is_wait, waiting_calls

PROFILER = "the profiler's own work"
"""What is said where the profiler itself keeps the host busy, as with its buffers."""
MIN_LEFT_OUT_US = 100.0
MIN_LEFT_OUT_FRAC = 0.2
"""Share of the trace from which a part is told: a reader who compares its length would miss it."""
MIN_OF_PASS_FRAC = 0.05
"""The same of both ends together where a range of the program's own is around all of it; each is told from half of that
on."""
MIN_STEPS_FRAC = 0.1
"""The same of steps of a CPU, whose operators are left out too."""
MIN_NAMED_FRAC = 0.5
"""Share of a part from which what the host is in is named."""
MIN_CALLS_FRAC, MIN_OF_OPERATOR_FRAC = 1 / 3, 0.8
"""Share of a part from which calls are named, if they take that share of what else is named."""


MAX_ADDED_FRAC = 0.05
"""Share of the time before the window up to which what comes before or after its main part is added to that, so that
one length of it is told."""


@dataclass(frozen=True)
class PartLeftOut:
    """A part of a trace that is in no window."""

    kind: str
    """`queued`: the device does recorded work that was launched before the trace. `wait`: it has done that, and
    what the trace launches has not begun. `unrecorded`: it does work that the trace lacks, or the profiler starts,
    which looks the same. `start`: nothing is launched yet, or the first launch lasts. `first-batch`: the loader's
    first batch is loaded, the only one that is marked or far longer than the others, with the start of its workers
    if it has them, which `name` then tells. `first-steps`: what comes before the first whole step. `end`: what
    follows the last work, or the last step. `last-steps`: what follows the last whole step of a CPU."""
    us: float
    frac: float
    """Its share of the time from the first event to the last."""
    name: str = ""
    """The calls, operator or function in which the host is for most of it, `NO_OPERATOR` if it is in none; "" where
    nothing tells."""
    name_us: float = 0.0
    later_us: float = 0.0
    """Of `first-batch`: the longest load of a later batch; 0 if none is marked."""
    kernel: str = ""
    """Of `queued`: the kernel with most of the device's time."""
    runs_us: float = 0.0
    """Of `unrecorded`: how long work that the trace launches runs in it, as a first short kernel."""


def parts_left_out(
    events: TraceEvents, host: Host, linked: LinkedWork, windows: Sequence[Window]
) -> tuple[PartLeftOut, ...]:
    """The long parts outside of the windows, in order; of a trace with marked steps, which its user chose, no more than
    the work that was launched before them."""
    has_steps = windows[0].first is not None
    bounds: list[tuple[str, float, float]] = []
    if not len(events.work) and (events.uses_device or not host.steps_inferred):
        return ()
    columns = [a for one in (events.spans, events.calls, events.work) if len(one) for a in (one.start, one.end)]
    first, last = min(events.first_us, *map(min, columns)), max(map(max, columns))
    low, high = windows[0].device_start, windows[-1].device_end
    queued = np.isneginf(linked.launched_us)
    if has_steps and not host.steps_inferred:
        # What runs when the profiler starts is not recorded, and the host waits for it.
        begins = min(first, float(linked.start_us[queued].min())) if queued.any() else np.inf
        ends = float(linked.end_us[queued].max(initial=-np.inf))
        part = _part(events, host, "queued", begins, min(ends, low), last - first) if begins < ends else None
        return () if part is None else (replace(part, kernel=_longest_queued(events, linked)),)
    if not len(events.work):
        bounds = [("first-steps", first, windows[0].start), ("last-steps", windows[-1].end, last)]
        whole_us = last - first
        found = (_part(events, host, kind, begins, ends, whole_us, MIN_STEPS_FRAC) for kind, begins, ends in bounds)
        return tuple(part for part in found if part is not None)
    if has_steps:
        bounds.append(("first-steps", first, low))
    else:
        inside = np.isfinite(linked.launched_us) & (linked.start_us >= low)
        if not inside.any():
            return ()
        launched = min(float(linked.start_us[queued].min(initial=np.inf)), float(linked.returned_us[inside].min()))
        launched = max(min(launched, low), first)
        if (batch := first_batch(host, low)) is not None:
            bounds.append(("first-batch", *batch))
        kind = "queued" if queued.any() else "unrecorded"
        if kind == "unrecorded" and _part(events, host, kind, launched, low, last - first) is None:
            launched = low  # what little follows the first launch is no part of its own
        ends = min(low, windows[0].earlier) if kind == "queued" else low
        little_us = MAX_ADDED_FRAC * (low - first)
        ends = low if low - ends <= little_us else ends
        launched = first if launched - first <= little_us else launched
        bounds += [("start", first, launched), (kind, launched, ends)]
        if ends < low == windows[0].ready:  # otherwise the wait after earlier work is idle time of the window
            bounds.append(("wait", ends, low))
    bounds.append(("end", max(high, low), last))
    least_frac = MIN_LEFT_OUT_FRAC
    # A program that marks its whole pass counts what the host does around the device's work as part of it.
    around = None if has_steps or queued.any() else range_around(events, linked.launched_us, low, high)
    if around is not None and max(0.0, low - around[0]) + max(0.0, around[1] - high) >= MIN_OF_PASS_FRAC * (
        last - first
    ):
        least_frac = MIN_OF_PASS_FRAC / 2
        edges = {"start": (around[0], np.inf), "end": (-np.inf, around[1])}
        bounds = [
            (kind, max(begins, edges[kind][0]), min(ends, edges[kind][1])) if kind in edges else (kind, begins, ends)
            for kind, begins, ends in bounds
        ]
    parts = (
        _part(
            events,
            host,
            kind,
            begins,
            ends,
            last - first,
            least_frac if kind in ("start", "end") else MIN_LEFT_OUT_FRAC,
        )
        for kind, begins, ends in bounds
    )
    found_parts = (part for part in parts if part is not None)
    return tuple(_with_details(part, events, host, linked, low) for part in found_parts)


def _with_details(part: PartLeftOut, events: TraceEvents, host: Host, linked: LinkedWork, low: float) -> PartLeftOut:
    """The part, with what only one of its kind has; `low`: when the first window begins."""
    if part.kind == "queued":
        return replace(part, kernel=_longest_queued(events, linked))
    if part.kind == "unrecorded":
        before = np.isfinite(linked.launched_us) & (linked.start_us < low)
        return replace(part, runs_us=float(linked.own_us[before].sum()))
    return replace(part, later_us=_later_us(host, linked)) if part.kind == "first-batch" else part


def _later_us(host: Host, linked: LinkedWork) -> float:
    """The longest load of a later batch. The last load of a loop finds that none is left, and nothing follows it."""
    last = float(linked.launched_us[np.isfinite(linked.launched_us)].max(initial=-np.inf))
    return max((end - start for start, end in sorted(host.marks[DATA])[1:] if end < last), default=0.0)


def _longest_queued(events: TraceEvents, linked: LinkedWork) -> str:
    """The kernel with most of the work from before the trace; "" where none has half of it."""
    queued = np.isneginf(linked.launched_us)
    us = np.bincount(linked.name[queued], linked.own_us[queued])
    return events.texts[int(us.argmax())] if len(us) and us.max() >= us.sum() / 2 else ""


def _part(
    events: TraceEvents,
    host: Host,
    kind: str,
    begins: float,
    ends: float,
    wall_us: float,
    least_frac: float = MIN_LEFT_OUT_FRAC,
) -> PartLeftOut | None:
    """One part; None if it is less than that share. Loading data before the first kernel is none: it is a wait of the
    device."""
    span = (np.array([begins]), np.array([ends]))
    if kind in ("start", "wait") and begins < ends:
        span = times.without(span, marked_time(host, DATA))
    us = times.total(span)
    if us < max(MIN_LEFT_OUT_US, least_frac * wall_us):
        return None
    if kind == "first-batch":
        workers = next((text for text in events.texts if WITH_WORKERS.match(text)), "")
        return PartLeftOut(kind, us, us / wall_us, workers, us if workers else 0.0)
    name, name_us = _host_is_in(events, host, kind, span)
    if kind == "end" and is_wait(name):  # the profiler waits for the device when it stops
        return None
    return PartLeftOut(kind, us, us / wall_us, name, name_us)


def _host_is_in(events: TraceEvents, host: Host, kind: str, span: times.Intervals) -> tuple[str, float]:
    """The calls of one kind, else the operator or the Python function in which the host is for most of a part."""
    enough_us = MIN_NAMED_FRAC * times.total(span)
    call = longest_call(events, span)
    if kind in ("queued", "unrecorded"):
        return (call[0], call[1]) if call[0] is not None and call[1] >= enough_us else ("", 0.0)
    several = longest_calls(events, waiting_calls(events), span)
    if several is not None and several.us >= enough_us:
        return several.names, several.us
    outside_us = times.total(outside_operators(events, host, span))
    named = [
        call,
        innermost_op(events, span, enough_us),
        *(longest(events, host, span) for longest in (longest_op, longest_function)),
        (PROFILER, profiling_us(events, span)),
        (NO_OPERATOR, outside_us),
    ]
    name, us = next(((name, us) for name, us in named if name is not None and us >= enough_us), ("", 0.0))
    # What an operator does in calls says more than its name.
    if several is not None and several.us >= max(MIN_CALLS_FRAC * times.total(span), MIN_OF_OPERATOR_FRAC * us):
        return several.names, several.us
    return name, us
