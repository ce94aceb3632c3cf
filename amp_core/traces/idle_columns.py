"""The columns of `windows` that tell why a device was idle, and what the host did then.

>>> idle_columns(trace, selected, spans, lead, times.NONE, times.NONE, few=8, alone=True)["idle_sync_us"]
90.0
"""

import functools
import re
from typing import Any

import numpy as np
import numpy.typing as npt

from amp_core.traces import intervals as times
from amp_core.traces.between_operators import longest_between
from amp_core.traces.collect import LONG_CALL_US
from amp_core.traces.device_spans import DeviceSpans, LinkedTrace, is_in, longest_in
from amp_core.traces.gpu_work import TO_HOST
from amp_core.traces.host_functions import launches_in, longest_function, longest_functions
from amp_core.traces.host_spans import longest_op, outside_operators, profiling_us
from amp_core.traces.idle_causes import DISPATCH_US, IdleCauses, idle_causes, long_launches
from amp_core.traces.link import EVALUATE, Host
from amp_core.traces.long_calls import longest_calls
from amp_core.traces.longer_gaps import longer_gap_columns
from amp_core.traces.own_ranges import range_of
from amp_core.traces.passes import filling_passes
from amp_core.traces.replay import REACHES, Replay, reach_fracs
from amp_core.traces.waits import waits_for_results

MIN_LOADING_FRAC = 0.5
"""Share of exposed communication from which launches in which the host stays meanwhile are its cause."""


def idle_columns(
    trace: LinkedTrace,
    selected: npt.NDArray[np.bool_],
    spans: DeviceSpans,
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
    copying = linked.op[selected & _is_named(trace, TO_HOST) & (linked.op >= 0)]
    for_results = waits_for_results(events, host, trace.waits, copying, linked.launched_us[selected])
    replay = Replay.of(
        linked.start_us[selected],
        linked.end_us[selected],
        linked.launched_us[selected],
        linked.returned_us[selected],
        linked.stream[selected],
        (trace.call_start[long], trace.call_end[long]),
        trace.copies[selected],
        trace.communication[selected],
        (trace.copies & _is_named(trace, _FROM_PAGEABLE))[selected],
        trace.waits[long],
        for_results[long],
    )
    explain = functools.partial(
        idle_causes,
        starts=linked.start_us[selected],
        launched=linked.launched_us[selected],
        returned=linked.returned_us[selected],
        in_graph=linked.in_graph[selected],
        # What the program then works on, it has to wait for: what comes late is its own work.
        wait_starts=np.where(for_results, trace.call_end, trace.call_start)[trace.waits],
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
    in_calls = longest_calls(events, trace.waits, held, window=(spans.low, spans.high))
    calling = in_calls.spans if in_calls else times.NONE
    rest = times.without(late, calling)
    functions = longest_functions(events, host, late)
    longest = {
        "host_op": longest_op(events, host, late),
        "host_function": functions[0],
        "host_second": functions[1],
        "data_function": longest_function(events, host, times.merged(unfed, first_loads), without_built_in=True),
        "host_call_op": _op_of_calls(trace, calling),
        "host_rest_op": longest_op(events, host, rest),
        "host_range": range_of(events, late, spans.low, spans.high),
        "host_between": longest_between(events, host, outside_operators(events, host, rest)),
    }
    longest["host_kernel"] = _longest_before(trace, selected, causes)
    after_us, held_us = np.zeros((2, len(trace.waits)))
    after_us[trace.waits] = causes.after_wait_us
    between_copies = _between_copies(trace, selected, spans)
    of_copies = trace.waits & _ends_in(between_copies, trace.call_end)
    copy_sync_us, after_us[of_copies] = float(after_us[of_copies].sum()), 0.0
    if len(causes.held[0]):
        held_us = np.where(trace.waits, times.overlap_of_each(trace.call_start, trace.call_end, causes.held), 0.0)
    launched_us = linked.launched_us[selected]
    known_us = launched_us[np.isfinite(launched_us)]
    first, last = known_us.min(initial=np.inf), known_us.max(initial=-np.inf)
    delays = trace.waits & ~for_results & (trace.call_start >= first) & (trace.call_end <= last)
    unwaited_us = np.where(delays, trace.call_end - trace.call_start, 0.0)
    longest |= {
        "idle_sync_op": longest_in(trace, after_us),
        "idle_wait_op": longest_in(trace, held_us),
        "unwaited_op": longest_in(trace, unwaited_us),
    }
    columns: dict[str, Any] = {
        "unwaited_alone_us": replay.unwaited_us(is_in(trace, longest["unwaited_op"][0], delays)[long])
    }
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
        "idle_handover_us": _handed_over_us(trace, selected, causes.held),
        "idle_dispatch_us": causes.dispatch_us,
        "idle_elsewhere_us": times.overlap(own_idle, elsewhere),
        "idle_copy_us": _beside_copies_us(trace, selected, spans, late, between_copies),
        "idle_copy_sync_us": copy_sync_us,
        "longer_gap_steps": _steps_with(host, causes.host, spans),
        "longer_optimizer_us": times.overlap(causes.host, trace.optimizer),
        **longer_gap_columns(trace, causes.host, linked.launched_us[selected], spans),
        "late_until_us": _until_us(causes.late, spans, host),
        **_latest_step(host, late),
        "pause_us": _pause_us(host, outside_operators(events, host, causes.late), spans),
        "lead_outside_us": times.total(outside_operators(events, host, lead)),
        "idle_between_waits_us": causes.between_waits[0],
        "launches_between_waits": causes.between_waits[1],
        "host_function_launches": launches_in(events, host, longest["host_function"][0], linked.launched_us[selected]),
        "host_call": in_calls.names if in_calls else None,
        "host_call_kind": in_calls.kind if in_calls else None,
        "host_call_us": in_calls.us if in_calls else 0.0,
        "host_outside_us": times.total(outside_operators(events, host, rest)),
        "alone_loading_us": times.total(loading),
        "unwaited_us": replay.unwaited_us(),
        "optimizer_sooner_us": replay.without_host_us(trace.optimizer),
        "idle_wait_sync_us": float(held_us.sum()),
        **dict(zip(REACHES, reach_fracs(replay), strict=True)),
    }


def _until_us(late: times.Intervals, spans: DeviceSpans, host: Host) -> float:
    """How long after the start of the window the device has waited for nearly all of the time that it waits for
    launches; 0 if it never does. Of several steps, after the start of each: a device that waits for its host is in the
    same step."""
    steps = np.array([start for start, end, _ in host.steps if end > spans.low and start < spans.high])
    begins = np.array([spans.low]) if len(steps) < 2 else np.maximum(np.sort(steps), spans.low)
    of_step = np.clip(np.searchsorted(begins, late[1], side="left") - 1, 0, None)
    until = late[1] - begins[of_step]
    order = np.argsort(until, kind="stable")
    waited = np.cumsum((late[1] - late[0])[order])
    return float(until[order][np.searchsorted(waited, NEARLY_ALL_FRAC * waited[-1])]) if len(waited) else 0.0


NEARLY_ALL_FRAC = 0.95
"""Share of the time in which the device waits for launches that is nearly all of it."""


def _between_copies(trace: LinkedTrace, selected: npt.NDArray[np.bool_], spans: DeviceSpans) -> times.Intervals:
    """The gaps between two copies from or to memory that is not pinned in which the host is in calls that copy, but for
    less than `DISPATCH_US`: it copies between that memory and pinned memory of the driver. Small copies wait for the
    calls alone."""
    linked = trace.linked
    copies = selected & trace.copies & _is_named(trace, _PAGEABLE)
    moved = trace.events.moved_bytes
    copies[copies] = [moved.get(work, 0.0) >= MIN_STAGED_BYTES for work in np.flatnonzero(copies).tolist()]
    low, high = spans.idle
    between = np.isin(low, linked.end_us[copies]) & np.isin(high, linked.start_us[copies])
    if not between.any():
        return times.NONE
    calling = times.union(linked.launched_us[copies], linked.returned_us[copies])
    low, high = low[between], high[between]
    outside_us = high - low - times.overlap_of_each(low, high, calling)
    return low[outside_us < DISPATCH_US], high[outside_us < DISPATCH_US]


MIN_STAGED_BYTES = 2**16
"""Size of copies up to which CUDA does not wait for those from memory that is not pinned."""


def _ends_in(spans: times.Intervals, ends: times.Floats) -> npt.NDArray[np.bool_]:
    """Which of these ends are in one of the `spans`."""
    at = np.searchsorted(spans[1], ends, side="left")
    inside = at < len(spans[0])
    inside[inside] = spans[0][at[inside]] < ends[inside]
    return inside


def _handed_over_us(trace: LinkedTrace, selected: npt.NDArray[np.bool_], held: times.Intervals) -> float:
    """Idle time with work queued on another stream than the work before it, between whose launches the host lets one
    stream wait for an event."""
    asked = np.sort(np.asarray(trace.events.stream_waits))
    if not len(asked) or not len(held[0]):
        return 0.0
    linked = trace.linked
    by_end, by_start = (np.argsort(moments[selected], kind="stable") for moments in (linked.end_us, linked.start_us))
    before = np.searchsorted(linked.end_us[selected][by_end], held[0], side="right") - 1
    after = np.searchsorted(linked.start_us[selected][by_start], held[1], side="left")
    known = (before >= 0) & (after < len(by_start))
    first, then = by_end[before[known]], by_start[after[known]]
    stream, launched = linked.stream[selected], linked.launched_us[selected]
    low, high = np.sort(np.stack([launched[first], launched[then]]), axis=0)
    crosses = (stream[first] != stream[then]) & (np.searchsorted(asked, high) > np.searchsorted(asked, low))
    us = (held[1] - held[0])[known]
    return float(us[crosses & (us < MAX_HANDOVER_US)].sum())


MAX_HANDOVER_US = 100.0
"""A stream begins its next work sooner after the event that it waits for; what takes longer has another cause."""


def _is_named(trace: LinkedTrace, pattern: "re.Pattern[str]") -> npt.NDArray[np.bool_]:
    """Which work has a name that contains the pattern."""
    matches = np.array([pattern.search(text) is not None for text in trace.events.texts], dtype=bool)
    named: npt.NDArray[np.bool_] = matches[trace.linked.name]
    return named


def _beside_copies_us(
    trace: LinkedTrace,
    selected: npt.NDArray[np.bool_],
    spans: DeviceSpans,
    late: times.Intervals,
    between: times.Intervals,
) -> float:
    """How much of the time in which the host launches too late is `between` two copies, or, in gaps up to
    `DISPATCH_US`, right before a copy from memory that is not pinned, or right after it: the host is in the call that
    copies, or was until then."""
    start, end = trace.linked.start_us[selected], trace.linked.end_us[selected]
    copies = (trace.copies & _is_named(trace, _FROM_PAGEABLE))[selected]
    low, high = spans.idle
    beside = np.isin(high, start[copies]) | np.isin(low, end[copies])
    found = low[beside], high[beside]
    before = (np.array([-np.inf]), np.array([spans.low])) if copies[start.argmin()] else times.NONE
    beside_copies = times.intersection(times.without(late, between), times.merged(before, found))
    us = beside_copies[1] - beside_copies[0]
    return float(us[us < DISPATCH_US].sum()) + times.overlap(late, between)


_PAGEABLE, _FROM_PAGEABLE = re.compile(r"Pageable"), re.compile(r"Pageable -> Device")
"""In the names of copies from or to memory that is not pinned, and of those that the host begins."""


def _steps_with(host: Host, gaps: times.Intervals, spans: DeviceSpans) -> int | None:
    """In how many steps of the host gaps begin that take at least `MIN_OF_MEAN_FRAC` of their mean per step; None
    without marks of steps."""
    starts = np.array([start for start, _, _ in host.steps])
    if not len(starts):
        return None
    inside = (gaps[0] >= spans.low) & (gaps[0] < spans.high)
    of_step = np.searchsorted(starts, gaps[0][inside], side="right")
    us = np.bincount(of_step, (gaps[1] - gaps[0])[inside])
    in_window = ((starts >= spans.low) & (starts < spans.high)).sum()
    return int((us > MIN_OF_MEAN_FRAC * us.sum() / max(1, in_window)).sum())


def _latest_step(host: Host, late: times.Intervals) -> dict[str, Any]:
    """How long the device waits for late launches, and the step of the host with most of that; no step without marks.
    A host that is late is not ahead, so its steps are those of the device."""
    columns: dict[str, Any] = {"late_us": times.total(late), "late_step": None, "late_step_us": 0.0}
    if not host.steps or not len(late[0]):
        return columns
    starts, ends = (np.array([step[side] for step in host.steps], dtype=float) for side in (0, 1))
    us = times.overlap_of_each(starts, ends, late)
    longest = int(us.argmax())
    return columns | {"late_step": host.steps[longest][2], "late_step_us": float(us[longest])}


MIN_OF_MEAN_FRAC = 0.5
"""Share of the mean over the steps from which a step has such gaps."""


def _pause_us(host: Host, gaps: times.Intervals, spans: DeviceSpans) -> float:
    """The longest of the gaps that begin in each step, the mean over at least `MIN_PAUSES` steps; 0 if it is short, or
    longer in some of them."""
    starts = np.array([start for start, end, _ in host.steps if end > spans.low and start < spans.high])
    of_step = np.searchsorted(starts, gaps[0], side="right") - 1
    inside = of_step >= 0
    longest_us = np.zeros(len(starts))
    np.maximum.at(longest_us, of_step[inside], (gaps[1] - gaps[0])[inside])
    if len(starts) < MIN_PAUSES or longest_us.min() < max(MIN_PAUSE_US, (1 - MAX_PAUSE_SPREAD) * longest_us.max()):
        return 0.0
    return float(longest_us.mean())


MIN_PAUSES, MIN_PAUSE_US, MAX_PAUSE_SPREAD = 3, 10_000.0, 0.01
"""Steps of which the longest gaps are equally long, how long at least, and by which part of the longest they may
differ: a program that works takes longer now and then."""


def _op_of_calls(trace: LinkedTrace, calling: times.Intervals) -> tuple[str | None, float]:
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


def _longest_before(
    trace: LinkedTrace, selected: npt.NDArray[np.bool_], causes: IdleCauses
) -> tuple[str | None, float]:
    """The kernel before whose launches the device is idle the longest, in the longer gaps, and how long."""
    if not len(causes.host_before):
        return None, 0.0
    us = np.bincount(trace.linked.name[selected][causes.host_before], causes.host[1] - causes.host[0])
    longest = int(us.argmax())
    return trace.events.texts[longest], float(us[longest])


def _loading_alone(trace: LinkedTrace, selected: npt.NDArray[np.bool_], spans: DeviceSpans) -> times.Intervals:
    """When the device only communicates while its own host stays in a launch; none if that is little of it."""
    linked, launching = trace.linked, selected & ~trace.copies
    when = long_launches(*(at[launching] for at in (linked.start_us, linked.launched_us, linked.returned_us)))
    loading = times.intersection(spans.exposed, when)
    return loading if times.total(loading) >= MIN_LOADING_FRAC * times.total(spans.exposed) else times.NONE
