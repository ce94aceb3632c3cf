"""The ranges that a program marks itself, as with `record_function`: in which a device waits for its host, or no
operator of a CPU runs.

>>> range_of(events, late, 0.0, 295000.0)
('first_sum', 170600.0)
>>> outside_ranges(events, host, linked, windows)
OutsideRanges(names=('metrics', 'plots'), us=(191400.0, 150900.0))
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from amp_core.traces import intervals as times
from amp_core.traces.events import MARK, TraceEvents
from amp_core.traces.gpu_work import LinkedWork
from amp_core.traces.host_spans import of_program
from amp_core.traces.kernel_rows import Window
from amp_core.traces.link import DATA, LOADING, Host
from amp_core.traces.loading import marked_time

MIN_WITHIN_FRAC = 0.5
"""Share of the waiting that a range contains before it is told; of several, the shortest is."""
MAX_OF_WINDOW_FRAC = 0.9
"""A range around nearly all of the profiled time tells nothing, unless the program marks others beside it."""
_OF_LIBRARIES = re.compile(
    r"ProfilerStep#|PyTorch Profiler|Optimizer\.|enumerate\(|nn\.Module: |ampscope\.|DistributedDataParallel\.|FSDP::|"
    r"FullyShardedDataParallel\.|autograd::|(?:## Call )?CompiledFxGraph|Torch|Pregraph|record_param_comms|"
    r"(?:nccl|gloo|hccl|xccl|mpi|ucc|c10d):|.*\(dynamo_timed\)$"
)
"""What torch and AMPscope mark, and profilers; libraries' ranges for parts of a model tell as much as a program's."""
OF_PROFILERS = re.compile(r"ProfilerStep#|PyTorch Profiler|ampscope\.")
"""What profilers and AMPscope mark."""
_NUMBER = re.compile(r"\d+")


def range_of(events: TraceEvents, late: times.Intervals, low: float, high: float) -> tuple[str | None, float]:
    """The range of the program's own that contains most of `late`, of a window from `low` to `high` and the time before
    it, and how much of them, in microseconds. Ranges whose names differ in numbers alone are one, with a `*` for each
    number."""
    late = of_program(events, late)
    if not len(late[0]):
        return None, 0.0
    low = min(low, float(late[0][0]))
    found: tuple[float, str, float] | None = None
    covered = _covered(events, low, high)
    for named, when in covered.items():
        us, length = times.overlap(late, when), times.total(when)
        if us < MIN_WITHIN_FRAC * times.total(late):
            continue
        if length > MAX_OF_WINDOW_FRAC * (high - low) and not _has_others_beside(covered, named):
            continue
        if found is None or length < found[0]:
            found = length, named, us
    return found[1:] if found else (None, 0.0)


def range_around(events: TraceEvents, launched: times.Floats, begins: float, ends: float) -> tuple[float, float] | None:
    """Start and end of the one range of the program's own, called once, in which nearly all of these launches and of
    the window between two times are, the longest of several; None without one."""
    marked = np.flatnonzero(np.asarray(events.spans.kind) == MARK)
    name, start, end = (np.asarray(at)[marked] for at in (events.spans.name, events.spans.start, events.spans.end))
    launched = np.sort(launched[np.isfinite(launched)])
    found: tuple[float, float] | None = None
    names, places, counts = np.unique(name, return_index=True, return_counts=True)
    for number, place in zip(names[counts == 1].tolist(), places[counts == 1].tolist(), strict=True):
        text, low, high = events.texts[number], float(start[place]), float(end[place])
        inside = np.searchsorted(launched, high) - np.searchsorted(launched, low)
        covers = min(high, ends) - max(low, begins) >= MIN_AROUND_FRAC * (ends - begins)
        if inside < MIN_AROUND_FRAC * len(launched) or not len(launched) or not covers:
            continue
        is_own = _OF_LIBRARIES.match(text) is None and LOADING.match(text) is None
        if is_own and (found is None or high - low > found[1] - found[0]):
            found = low, high
    return found


MIN_AROUND_FRAC = 0.95
"""Share of the launches in a range from which it is around a whole pass."""


def _covered(events: TraceEvents, low: float, high: float) -> dict[str, times.Intervals]:
    """When each of the program's own ranges is between two times, by name; those that differ in numbers alone are
    one."""
    marked = np.flatnonzero(np.asarray(events.spans.kind) == MARK)
    columns = (events.spans.name, events.spans.start, events.spans.end)
    name, start, end = (np.asarray(column)[marked] for column in columns)
    by_pattern: dict[str, list[int]] = {}
    for number in np.unique(name).tolist():
        text = events.texts[number]
        if _OF_LIBRARIES.match(text) is None and LOADING.match(text) is None:  # loading is told as such
            by_pattern.setdefault(_NUMBER.sub("*", text), []).append(number)
    covered = {}
    for pattern, numbers in by_pattern.items():
        chosen = np.isin(name, numbers)
        named = pattern if len(numbers) > 1 else events.texts[numbers[0]]
        covered[named] = times.clip(times.union(start[chosen], end[chosen]), low, high)
    return covered


def _has_others_beside(covered: dict[str, times.Intervals], named: str) -> bool:
    """Whether another range lies mostly outside of the one of that name."""
    others = (when for other, when in covered.items() if other != named)
    return any(times.overlap(when, covered[named]) < MIN_WITHIN_FRAC * times.total(when) for when in others)


MIN_RANGE_FRAC, MAX_RANGES, MOST_FRAC = 0.05, 3, 0.9
"""Share of the time outside of operators from which a range is told among several; how many are, at most; and share of
that time from which they are enough."""
MAX_CANDIDATES = 24
"""Ranges that are compared with one another; disjoint ones of `MIN_RANGE_FRAC` are no more than 20."""


@dataclass(frozen=True)
class OutsideRanges:
    """Ranges of the program's own beside one another that contain the time outside of operators, the longest part
    first."""

    names: tuple[str, ...]
    us: tuple[float, ...]
    """How long each of them takes within the windows, with its operators."""


def outside_ranges(
    events: TraceEvents, host: Host, linked: LinkedWork, windows: Sequence[Window]
) -> OutsideRanges | None:
    """Such ranges of a trace of a CPU, until they contain most of the time in which no operator runs and no data is
    loaded; None for fewer than two."""
    if events.uses_device or not len(linked):
        return None
    edges = [np.array([getattr(w, side) for w in windows]) for side in ("device_start", "device_end")]
    whole, busy = times.union(*edges), times.union(linked.start_us, linked.end_us)
    outside = times.without(times.without(whole, busy), marked_time(host, DATA))
    outside = of_program(events, outside)
    if not times.total(outside) > 0:
        return None
    covered = _covered(events, float(whole[0][0]), float(whole[1][-1]))
    held = {named: times.overlap(outside, when) for named, when in covered.items()}
    least_us = MIN_RANGE_FRAC * times.total(outside)
    largest = sorted((named for named in held if held[named] >= least_us), key=lambda named: -held[named])
    covered = {named: covered[named] for named in largest[:MAX_CANDIDATES]}
    kept: list[str] = []
    for named in sorted(covered, key=lambda named: -times.total(covered[named])):  # outer ranges come first
        when = covered[named]
        is_within = any(times.overlap(covered[other], when) > MIN_WITHIN_FRAC * times.total(when) for other in kept)
        around_all = times.overlap(when, whole) > MAX_OF_WINDOW_FRAC * times.total(whole)
        if is_within or _parts_tell(covered, named, outside) or (around_all and not _has_others_beside(covered, named)):
            continue
        kept.append(named)
    kept.sort(key=lambda named: -held[named])
    sums = np.cumsum([held[named] for named in kept])
    told = kept[: min(MAX_RANGES, 1 + int(np.searchsorted(sums, MOST_FRAC * times.total(outside))))]
    if len(told) < 2:
        return None
    return OutsideRanges(tuple(told), tuple(times.overlap(covered[named], whole) for named in told))


def _parts_tell(covered: dict[str, times.Intervals], named: str, outside: times.Intervals) -> bool:
    """Whether shorter ranges within one contain most of its time outside of operators, and so tell more."""
    when = covered[named]
    parts = times.NONE
    for other, its in covered.items():
        is_shorter = other != named and times.total(its) < MOST_FRAC * times.total(when)
        if is_shorter and times.overlap(its, when) >= MOST_FRAC * times.total(its):
            parts = times.merged(parts, its)
    return times.overlap(times.intersection(parts, outside), when) >= MOST_FRAC * times.overlap(outside, when)
