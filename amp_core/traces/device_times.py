"""Times of the device at moments of the host: where steps and phases begin and end on the device.

    >>> clock = DeviceClock(linked, on_cpu=False)
    >>> clock.at(3500.0)              # the host is there; what it launched before ends at
    3980.0

The host runs ahead of the device. So a step begins on the device when the work of the step before has ended, and not
when the host begins it, and it ends with the last work that was launched in it.
"""

from collections.abc import Sequence

import numpy as np

from amp_core.traces.collect import TraceEvents
from amp_core.traces.gpu_work import LinkedWork
from amp_core.traces.link import Host

MARK_TOLERANCE_US = 1.0
"""A mark of a step on the device counts if it begins no later than this after the step's first work."""


class DeviceClock:
    """Maps moments of the host to the device; on a CPU they are the same."""

    def __init__(self, linked: LinkedWork, on_cpu: bool) -> None:
        order = np.argsort(linked.launched_us, kind="stable")
        self._launched = linked.launched_us[order]
        self._start = linked.start_us[order]
        self._done = np.maximum.accumulate(linked.end_us[order]) if len(order) else linked.end_us
        self._on_cpu = on_cpu

    def at(self, moment: float) -> float:
        """The later of `moment` and the end of all work launched before it."""
        before = int(np.searchsorted(self._launched, moment, side="left"))
        return moment if self._on_cpu or not before else max(moment, float(self._done[before - 1]))

    def first_start(self, low: float, high: float) -> float:
        """When the first work launched between two moments begins; infinity if there is none."""
        first, last = np.searchsorted(self._launched, [low, high], side="left")
        return float(self._start[first:last].min(initial=np.inf))


def step_bounds(events: TraceEvents, host: Host, clock: DeviceClock) -> list[tuple[float, float]]:
    """Start and end on the device of each of `host.steps`, in microseconds."""
    starts = []
    for start, end, number in host.steps:
        begins = clock.at(start)
        marked = events.device_steps.get(number)
        # Where the device waits for the host at the start of a step, the mark, which begins with the first kernel, is
        # late. Some versions of ROCm record marks that cover hardly any of the step.
        if begins > start and marked and marked[0] <= clock.first_start(start, end) + MARK_TOLERANCE_US:
            begins = marked[0]
        starts.append(begins)
    ends = [clock.at(end) for _, end, _ in host.steps]
    for n, (later, _, _) in enumerate(host.steps[1:]):
        if starts[n + 1] > later:  # the device was still busy when the host began the next step
            ends[n] = starts[n + 1]
    return [(start, max(start, end)) for start, end in zip(starts, ends, strict=True)]


def first_moment(events: TraceEvents, linked: LinkedWork) -> float:
    """When the first event begins, or where work ends that was launched before the trace."""
    starts = [min(s) for s in (events.spans.start, events.calls.start, events.work.start) if len(s)]
    before = linked.end_us[np.isneginf(linked.launched_us)]
    return max(min(starts), float(before.max(initial=-np.inf)))


def last_moment(events: TraceEvents) -> float:
    """When the last event ends."""
    times: Sequence[float] = [max(e) for e in (events.spans.end, events.calls.end, events.work.end) if len(e)]
    return max(times)
