"""The range that a program marks itself, as with `record_function`, in which a device waits for its host.

>>> range_of(events, late, 0.0, 295000.0)
('first_sum', 170600.0)
"""

import re

import numpy as np

from amp_core.traces import intervals as times
from amp_core.traces.events import MARK, TraceEvents
from amp_core.traces.host_spans import of_program
from amp_core.traces.link import LOADING

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
_NUMBER = re.compile(r"\d+")


def range_of(events: TraceEvents, late: times.Intervals, low: float, high: float) -> tuple[str | None, float]:
    """The range of the program's own that contains most of `late`, of a window from `low` to `high` and the time before
    it, and how much of them, in microseconds. Ranges whose names differ in numbers alone are one, with a `*` for each
    number."""
    late = of_program(events, late)
    marked = np.flatnonzero(np.asarray(events.spans.kind) == MARK)
    if not len(marked) or not len(late[0]):
        return None, 0.0
    low = min(low, float(late[0][0]))
    columns = (events.spans.name, events.spans.start, events.spans.end)
    name, start, end = (np.asarray(column)[marked] for column in columns)
    by_pattern: dict[str, list[int]] = {}
    for number in np.unique(name).tolist():
        text = events.texts[number]
        if _OF_LIBRARIES.match(text) is None and LOADING.match(text) is None:  # loading is told as such
            by_pattern.setdefault(_NUMBER.sub("*", text), []).append(number)
    found: tuple[float, str, float] | None = None
    covered = {}
    for pattern, numbers in by_pattern.items():
        chosen = np.isin(name, numbers)
        covered[pattern] = times.clip(times.union(start[chosen], end[chosen]), low, high)
    for pattern, when in covered.items():
        us, length = times.overlap(late, when), times.total(when)
        if us < MIN_WITHIN_FRAC * times.total(late):
            continue
        others = (other for name_of, other in covered.items() if name_of != pattern)
        beside = any(times.overlap(other, when) < MIN_WITHIN_FRAC * times.total(other) for other in others)
        if length > MAX_OF_WINDOW_FRAC * (high - low) and not beside:
            continue
        numbers = by_pattern[pattern]
        if found is None or length < found[0]:
            found = length, pattern if len(numbers) > 1 else events.texts[numbers[0]], us
    return found[1:] if found else (None, 0.0)
