"""Why a trace tells nothing, as an error that names what would: other tools' files, schedules that were never active,
processes that compute nothing, kernels that are in it twice.

>>> check_content(events, functions=64, starts_in_stop=True)
RunError: the trace has no operator and no kernel, only 64 functions of Python: the profiler was stopped before its …
"""

import re
from collections import Counter

import numpy as np

from amp_core.schema import RunError
from amp_core.traces.events import OP, STEP, Frames, TraceEvents, Work

_WAITS = re.compile(r"(?i:queue|socket|select|poll|lock\b)|: (?:wait|recv)")
"""Python functions in which a thread waits for another thread or process."""
SHOWN_CATEGORIES = 3
"""Categories of another tool that are named."""
LEAST_STEP_US = 1000.0
"""In a shorter step without work nothing ran, whenever the trace was exported."""
MAX_DUPLICATE_FRAC = 0.1
"""Share of equal kernels from which a trace is taken to hold them twice."""


def is_within(inner: Frames, outer: Frames) -> bool:
    """Whether one of `inner` lies within one of `outer`, on its thread."""
    of_outer = list(zip(outer.thread, outer.start, outer.end, strict=True))
    return any(
        thread == of_thread and begin <= start and end <= finish
        for thread, start, end in zip(inner.thread, inner.start, inner.end, strict=True)
        for of_thread, begin, finish in of_outer
    )


def check_categories(of_others: "Counter[str]") -> None:
    """Raise `RunError` if the trace has events, none of which is one of a profiler that is read here."""
    if not of_others:
        return
    named = [repr(category) for category, _ in of_others.most_common(SHOWN_CATEGORIES) if category]
    theirs = f"; theirs are {', '.join(named)}" if named else ""
    raise RunError(
        f"it is no trace of torch.profiler: none of its events has a category that this profiler writes{theirs}; give "
        "a file that export_chrome_trace or tensorboard_trace_handler wrote"
    )


def check_content(events: TraceEvents, functions: int, starts_in_stop: bool) -> None:
    """Raise `RunError` if nothing can be told from the events, beside which there were `functions` of Python.
    `starts_in_stop`: whether torch's profiler started to record only when it was stopped."""
    if events.invalid and not (len(events.spans) or len(events.work)):
        raise RunError(
            f"none of its {events.invalid:,} events has a valid ts and dur, which are numbers of microseconds, the "
            "second not negative"
        )
    if not (OP in events.spans.kind or events.uses_device):
        if functions and not len(events.spans):
            only = (
                f"the trace has no operator and no kernel, only {functions:,} function{'s' * (functions > 1)} of Python"
            )
            if starts_in_stop:
                raise RunError(
                    f"{only}: the profiler was stopped before its schedule became active; call prof.step() in each "
                    "iteration, of more than skip_first + wait + warmup, or leave the schedule out"
                )
            waits = any(_WAITS.search(events.texts[name]) for name in set(events.frames.name))
            raise RunError(
                f"{only}: this process computes nothing; record the one that does"
                f"{', as the engine or a worker of a server' if waits else ', or the part of the program'}"
            )
        steps = [number for number, name in enumerate(events.spans.name) if STEP.match(events.texts[name])]
        if steps:
            longest_us = max(events.spans.end[number] - events.spans.start[number] for number in steps)
            export = ", and export in on_trace_ready, since a profiler is empty after its last active step"
            raise RunError(
                "the trace has marked steps, but no operator and no kernel in them: call prof.step() after the work of "
                f"each step{export if longest_us >= LEAST_STEP_US else ''}"
            )
        marked = ", only marked ranges" if len(events.spans) else ""
        raise RunError(
            f"the trace has no operator and no kernel{marked}; export it with torch.profiler's export_chrome_trace, "
            "and under a schedule in on_trace_ready, since a profiler is empty after its last active step"
        )


def check_duplicates(work: Work) -> None:
    """Raise `RunError` if the trace holds its kernels twice: a stream runs one at a time."""
    columns = (work.start, work.end, work.stream, work.device, work.correlation, work.name, work.process)
    order = np.lexsort([np.asarray(column) for column in columns])
    same = np.ones(max(0, len(work) - 1), dtype=bool)
    for column in columns:
        values = np.asarray(column)[order]
        same &= values[1:] == values[:-1]
    lasting = (np.asarray(work.end) > np.asarray(work.start)) & (np.asarray(work.correlation) >= 0)
    twice = int((same & lasting[order][1:]).sum())
    if twice > MAX_DUPLICATE_FRAC * len(work):
        raise RunError(f"the trace has {twice:,} of its {len(work):,} kernels and copies twice; give each trace once")
