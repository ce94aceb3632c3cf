"""In which Python functions the host was longest during given times, as while a device was idle.

>>> longest_functions(events, host, causes.host)
(('layers/attention.py(332): attention_cpu', 959.0), ('layers/attention.py(115): load_kvcache_cpu', 915.0))
"""

import re
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from amp_core.traces import intervals as times
from amp_core.traces.events import TraceEvents
from amp_core.traces.host_spans import of_program
from amp_core.traces.link import Host

Named = tuple[str | None, float]
"""A function and how long the host is in it, microseconds; None and 0 for none."""
_NONE: Named = (None, 0.0)


def longest_function(
    events: TraceEvents, host: Host, spans: times.Intervals, *, without_built_in: bool = False
) -> Named:
    """The first of `longest_functions`."""
    return longest_functions(events, host, spans, without_built_in=without_built_in)[0]


def longest_functions(
    events: TraceEvents, host: Host, spans: times.Intervals, *, without_built_in: bool = False
) -> tuple[Named, Named]:
    """The Python function of the loop's thread in which the host spent the longest of `spans`, without longer functions
    that it calls, and how long with these, in microseconds; with `ASLEEP` if it slept, and how long. Then the same of
    the rest of `spans`, of functions that do not call the first. Instead of a function that is around everything and
    hardly does anything itself, the longest of what it calls. `without_built_in`: instead of a function in C, which has
    no file and line, the one in Python that calls it and hardly does anything else."""
    spans = of_program(events, spans)
    frames = _Frames(events, host, without_built_in=without_built_in)
    if not len(frames):
        return _NONE, _NONE
    first = frames.longest(spans)
    if first[0] is None or first[0].endswith(ASLEEP):
        return first, _NONE
    number = events.texts.index(first[0])
    second = frames.longest(times.without(spans, frames.when(number)), without=frames.around(number))
    return first, _NONE if second[0] is None or second[0].endswith(ASLEEP) else second


class _Frames:
    """The calls of Python functions on the loop's thread, with the caller of each."""

    def __init__(self, events: TraceEvents, host: Host, *, without_built_in: bool) -> None:
        frames, self._texts = events.frames, events.texts
        chosen = np.flatnonzero(np.asarray(frames.thread) == host.loop_thread)
        start, end = np.asarray(frames.start)[chosen], np.asarray(frames.end)[chosen]
        order = np.lexsort((-end, start))
        self._start, self._end, self._name = start[order], end[order], np.asarray(frames.name)[chosen][order]
        self._parent = self._callers()
        self._blamed = self._blame(without_built_in=without_built_in)
        skipped = _WAITS if events.uses_device else NOT_OF_PROGRAM
        self._is_skipped = self._of_names(lambda text: skipped.search(text) is not None)
        self._sleeps = self._of_names(lambda text: _SLEEP.match(text) is not None)

    def __len__(self) -> int:
        return len(self._name)

    def _of_names(self, holds: Callable[[str], bool]) -> npt.NDArray[np.bool_]:
        """For each call, whether that holds for its name."""
        found: npt.NDArray[np.bool_] = np.array([holds(text) for text in self._texts], dtype=bool)[self._name]
        return found

    def _callers(self) -> npt.NDArray[np.int64]:
        """The number of the call around each call; -1 for the outermost."""
        parent, around, ends = np.full(len(self._name), -1), list[int](), self._end.tolist()
        for item, began in enumerate(self._start.tolist()):
            while around and ends[around[-1]] <= began:
                around.pop()
            if around:
                parent[item] = around[-1]
            around.append(item)
        return parent

    def _blame(self, *, without_built_in: bool) -> npt.NDArray[np.int64]:
        """The name of the function that each call's own time is told of: its own or that of its caller."""
        lasts, inner = self._end - self._start, self._parent >= 0
        moved = self._of_names(lambda text: _OF_PYTHON.match(text) is not None)
        in_c = self._of_names(lambda text: without_built_in and text.startswith("<built-in"))
        moved |= in_c & (lasts >= MIN_OF_CALLER_FRAC * lasts[self._parent])
        blamed = self._name.copy()
        for item in np.flatnonzero(moved & inner).tolist():  # callers first
            blamed[item] = blamed[self._parent[item]]
        return blamed

    def longest(self, spans: times.Intervals, without: npt.NDArray[np.bool_] | None = None) -> Named:
        """The function with most of these times, and how long. `without`: the calls not to tell."""
        inside = times.overlap_of_each(self._start, self._end, spans)
        own = inside.copy()
        np.subtract.at(own, self._parent[self._parent >= 0], inside[self._parent >= 0])
        own[self._is_skipped if without is None else self._is_skipped | without] = 0.0
        us, asleep_us = (
            np.bincount(self._blamed[of], own[of], minlength=len(self._texts)) for of in (~self._sleeps, self._sleeps)
        )
        longest, sleeping = int(us.argmax()), int(asleep_us.argmax())
        if asleep_us[sleeping] > us[longest]:
            return f"{self._texts[sleeping]}{ASLEEP}", float(asleep_us[sleeping])
        if not us[longest] > 0:
            return _NONE
        return self._without_enclosing(longest, float(us[longest]), inside, spans)

    def _without_enclosing(self, number: int, own_us: float, inside: times.Floats, spans: times.Intervals) -> Named:
        """That function, or the longest of what it calls where it is around all of the times and does little itself."""
        all_us, seen = times.total(spans), set[int]()
        while number not in seen:  # functions may call each other in turn
            seen.add(number)
            around_us = max(own_us, times.overlap(self.when(number), spans))
            if around_us < MIN_ENCLOSING_FRAC * all_us or own_us > MAX_OWN_FRAC * around_us:
                break
            parts_us = self._parts_us(number, inside)
            longest = int(parts_us.argmax())
            if parts_us[longest] <= max(own_us, MIN_PART_FRAC * all_us):
                break
            number, own_us = longest, min(own_us, float(parts_us[longest]))
        return self._texts[number], max(own_us, times.overlap(self.when(number), spans))

    def _parts_us(self, number: int, inside: times.Floats) -> times.Floats:
        """How much of the times each of the program's functions takes that a function calls, by name."""
        is_own = self._of_names(lambda text: _NOT_OWN.search(text) is None) & ~self._is_skipped & ~self._sleeps
        within = np.zeros(len(self._name), dtype=bool)
        is_part = np.zeros(len(self._name), dtype=bool)
        names, parents = self._name.tolist(), self._parent.tolist()
        for item, parent in enumerate(parents):
            if names[item] == number:
                within[item] = True
            elif parent >= 0 and within[parent]:
                within[item] = not is_own[item]
                is_part[item] = is_own[item]
        return np.bincount(self._name[is_part], inside[is_part], minlength=len(self._texts)).astype(np.float64)

    def when(self, number: int) -> times.Intervals:
        """When a function of that name runs."""
        its = self._name == number
        return times.union(self._start[its], self._end[its])

    def around(self, number: int) -> npt.NDArray[np.bool_]:
        """The calls of functions that call the one of that name, directly or not, and its own."""
        found = {number}
        for item in np.flatnonzero(self._name == number).tolist():
            while (item := int(self._parent[item])) >= 0:
                found.add(int(self._name[item]))
        return np.isin(self._name, list(found))


MIN_ENCLOSING_FRAC, MAX_OWN_FRAC, MIN_PART_FRAC = 0.9, 0.5, 0.3
"""Share of the times from which a function is around all of them, most of that which it may take itself to be told by
what it calls, and the share of the times from which one of these is told."""
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
_NOT_OWN = re.compile(
    rf"^<|\btorch/|\b(?:_dynamo|_inductor|_functorch|autograd|nn/modules|optim)/|"
    rf"\b(?:_ops|modules/module|parallel/distributed|utils/_contextlib)\.py\(|{_OF_PYTHON.pattern}"
)
"""Functions of torch and of Python, which are no part of a program's own."""
