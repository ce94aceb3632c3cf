"""Traces of a CPU whose operators run for a small part of the time that the profiler ran.

>>> few_operators(events)
FewOperators(us=77_000.0, before_us=11_353_000.0, after_us=5_453_000.0)
"""

from dataclasses import dataclass

from amp_core.traces.events import TraceEvents

MAX_OPERATORS_FRAC = 0.2
"""Share of the profiler's time from the first operator to the last, from which a reader expects no other time."""
MIN_OTHER_US = 100_000.0
"""Shorter times before the first operator and after the last one are those of the profiler's start and stop."""


@dataclass(frozen=True)
class FewOperators:
    """How long operators and ranges run, from the first to the last, and how long the profiler ran beside that."""

    us: float
    before_us: float
    after_us: float


def few_operators(events: TraceEvents) -> FewOperators | None:
    """That of a trace of a CPU; None where operators run for more of it, or Python's functions show what else runs."""
    if events.uses_device or not len(events.spans) or len(events.frames) or events.profiled is None:
        return None
    (begin, end), first, last = events.profiled, min(events.spans.start), max(events.spans.end)
    before_us, after_us = first - begin, end - last
    is_short = last - first < MAX_OPERATORS_FRAC * (end - begin) and before_us + after_us >= MIN_OTHER_US
    return FewOperators(last - first, before_us, after_us) if is_short and before_us >= 0 <= after_us else None
