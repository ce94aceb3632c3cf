"""What the host did during given times, as while a device was idle: in which operator, call or function it was longest.

>>> longest_op(events, host, causes.host)
('aten::copy_', 9000.0)
"""

import re

import numpy as np

from amp_core.traces import intervals as times
from amp_core.traces.events import OP, TraceEvents
from amp_core.traces.link import EVALUATE, Host
from amp_core.traces.operators import COMPILED_CODE, is_compiled_code

_CHUNK = 2**16  # of the spans at a time, which take hundreds of megabytes in a trace of a gigabyte


def _of_profiler(events: TraceEvents) -> times.Intervals:
    """When the profiler does work of its own, as with its buffers."""
    return times.union(np.asarray(events.profiling.start), np.asarray(events.profiling.end))


def of_program(events: TraceEvents, spans: times.Intervals) -> times.Intervals:
    """The part of `spans` in which the profiler does no work of its own: operators and calls around that work are not
    to blame for it."""
    return times.without(spans, _of_profiler(events)) if len(events.profiling) else spans


def profiling_us(events: TraceEvents, spans: times.Intervals) -> float:
    """How much of `spans` the profiler's own work takes, microseconds."""
    return times.overlap(spans, _of_profiler(events))


def longest_op(events: TraceEvents, host: Host, spans: times.Intervals) -> tuple[str | None, float]:
    """The outermost operator in which the host spent the longest of `spans`, without the profiler's own work, and how
    long, in microseconds; the calls of compiled code are one."""
    spans = of_program(events, spans)
    if not len(events.spans) or not len(spans[0]):
        return None, 0.0
    us = np.zeros(len(events.texts))
    waiting = np.array([events.accelerator == "npu" and text in READING for text in events.texts], dtype=bool)
    columns = (events.spans.kind, events.spans.name, events.spans.start, events.spans.end)
    for low in range(0, len(events.spans), _CHUNK):
        kind, name, start, end = (np.asarray(column[low : low + _CHUNK]) for column in columns)
        chosen = (kind == OP) & (host.parent[low : low + _CHUNK] < 0) & ~waiting[name]
        us += np.bincount(name[chosen], times.overlap_of_each(start[chosen], end[chosen], spans), minlength=len(us))
    longest = int(us.argmax())
    compiled = [number for number in np.flatnonzero(us).tolist() if is_compiled_code(events.texts[number])]
    compiled_us = float(us[compiled].sum())
    if compiled_us > us[longest] and us[compiled].max() < MIN_OF_COMPILED_FRAC * compiled_us:
        return COMPILED_CODE, compiled_us
    return (events.texts[longest].removeprefix(EVALUATE), float(us[longest])) if us[longest] > 0 else (None, 0.0)


READING = ("aten::item", "aten::_local_scalar_dense", "aten::is_nonzero")
"""Operators that only wait for a value: no reason why an NPU idles, whose work a thread of its own launches."""
MIN_OF_COMPILED_FRAC = 0.9
"""Share of the time in compiled code from which one call of it, as that of forward, is named alone."""


def innermost_op(events: TraceEvents, spans: times.Intervals, enough_us: float) -> tuple[str | None, float]:
    """The innermost operator of which one call takes at least `enough_us` of `spans`, and how long, in microseconds."""
    spans = of_program(events, spans)
    if not len(events.spans) or not len(spans[0]):
        return None, 0.0
    start, end = np.asarray(events.spans.start), np.asarray(events.spans.end)
    us = times.overlap_of_each(start, end, spans)
    long = np.flatnonzero((np.asarray(events.spans.kind) == OP) & (us >= enough_us))
    if not len(long):
        return None, 0.0
    innermost = long[(end - start)[long].argmin()]
    return events.texts[events.spans.name[innermost]].removeprefix(EVALUATE), float(us[innermost])


def longest_call(events: TraceEvents, spans: times.Intervals) -> tuple[str | None, float]:
    """The calls of one name into the device's runtime in which the host spent the longest of `spans`, waiting or not,
    and how long, in microseconds."""
    spans = of_program(events, spans)
    if not len(events.calls) or not len(spans[0]):
        return None, 0.0
    start, end, name = (np.asarray(column) for column in (events.calls.start, events.calls.end, events.calls.name))
    us = np.bincount(name, times.overlap_of_each(start, end, spans), minlength=len(events.texts))
    chosen = name == us.argmax()
    longest_us = times.overlap(times.union(start[chosen], end[chosen]), spans)
    return (events.texts[int(us.argmax())], longest_us) if longest_us > 0 else (None, 0.0)


def outside_operators(events: TraceEvents, host: Host, spans: times.Intervals) -> times.Intervals:
    """The part of `spans` in which the host is in no operator and no call; none of it if no operator was recorded."""
    spans = of_program(events, spans)
    if OP not in events.spans.kind or not len(spans[0]):
        return times.NONE
    outermost = (np.asarray(events.spans.kind) == OP) & (host.parent < 0)
    # One after the other: both together take eighty megabytes in a trace of a gigabyte.
    in_ops = times.union(np.asarray(events.spans.start)[outermost], np.asarray(events.spans.end)[outermost])
    outside = times.without(spans, in_ops)
    del in_ops
    return times.without(outside, times.union(np.asarray(events.calls.start), np.asarray(events.calls.end)))


NO_OPERATOR = "no operator"
"""What is said where the host is in none."""


def longest_function(
    events: TraceEvents, host: Host, spans: times.Intervals, *, without_built_in: bool = False
) -> tuple[str | None, float]:
    """The Python function of the loop's thread in which the host spent the longest of `spans`, without longer functions
    that it calls, and how long with these, in microseconds; with `ASLEEP` if it slept, and how long.
    `without_built_in`: instead of a function in C, which has no file and line, the one in Python that calls it and
    hardly does anything else."""
    frames, spans = events.frames, of_program(events, spans)
    chosen = np.flatnonzero(np.asarray(frames.thread) == host.loop_thread)
    if not len(chosen) or not len(spans[0]):
        return None, 0.0
    start, end = np.asarray(frames.start)[chosen], np.asarray(frames.end)[chosen]
    order = np.lexsort((-end, start))
    start, end, names = start[order], end[order], np.asarray(frames.name)[chosen][order]
    own = times.overlap_of_each(start, end, spans)
    inside, around, caller = own.copy(), list[int](), names.copy()
    is_library = np.array([_OF_PYTHON.match(text) is not None for text in events.texts], dtype=bool)
    in_c = np.array([without_built_in and text.startswith("<built-in") for text in events.texts], dtype=bool)
    for item, began in enumerate(start.tolist()):
        while around and end[around[-1]] <= began:
            around.pop()
        if around:
            own[around[-1]] -= inside[item]
            least_us = MIN_OF_CALLER_FRAC * (end[around[-1]] - start[around[-1]])
            if is_library[names[item]] or (in_c[names[item]] and end[item] - start[item] >= least_us):
                caller[item] = caller[around[-1]]
        around.append(item)
    skipped = _WAITS if events.uses_device else NOT_OF_PROGRAM
    own[np.array([skipped.search(text) is not None for text in events.texts], dtype=bool)[names]] = 0.0
    sleeps = np.array([_SLEEP.match(text) is not None for text in events.texts], dtype=bool)[names]
    us, asleep_us = (
        np.bincount(caller[chosen], own[chosen], minlength=len(events.texts)) for chosen in (~sleeps, sleeps)
    )
    longest, sleeping = int(us.argmax()), int(asleep_us.argmax())
    if asleep_us[sleeping] > us[longest]:
        return f"{events.texts[sleeping]}{ASLEEP}", float(asleep_us[sleeping])
    if not us[longest] > 0:
        return None, 0.0
    its = names == longest
    return events.texts[longest], max(float(us[longest]), times.overlap(times.union(start[its], end[its]), spans))


MIN_OF_CALLER_FRAC = 0.9
"""Share of a call in a function in C from which the caller hardly does anything else."""
ASLEEP = ", asleep"
"""What is added to the name of a function that sleeps."""
_SLEEP = re.compile(r"<built-in (?:method|function) sleep\b")


def launches_in(events: TraceEvents, host: Host, function: str | None, launched: times.Floats) -> int:
    """How many of these launches the loop's thread makes in a Python function and what it calls."""
    frames, named = events.frames, (function or "").removesuffix(ASLEEP)
    numbers = [number for number, text in enumerate(events.texts) if text == named]
    chosen = np.isin(np.asarray(frames.name), numbers) & (np.asarray(frames.thread) == host.loop_thread)
    starts, ends = times.union(np.asarray(frames.start)[chosen], np.asarray(frames.end)[chosen])
    at = np.searchsorted(starts, launched, side="right") - 1
    return int((launched < ends[at])[at >= 0].sum()) if len(starts) else 0


_OF_PYTHON = re.compile(
    r"<built-in (?:method|function) (?:read\w*|write\w*|recv\w*|send\w*|poll|select|wait\w*|join|fork_exec|open|stat|"
    r"listdir|loads?|dumps?|flush|exec|compile|sleep)\b|"
    r"<built-in method \w+ of (?:_(?!C\b)\w+(?:\.\w+)*|(?:numpy|PIL|zlib)[\w.]*|str|bytes|bytearray|dict|list|set) "
    r"object|"
    r"(?:[^ ]*/)?(?:subprocess|threading|selectors|socket|ssl|queue|contextlib|functools|weakref|inspect|copy|copyreg|"
    r"pickle|json/\w+|re|os|pathlib|shutil|tempfile|importlib/\w+|<frozen [\w.]+>|logging/__init__)(?:\.py)?\(\d+\): "
)
"""Functions of Python's own for files, processes, threads and code, whose time is that of the program's function that
calls them."""
NOT_OF_PROGRAM = re.compile(r"lock|nn\.Module: |_record_function_|torch/(?:autograd/)?profiler")
"""Functions that wait for another thread, modules, whose forward is named too, and the profiler's own."""
_WAITS = re.compile(rf"run_backward|synchronize|{NOT_OF_PROGRAM.pattern}")
"""With those that wait for the device, or for the thread that launches backward."""
