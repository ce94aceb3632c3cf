"""What the host does in the longer gaps of a device before late launches: first calls and allocations, and the function
or the places beside them.

>>> longer_gap_columns(trace, causes.host, launched, spans)["longer_call"]
'cudaMalloc'
"""

import re
from typing import Any

import numpy as np
import numpy.typing as npt

from amp_core.traces import intervals as times
from amp_core.traces.device_spans import DeviceSpans, LinkedTrace
from amp_core.traces.events import MARK, OP
from amp_core.traces.host_functions import NOT_OF_PROGRAM, launches_in, longest_function
from amp_core.traces.host_spans import of_program
from amp_core.traces.long_calls import longest_calls
from amp_core.traces.own_ranges import OF_PROFILERS

FIRST_WORK = frozenset({"allocation", "loading", "compiling", "torch.compile", "setup"})
"""Kinds of calls that a warmed-up program makes no longer (`amp_core.traces.long_calls`)."""
_TRITON = re.compile(
    r"(?:^|/)(?:compiler/compiler\.py\(\d+\): (?:compile|_init_handles)|runtime/jit\.py\(\d+\): _do_compile)$"
)
"""Triton's Python functions that compile a kernel and load it."""
_BETWEEN_HOSTS = re.compile(r"(?:gloo|mpi):")
"""Marks of collectives between the hosts of ranks."""
MIN_OF_PLACE_FRAC, MAX_OF_WINDOW_FRAC = 1 / 3, 0.5
"""Share of a place's time that lies in such gaps, and most of the window that it takes: a loop and what runs the model
are around everything, and gaps lie in them by chance."""


def longer_gap_columns(
    trace: LinkedTrace, gaps: times.Intervals, launched: times.Floats, spans: DeviceSpans
) -> dict[str, Any]:
    """The columns of `windows` on these gaps of a device, of whose work the launches are `launched`."""
    events, host = trace.events, trace.host
    first = longest_calls(events, trace.waits, gaps, FIRST_WORK)
    calling = first.spans if first else times.NONE
    compiling = times.without(_in_triton(trace, gaps), calling)
    rest = times.without(times.without(gaps, calling), compiling)
    function, function_us = longest_function(events, host, rest)
    columns: dict[str, Any] = {
        "longer_call": first.names if first else None,
        "longer_call_us": times.total(calling),
        "longer_compile_us": times.total(compiling),
        "longer_function": function,
        "longer_function_us": function_us,
        "longer_function_launches": launches_in(events, host, function, np.unique(launched)),
    }
    return columns | _place_columns(trace, rest, spans)


def _place_columns(trace: LinkedTrace, gaps: times.Intervals, spans: DeviceSpans) -> dict[str, Any]:
    """The columns on the two places with most of the gaps."""
    place: str | None = None
    second: str | None = None
    its, second_its, between = times.NONE, times.NONE, times.NONE
    if len(gaps[0]):
        places = _Places(trace, spans)
        (place, its), (second, second_its) = places.two_longest(gaps)
        between = times.intersection(times.merged(its, second_its), places.between_hosts())
    return {
        "longer_place": place,
        "longer_place_us": times.total(its),
        "longer_second": second,
        "longer_second_us": times.total(second_its),
        "longer_host_wait_us": times.total(between),
    }


def _in_triton(trace: LinkedTrace, gaps: times.Intervals) -> times.Intervals:
    """The part of the gaps in which Triton compiles or loads a kernel."""
    frames, texts = trace.events.frames, trace.events.texts
    numbers = [number for number, text in enumerate(texts) if _TRITON.search(text)]
    chosen = np.isin(np.asarray(frames.name), numbers)
    if not numbers or not chosen.any():
        return times.NONE
    return times.intersection(gaps, times.union(np.asarray(frames.start)[chosen], np.asarray(frames.end)[chosen]))


class _Places:
    """Functions on the thread of the loop, and operators and marked ranges, of which the thread is no longer known."""

    def __init__(self, trace: LinkedTrace, spans: DeviceSpans) -> None:
        events, self._texts = trace.events, trace.events.texts
        self._events, self._low, self._high = events, spans.low, spans.high
        of_kind = np.isin(np.asarray(events.spans.kind), (OP, MARK))
        in_loop = np.asarray(events.frames.thread) == trace.host.loop_thread
        self._name, self._start, self._end = (
            np.concatenate(
                [np.asarray(getattr(events.spans, at))[of_kind], np.asarray(getattr(events.frames, at))[in_loop]]
            )
            for at in ("name", "start", "end")
        )

    def two_longest(
        self, gaps: times.Intervals
    ) -> tuple[tuple[str | None, times.Intervals], tuple[str | None, times.Intervals]]:
        """The place with most of the gaps, without those that are around everything, and the one with most of the
        others; with the time of each in the gaps."""
        gaps = of_program(self._events, gaps)
        first = self._longest(gaps)
        return first, self._longest(times.without(gaps, first[1]))

    def _longest(self, gaps: times.Intervals) -> tuple[str | None, times.Intervals]:
        if not len(gaps[0]) or not len(self._name):
            return None, times.NONE
        inside_us = self._by_name(times.overlap_of_each(self._start, self._end, gaps))
        lasts_us = np.minimum(self._end, self._high) - np.maximum(self._start, self._low)
        all_us = self._by_name(np.maximum(0.0, lasts_us))
        holds = (inside_us >= MIN_OF_PLACE_FRAC * all_us) & (all_us <= MAX_OF_WINDOW_FRAC * (self._high - self._low))
        for number in np.argsort(-inside_us, kind="stable")[: np.count_nonzero(inside_us)].tolist():
            text = self._texts[number]
            if holds[number] and not NOT_OF_PROGRAM.search(text) and not OF_PROFILERS.match(text):
                return text, times.intersection(gaps, self._when(self._name == number))
        return None, times.NONE

    def between_hosts(self) -> times.Intervals:
        """When the loop is in collectives between hosts."""
        numbers = [number for number, text in enumerate(self._texts) if _BETWEEN_HOSTS.match(text)]
        return self._when(np.isin(self._name, numbers)) if numbers else times.NONE

    def _by_name(self, us: times.Floats) -> npt.NDArray[np.float64]:
        sums: npt.NDArray[np.float64] = np.bincount(self._name, us, minlength=len(self._texts)).astype(float)
        return sums

    def _when(self, chosen: npt.NDArray[np.bool_]) -> times.Intervals:
        return times.union(self._start[chosen], self._end[chosen]) if chosen.any() else times.NONE
