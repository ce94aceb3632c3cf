"""Times of the device at moments of the host: where steps and phases begin and end on the device.

    >>> clock = DeviceClock(linked, on_cpu=False)
    >>> clock.at(3500.0)              # the host is there; what it launched before ends at
    3980.0

The host runs ahead of the device. So a step begins on the device when the work of the step before has ended, and not
when the host begins it, and it ends with the last work that was launched in it. Where the device waits for the host, as
for data, a step begins with the host: the wait belongs to the step whose data it is.

Where the trace marks steps on the device, a mark is from a step's first work to its last. A step begins no later than
its mark, and the windows lie between the marks.
"""

from array import array
from dataclasses import dataclass, replace

import numpy as np

from amp_core.hardware.kernel_names import classify_kernel
from amp_core.traces.events import OP, TraceEvents
from amp_core.traces.gpu_work import LinkedWork
from amp_core.traces.link import Floats, Host
from amp_core.traces.waits import waiting_calls

MARK_TOLERANCE_US = 1.0
"""A mark of a step on the device counts if it begins no later than this after the step's first work, and ends no
earlier before the end of its last."""


class DeviceClock:
    """Maps moments of the host to the device; on a CPU they are the same."""

    def __init__(self, linked: LinkedWork, on_cpu: bool) -> None:
        order = np.argsort(linked.launched_us, kind="stable")
        self._launched = linked.launched_us[order]
        self._start, self._end = linked.start_us[order], linked.end_us[order]
        self._done = np.maximum.accumulate(linked.end_us[order]) if len(order) else linked.end_us
        self._on_cpu = on_cpu

    def at(self, moment: float) -> float:
        """The later of `moment` and the end of all work launched before it."""
        before = int(np.searchsorted(self._launched, moment, side="left"))
        return moment if self._on_cpu or not before else max(moment, float(self._done[before - 1]))

    def span(self, low: float, high: float) -> tuple[float, float]:
        """When the first work launched between two moments begins, and the last of it ends; infinity and minus infinity
        if there is none."""
        first, last = np.searchsorted(self._launched, [low, high], side="left")
        return float(self._start[first:last].min(initial=np.inf)), float(self._end[first:last].max(initial=-np.inf))


def drop_steps_without_work(host: Host, linked: LinkedWork) -> None:
    """Drop the marked steps of a trace if no work was launched in any of them, or on a CPU no operator called: without
    launches in the trace, all of it may run after the steps on the host, and a profiler may stop in its first step."""
    within = any(((linked.launched_us >= start) & (linked.launched_us < end)).any() for start, end, _ in host.steps)
    if len(linked) and not within:
        host.steps = []


MIN_TAIL_US, MIN_TAIL_RATIO = 1000.0, 3.0
"""Time at the end of the last marked step without an operator or a call, and the same over the longest such of the
other steps, from which the profiler stopped within the step: what it writes then is none of the program."""


def cut_last_step(events: TraceEvents, host: Host) -> None:
    """End the last of three or more marked steps as the others end, where a profiler stopped within it."""
    if len(host.steps) < MIN_STEPS_FOR_TAILS or host.steps_inferred:
        return
    waits = waiting_calls(events)
    start, end = (
        np.concatenate([np.asarray(of_spans)[np.asarray(events.spans.kind) == OP], np.asarray(of_calls)[~waits]])
        for of_spans, of_calls in ((events.spans.start, events.calls.start), (events.spans.end, events.calls.end))
    )
    tails = []
    for low, high, _ in host.steps:
        inside = (start >= low) & (start < high)
        tails.append(max(0.0, high - float(end[inside].max(initial=low))))
    others, (low, high, number) = tails[:-1], host.steps[-1]
    if tails[-1] >= max(MIN_TAIL_US, MIN_TAIL_RATIO * max(others)):
        host.steps[-1] = (low, high - tails[-1] + float(np.median(others)), number)


MIN_STEPS_FOR_TAILS = 3
"""Steps from which the others tell how one usually ends."""


@dataclass(frozen=True)
class StepTimes:
    """When a step runs on the device, in microseconds."""

    begins: float
    """When the host has begun it and the device has done what was launched before, or with its first work."""
    ends: float
    """When the host has ended it and the device has done its work, or when the next one begins, if that is behind it.
    """
    first_work: float
    """As `begins`; where the device marks the step, the start of its first work, without a wait before."""
    last_work: float
    """As the `ends` of a last step; where the device marks the step, the end of its last work."""


def step_times(events: TraceEvents, host: Host, linked: LinkedWork, clock: DeviceClock) -> list[StepTimes]:
    """When each of `host.steps` runs on the device."""
    marked = _marked_steps(events)
    times: list[StepTimes] = []
    later, following = np.inf, np.inf  # when the host and the device begin the next step
    for start, end, number in reversed(host.steps):
        ready, done = clock.at(start), clock.at(end)
        first, last = _mark(marked, clock, start, end, number) or (ready, done)
        begins = min(ready, first)
        ends = following if later < following else done  # the device was still busy when the host began the next step
        times.append(StepTimes(begins, max(begins, ends), first, max(first, last)))
        later, following = start, begins
    if times and host.steps[0][2] > 0:  # a loop, and no start of a program
        begins = min(times[-1].ends, max(times[-1].begins, _held_until(events, linked, host.steps[0][0])))
        times[-1] = replace(times[-1], begins=begins, first_work=max(begins, times[-1].first_work))
    return times[::-1]


def drop_cut_step(events: TraceEvents, host: Host, linked: LinkedWork, times: list[StepTimes]) -> None:
    """Drop the first of three or more marked steps, and its times, where it is shorter than each of the others because
    the device still did older work when the host began it: there the trace lacks a part of the step. A device with
    work queued at all times does all of it in what is left. Ranks that communicate keep their steps in common."""
    if len(times) < MIN_STEPS_FOR_TAILS or host.steps_inferred:
        return
    older = np.isneginf(linked.launched_us)
    lengths = [step.ends - step.begins for step in times]
    is_cut = (linked.end_us[older] > host.steps[0][0]).any() and lengths[0] < MAX_CUT_FRAC * min(lengths[1:])
    names = (events.texts[name] for name in np.unique(linked.name).tolist()) if is_cut else ()
    if is_cut and all(classify_kernel(name).category != "communication" for name in names):
        del host.steps[0], times[0]


MAX_CUT_FRAC = 0.98
"""Length of a first step over that of the shortest other one below which it is not whole."""


def _held_until(events: TraceEvents, linked: LinkedWork, low: float) -> float:
    """When the first work of a device begins, if a copy that was launched soon after `low` waits there for what the
    trace lacks, in a call that blocks until then; minus infinity for others."""
    if not len(linked) or (linked.device < 0).any():
        return -np.inf
    first = int(linked.start_us.argmin())
    start, launched = float(linked.start_us[first]), float(linked.launched_us[first])
    waited, lead = start - launched, start - low
    is_copy = classify_kernel(events.texts[linked.name[first]]).category == "memcpy"
    blocks = is_copy and linked.returned_us[first] >= start
    return start if blocks and waited >= max(MIN_UNRECORDED_US, (1 - MAX_LAUNCH_FRAC) * lead) else -np.inf


MAX_LAUNCH_FRAC = 0.1
"""Share of that lead before the launch of the copy."""


def _marked_steps(events: TraceEvents) -> dict[int, tuple[float, float]]:
    """Start and end of the marked steps on the device's own clock, of all devices together, by number."""
    steps: dict[int, tuple[float, float]] = {}
    for (_, number), (start, end) in events.device_steps.items():
        first, last = steps.get(number, (start, end))
        steps[number] = min(first, start), max(last, end)
    return steps


def _mark(
    steps: dict[int, tuple[float, float]], clock: DeviceClock, start: float, end: float, number: int
) -> tuple[float, float] | None:
    """The step's own mark on the device; None without one, and for one that does not cover the work launched in the
    step: some versions of ROCm record marks of microseconds."""
    marked = steps.get(number)
    first, last = clock.span(start, end)
    covers = marked is not None and marked[0] <= first + MARK_TOLERANCE_US and marked[1] >= last - MARK_TOLERANCE_US
    return marked if covers and first < last else None


def whole_trace(events: TraceEvents, linked: LinkedWork) -> tuple[float, float]:
    """Start and end of a trace without marked steps: of the first and the last work of the device, without what was
    launched before the trace. The time around it belongs to the profiler. On a CPU, of all events."""
    before = linked.end_us[np.isneginf(linked.launched_us)]
    if len(events.work):
        inside = np.isfinite(linked.launched_us)
        if not inside.any():
            return float(linked.start_us.min()), float(linked.end_us.max())
        begins = max(float(linked.start_us[inside].min()), float(before.max(initial=-np.inf)))
        return max(begins, _unrecorded_until(linked)), float(linked.end_us.max())
    starts = [min(s) for s in (events.spans.start, _calls(events, events.calls.start)) if len(s)]
    ends = [max(e) for e in (events.spans.end, _calls(events, events.calls.end)) if len(e)]
    return float(min(starts)), float(max(ends))


MIN_UNRECORDED_US = 1000.0
"""A first gap of this length, in which launched work does not begin, is due to work that the trace lacks."""
MAX_WORK_BEFORE_FRAC = 0.01
"""Work before that gap, as a share of it: otherwise the gap is one of the program."""


def _unrecorded_until(linked: LinkedWork) -> float:
    """When the device had done what was launched before the trace and is not in it; minus infinity if nothing shows
    any. A server that is profiled while it runs has work queued: then the first kernel of a stream in the trace begins
    long after its launch, though nothing runs."""
    if len(np.unique(linked.device)) != 1:
        return -np.inf
    order = np.argsort(linked.start_us, kind="stable")
    start, stream, in_graph = linked.start_us[order], linked.stream[order], linked.in_graph[order]
    done = np.maximum.accumulate(linked.end_us[order])
    gap = start[1:] - done[:-1]
    long = np.flatnonzero(gap >= MIN_UNRECORDED_US)
    if not len(long):
        return -np.inf
    first = int(long[0]) + 1
    length = float(gap[first - 1])
    waited = float(start[first] - linked.returned_us[order][first])
    is_little = float(done[first - 1] - start[0]) <= MAX_WORK_BEFORE_FRAC * length
    is_first = stream[first] >= 0 and not (stream[:first] == stream[first]).any()
    queued = np.isfinite(waited) and waited >= (1 - MAX_WORK_BEFORE_FRAC) * length
    return float(start[first]) if is_little and is_first and queued and not in_graph[first] else -np.inf


def _calls(events: TraceEvents, times: "array[float]") -> Floats:
    """Times of the calls other than allocations, which continue after the work."""
    return np.delete(np.asarray(times), np.asarray(events.allocations.call))
