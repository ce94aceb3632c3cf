"""Traces of one call without a warm-up: first calls of the driver, the allocator and operators take most of the time.

>>> single_call(events, host, linked, windows)
SingleCall(us=533.0, of_us=917.0, driver_us=222.0, allocator_us=311.0, operators_us=0.0, is_single=True)

The first launch of a kernel loads its code, the first allocation starts the allocator, and the first calls make the
device's context. Where a trace holds little else, it says nothing of the speed of what it runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from amp_core.traces import intervals as times
from amp_core.traces.events import OP, TraceEvents
from amp_core.traces.gpu_work import LinkedWork
from amp_core.traces.kernel_rows import Window
from amp_core.traces.link import Host
from amp_core.traces.long_calls import call_kind
from amp_core.traces.operators import is_range, is_view
from amp_core.traces.waits import waiting_calls

MAX_WORK, MAX_REPEATS = 50, 5
"""Kernels, copies and fills of a trace, and how often one of them, or one operator, runs, up to which it is no loop."""
MIN_FIRST_US, MIN_FIRST_RATIO = 100.0, 10.0
"""A first call takes so long, and so many times as long as the median of later ones, where there are any: a launch
takes a few microseconds, and an allocation from the cache less."""
MIN_FRAC = 0.5
"""Share of the trace in first calls from which it is one of these."""
_KINDS = ("allocation", "loading", "setup")
"""Kinds of calls into the device's runtime that take long at first."""
_ALLOCATES = ("aten::empty", "aten::empty_strided")


@dataclass(frozen=True)
class SingleCall:
    """First calls of a trace that holds little else; times in microseconds, each moment once."""

    us: float
    of_us: float
    """From the first event to the last."""
    driver_us: float
    """Calls into the device's runtime that launch, allocate or set up for the first time."""
    allocator_us: float
    """Operators that allocate, beside these calls."""
    operators_us: float
    """First calls of other operators, beside all of these."""
    is_single: bool
    """Whether most operators run once."""


def single_call(events: TraceEvents, host: Host, linked: LinkedWork, windows: Sequence[Window]) -> SingleCall | None:
    """The first calls of a trace without marked steps in which nothing repeats; None where they are not most of it."""
    spans, calls = events.spans, events.calls
    if not 0 < len(events.work) <= MAX_WORK or windows[0].first is not None or not (len(spans) and len(calls)):
        return None
    name, start, end = (np.asarray(column) for column in (spans.name, spans.start, spans.end))
    passed_over = np.array([is_view(text) or is_range(text) for text in events.texts], dtype=bool)
    is_op = (np.asarray(spans.kind) == OP) & ~passed_over[name]
    often = np.bincount(name[is_op & (host.parent < 0)])
    if max(often.max(initial=0), np.bincount(linked.name).max()) > MAX_REPEATS:
        return None
    whole = [np.concatenate([np.asarray(getattr(one, column)) for one in (spans, calls, events.work)])
             for column in ("start", "end")]  # fmt: skip
    of_us = float(whole[1].max() - min(events.first_us, whole[0].min()))
    driver = _of_driver(events, linked)
    allocating = np.isin(name, [number for number, text in enumerate(events.texts) if text in _ALLOCATES])
    allocator = _union(start, end, _long(end - start, allocating, np.ones(len(name), dtype=bool)))
    first = np.zeros(len(name), dtype=bool)
    for number in np.unique(name[is_op & (host.parent < 0)]).tolist():
        own = np.flatnonzero(is_op & (host.parent < 0) & (name == number))
        own = own[np.argsort(start[own], kind="stable")]
        us = (end - start)[own]
        first[own[0]] = len(own) > 1 and us[0] >= max(MIN_FIRST_US, MIN_FIRST_RATIO * float(np.median(us[1:])))
    waits = waiting_calls(events)
    waiting = _union(np.asarray(calls.start), np.asarray(calls.end), waits)
    operators = times.without(_union(start, end, first), waiting)
    with_allocator = times.merged(driver, allocator)
    everything = times.merged(with_allocator, operators)
    us = times.total(everything)
    if us < MIN_FRAC * of_us:
        return None
    return SingleCall(
        us,
        of_us,
        times.total(driver),
        times.total(with_allocator) - times.total(driver),
        us - times.total(with_allocator),
        is_single=bool((often[often > 0] == 1).mean() >= MIN_FRAC),
    )


def _of_driver(events: TraceEvents, linked: LinkedWork) -> times.Intervals:
    """When the host is in calls into the device's runtime that take long as they are first ones: allocations, calls
    that set up, and launches of a kernel that did not run before."""
    calls = events.calls
    called = [call_kind(text) for text in events.texts]
    kinds = np.array([_KINDS.index(one) if one in _KINDS else -1 for one in called])
    kind = np.where(waiting_calls(events), -1, kinds[np.asarray(calls.name)])
    start, end = np.asarray(calls.start), np.asarray(calls.end)
    launches = kind == _KINDS.index("loading")
    order = np.argsort(linked.launched_us, kind="stable")
    _, first = np.unique(linked.name[order], return_index=True)
    again = np.setdiff1d(linked.launched_us, linked.launched_us[order[first]])
    long = _long(end - start, launches, ~np.isin(start, again))
    return _union(start, end, long | ((kind >= 0) & ~launches & (end - start >= MIN_FIRST_US)))


def _long(us: times.Floats, chosen: npt.NDArray[np.bool_], new: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Which of the chosen ones are new and far longer than the others are."""
    others = us[chosen & ~(new & (us >= MIN_FIRST_US))]
    usual_us = float(np.median(others)) if len(others) else 0.0
    long: npt.NDArray[np.bool_] = chosen & new & (us >= max(MIN_FIRST_US, MIN_FIRST_RATIO * usual_us))
    return long


def _union(start: times.Floats, end: times.Floats, chosen: npt.NDArray[np.bool_]) -> times.Intervals:
    return times.union(start[chosen], end[chosen])
