"""What calls of operators tell of the processor, in traces of a CPU: equal calls and equal steps that take far longer
than others, and what each call costs whatever it computes.

>>> slow_calls(events, host, linked)
SlowCalls(count=43, us=6100000.0, of_us=13113000.0, op='aten::mm', longest_us=1732000.0, usual_us=23400.0)
>>> call_cost(events, host, linked)
CallCost(count=1234, each_us=245.0, range_name='model_inference', in_range=298)
"""

import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from amp_core.traces.events import OP, TraceEvents
from amp_core.traces.gpu_work import LinkedWork
from amp_core.traces.link import Host
from amp_core.traces.operators import is_range, operator_category

MIN_SLOW_RATIO = 3.0
"""A call is slow that takes that many times as long as the median of its operator and sizes."""
MIN_SLOW_FRAC = 0.2
"""Share of the operators' time beyond these medians from which it is kept."""
MIN_EQUAL = 4
"""Calls of an operator and sizes, beside the first one, from which their median is known."""
MIN_COST_US = 30.0
"""Torch takes about a microsecond to dispatch an operator, and the profiler as much to record it with its shapes."""
MIN_COST_FRAC = 0.5
"""Share of the operators' time from which the cost of their calls is kept."""
MIN_EVEN_FRAC = 0.5
"""Share of the median that the cost of nine operators in ten has at least, if it is a cost of calls."""
MIN_CALLING = 50
"""Operators that call others from which it is known."""


_HIDES_SIZES = re.compile(r"quantized::|onednn::|mkldnn_prepacked::|mkl::|prepacked::")
"""Operators whose weights are packed objects without recorded sizes: calls of the same inputs may do unequally much."""


@dataclass(frozen=True)
class SlowCalls:
    """Calls that take far longer than others of the same operator and sizes, without the first of each."""

    count: int
    us: float
    """By how much they are longer than the median, in all."""
    of_us: float
    """The time of all operators."""
    op: str
    """The operator of the one that is longer by most."""
    longest_us: float
    usual_us: float
    """The time of that one, and the median of its sizes."""
    halted_us: float = 0.0
    """How long all of the process stood still, where that is nearly all of it: calls that compute nothing, too."""
    by_fastest: bool = False
    """Whether most of it is beyond the fastest tenth of equal calls, since their median waits too."""
    by_passes: bool = False
    """Whether they are compared with the same call of other passes, for sizes are not recorded: `usual_us` is then what
    the fastest quarter takes."""
    by_steps: bool = False
    """Whether they are compared with the same call of other steps: `usual_us` is then what the fastest takes."""


def slow_calls(events: TraceEvents, host: Host, linked: LinkedWork) -> SlowCalls | None:
    """Such calls of a trace of a CPU that records shapes, or repeats the same operators; None for few of them, and for
    other traces."""
    if events.uses_device or not len(linked):
        return None
    names, (by_kind, kind) = np.asarray(events.spans.name)[linked.op], _equal_calls(events, host, linked)
    beyond, of_fastest = np.zeros(len(linked)), np.zeros(len(linked), dtype=bool)
    for equal in by_kind:
        later = equal[1:] if kind == "sizes" else equal  # the first one may set something up
        if len(later) >= (MIN_OF_STEPS if kind == "steps" else MIN_EQUAL):
            usual_us, least_us = _usual(linked.own_us[later], kind)
            slow = equal[1:][linked.own_us[equal[1:]] > max(MIN_SLOW_RATIO * usual_us, least_us)]
            beyond[slow] = linked.own_us[slow] - usual_us
            of_fastest[slow] = kind == "sizes" and least_us > 0
    count = int((beyond > 0).sum())
    if beyond.sum() < MIN_SLOW_FRAC * linked.own_us.sum() or count < (MIN_HELD_UP if kind == "steps" else 1):
        return None
    most = int(beyond.argmax())
    return SlowCalls(
        count=count,
        us=float(beyond.sum()),
        of_us=float(linked.own_us.sum()),
        op=events.texts[names[most]],
        longest_us=float(linked.own_us[most]),
        usual_us=float(linked.own_us[most] - beyond[most]),
        halted_us=_halted_us(linked, beyond),
        by_passes=kind == "passes",
        by_steps=kind == "steps",
        by_fastest=bool(beyond[of_fastest].sum() > beyond.sum() / 2),
    )


def _equal_calls(events: TraceEvents, host: Host, linked: LinkedWork) -> tuple[list[npt.NDArray[np.int64]], str]:
    """Calls that do the same, as places in `linked` in the order of time, and why: of one operator and `sizes`; without
    sizes, of one place in `passes` of the same operators, or in marked `steps`. Empty where neither is known."""
    names, shapes = np.asarray(events.spans.name)[linked.op], np.asarray(events.spans.shapes)[linked.op]
    unequal = np.array([bool(_HIDES_SIZES.match(text)) for text in events.texts], dtype=bool)
    unequal |= np.array([operator_category(text) == "communication" for text in events.texts], dtype=bool)
    in_time = np.argsort(linked.start_us, kind="stable")
    in_time = in_time[~unequal[names[in_time]]]
    known = in_time[shapes[in_time] >= 0]
    if len(known):
        _, kind = np.unique(np.stack([names[known], shapes[known]]), axis=1, return_inverse=True)
        return _grouped(known, kind.reshape(-1)), "sizes"
    if (passes := _equal_passes(names[in_time])) is not None:
        return list(in_time.reshape(passes, -1).T), "passes"
    return _of_equal_steps(events, host, linked, in_time), "steps"


def _grouped(places: npt.NDArray[np.int64], kind: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]]:
    """The `places` of each kind, in their order."""
    return np.split(places[np.argsort(kind, kind="stable")], np.cumsum(np.bincount(kind))[:-1])


def _of_equal_steps(
    events: TraceEvents, host: Host, linked: LinkedWork, in_time: npt.NDArray[np.int64]
) -> list[npt.NDArray[np.int64]]:
    """The n-th call of an operator in each marked step, for operators that all steps call equally often; of calls in
    the order of time. Other operators, as those that load data, may differ from step to step."""
    if len(host.steps) < MIN_OF_STEPS:
        return []
    starts, ends = (np.array([step[side] for step in host.steps]) for side in (0, 1))
    step = np.searchsorted(starts, linked.start_us[in_time], side="right") - 1
    inside = (step >= 0) & (linked.start_us[in_time] < ends[np.maximum(step, 0)])
    places, step = in_time[inside], step[inside]
    equal = []
    for of_op in _grouped(np.arange(len(places)), np.asarray(events.spans.name)[linked.op[places]]):
        counts = np.bincount(step[of_op], minlength=len(starts))
        if len(of_op) and counts.min() == counts.max():
            equal += list(places[of_op].reshape(len(starts), -1).T)
    return [] if _are_of_other_sizes(linked.own_us, equal) else equal


def _are_of_other_sizes(own_us: npt.NDArray[np.float64], equal: list[npt.NDArray[np.int64]]) -> bool:
    """Whether one step has more to compute, as of longer sequences: most of its calls take far longer than in others.
    Threads that wait for a processor hold up some calls now and then."""
    us = own_us[np.array(equal)] if equal else np.zeros((0, 1))
    us = us[us.min(axis=1) >= MIN_COMPUTING_US]
    return len(us) > 0 and bool(((us > MIN_SLOW_RATIO * us.min(axis=1, keepdims=True)).mean(axis=0) > 0.5).any())


MIN_OF_STEPS = 3
"""Steps from which the fastest of equal calls tells what they take."""
MIN_HELD_UP = 20
"""Such calls from which threads are held up: a few may do something else in one step."""
MIN_COMPUTING_US = 20.0
"""Time of a call from which it depends on the sizes of its inputs."""


def _usual(own_us: npt.NDArray[np.float64], kind: str) -> tuple[float, float]:
    """What equal calls take usually, and below what time, microseconds, none of them is slow: the median, unless that
    is itself far longer than the fastest tenth, as where most calls wait for a processor. `kind`: of `_equal_calls`."""
    if kind == "passes":
        return float(np.quantile(own_us, PACE_QUANTILE)), 0.0
    if kind == "steps":
        return float(own_us.min()), MIN_STALL_US
    fastest_us, median_us = (float(value) for value in np.quantile(own_us, [0.1, 0.5]))
    if len(own_us) >= MIN_FASTEST and median_us >= MIN_STALLED_RATIO * fastest_us and median_us >= MIN_STALL_US:
        return fastest_us, MIN_STALL_US
    return median_us, 0.0


MIN_FASTEST, MIN_STALLED_RATIO = 10, 5.0
"""Equal calls from which the fastest tenth is known, and how many times as long their median is if most calls wait:
caches and memory that is touched first explain less."""
MIN_STALL_US = 1000.0
"""A thread that waits for a processor waits for a time slice of another, which lasts milliseconds."""


def _halted_us(linked: LinkedWork, beyond: npt.NDArray[np.float64]) -> float:
    """How long the shortest stretch is in which nearly all of what calls take `beyond` the usual lies, if that fills it
    and calls that take microseconds otherwise are among them; else 0."""
    slow = np.flatnonzero(beyond > 0)
    slow = slow[np.argsort(linked.start_us[slow], kind="stable")]
    total_us = float(beyond[slow].sum())
    sums, shortest_us = np.cumsum(beyond[slow]), np.inf
    for first in range(min(len(slow), MAX_HALT_STARTS)):
        before_us = float(sums[first] - beyond[slow[first]])
        if before_us > (1 - MIN_HALT_FRAC) * total_us:
            break
        last = int(np.searchsorted(sums, before_us + MIN_HALT_FRAC * total_us))
        if last >= len(slow):
            break
        stretch = slow[first : last + 1]
        us = float(linked.end_us[stretch].max() - linked.start_us[stretch[0]])
        tiny = (linked.own_us[stretch] - beyond[stretch] < MAX_TINY_US) & (beyond[stretch] >= MIN_HALT_US)
        # Calls that wait for time slices are many, and wait for milliseconds each.
        is_halt = tiny.any() and float(beyond[stretch].mean()) >= MIN_HALT_US
        if is_halt and MIN_HALT_FRAC * total_us >= MIN_FILLED_FRAC * us:
            shortest_us = min(shortest_us, us)
    return shortest_us if np.isfinite(shortest_us) else 0.0


MIN_HALT_FRAC, MIN_FILLED_FRAC = 0.9, 0.5
"""Share of what calls take beyond the usual that lies in one stretch, and share of the stretch that it is at least."""
MAX_TINY_US, MIN_HALT_US = 100.0, 50_000.0
"""Usual time of a call that computes hardly anything, and by how much it is longer where its process stood still."""
MAX_HALT_STARTS = 10_000
"""Slow calls at which such a stretch is taken to begin."""


MIN_PASS_CALLS = 20
"""Calls of a pass from which it is one, and not an operator that is called in a loop."""


def _equal_passes(names: npt.NDArray[np.int64], *, finest: bool = False) -> int | None:
    """How often the same operators follow one another in the same order, by their `names` in the order of time; None
    if fewer than `MIN_EQUAL` times. Without sizes, calls of one place in these do the same. Passes may be taken
    together, unless the `finest` are asked for."""
    counts = np.unique(names, return_counts=True)[1]
    passes = int(np.gcd.reduce(counts)) if len(counts) else 0
    numbers = range(MIN_EQUAL, passes + 1)
    for often in reversed(numbers) if finest else numbers:
        if passes % often == 0 and len(names) >= MIN_PASS_CALLS * often:
            by_pass = names.reshape(often, -1)
            if (by_pass == by_pass[0]).all():
                return often
    return None


@dataclass(frozen=True)
class CallCost:
    """What calls of operators from others cost, whatever they compute."""

    count: int
    each_us: float
    range_name: str = ""
    """The range of the program's own with most operators directly in it, whose calls cost as much; "" without one."""
    in_range: int = 0
    """How many operators these are."""


def call_cost(events: TraceEvents, host: Host, linked: LinkedWork) -> CallCost | None:
    """That cost in a trace of a CPU, where it is most of the operators' time; None for other traces. It is the time of
    its own of an operator by each that it calls: one that computes takes longer, so that the median is that of those
    that only call others."""
    if events.uses_device or not len(linked):
        return None
    named = any("::" in text for text in events.texts)
    ranges = np.array([named and is_range(text) for text in events.texts], dtype=bool)[np.asarray(events.spans.name)]
    is_op = (np.asarray(events.spans.kind) == OP) & ~ranges
    around = host.parent[linked.op]
    in_ranges = around[(around >= 0) & ranges[around]]
    around = around[(around >= 0) & is_op[around]]
    calls = np.bincount(around, minlength=len(events.spans))[linked.op]
    calling = calls > 0
    if calling.sum() < MIN_CALLING:
        return None
    each_us = linked.own_us[calling] / calls[calling]
    low_us, usual_us = (float(value) for value in np.quantile(each_us, [0.1, 0.5]))
    count = int(calls.sum())
    is_even = low_us >= MIN_EVEN_FRAC * usual_us >= MIN_EVEN_FRAC * MIN_COST_US
    if not is_even or count * usual_us < MIN_COST_FRAC * linked.own_us.sum():
        return None
    if not len(in_ranges):
        return CallCost(count, usual_us)
    of_range = np.bincount(np.asarray(events.spans.name)[in_ranges])
    return CallCost(count, usual_us, events.texts[int(of_range.argmax())], int(of_range.max()))


MIN_STEPS = 4
"""Steps, beside the first one, from which their pace is known."""
MAX_CALLS_SPREAD = 0.05
"""Difference of the steps' numbers of operators, as a share of the mean, up to which they do the same."""
PACE_QUANTILE = 0.25
MIN_LOST_FRAC = 0.2
"""Share of the operators' time beyond the pace of the fastest quarter of the steps from which it is kept."""


@dataclass(frozen=True)
class SlowSteps:
    """Steps of the same operators, or passes where no steps are marked, that take unequally long; without the first."""

    us: float
    """By how much their operators take longer than at the pace of the fastest quarter of the steps, in all."""
    of_us: float
    """The time of all of their operators."""
    least_us: float
    most_us: float
    """The operators' time of the fastest and of the slowest step."""
    count: int
    of_passes: bool = False
    """Whether these are not marked steps but the same operators again, one after the other."""


def slow_steps(events: TraceEvents, host: Host, linked: LinkedWork) -> SlowSteps | None:
    """Such steps of a trace of a CPU; None where steps take about equally long, or do not call the same operators."""
    if events.uses_device or not len(linked):
        return None
    us = _of_steps(events, host, linked) if host.steps else _of_passes(events, linked)
    if us is None:
        return None
    us = us[1:]  # the first one may set something up
    lost_us = float((us - np.quantile(us, PACE_QUANTILE)).clip(min=0.0).sum())
    found = SlowSteps(lost_us, float(us.sum()), float(us.min()), float(us.max()), len(us), of_passes=not host.steps)
    return found if lost_us >= MIN_LOST_FRAC * us.sum() else None


def _of_steps(events: TraceEvents, host: Host, linked: LinkedWork) -> npt.NDArray[np.float64] | None:
    """The time of the operators of each marked step, microseconds; None for few steps or unequal numbers of calls."""
    if len(host.steps) <= MIN_STEPS:
        return None
    starts, ends = (np.array([step[side] for step in host.steps]) for side in (0, 1))
    begun = np.asarray(events.spans.start)[linked.op]
    of_step = np.searchsorted(starts, begun, side="right") - 1
    inside = (of_step >= 0) & (begun < ends[np.maximum(of_step, 0)])
    later = np.bincount(of_step[inside], minlength=len(starts))[1:]
    us = np.bincount(of_step[inside], linked.own_us[inside], minlength=len(starts)).astype(np.float64)
    return None if later.min() == 0 or later.max() - later.min() > MAX_CALLS_SPREAD * later.mean() else us


def _of_passes(events: TraceEvents, linked: LinkedWork) -> npt.NDArray[np.float64] | None:
    """The same of passes that nothing marks; None without such."""
    in_time = np.argsort(linked.start_us, kind="stable")
    passes = _equal_passes(np.asarray(events.spans.name)[linked.op[in_time]], finest=True)
    return None if passes is None or passes <= MIN_STEPS else linked.own_us[in_time].reshape(passes, -1).sum(axis=1)
