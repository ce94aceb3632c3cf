"""Calls into the device's runtime in which the host stays long, by what they are for.

>>> longest_calls(events, waits, causes.late)
LongCalls(kind='allocation', names='cudaFree, cudaMalloc', us=7200.0)
"""

import functools
import re
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from amp_core.traces import intervals as times
from amp_core.traces.collect import COMPILING, LONG_CALL_US
from amp_core.traces.events import RUNTIMES, TraceEvents
from amp_core.traces.host_spans import of_program
from amp_core.traces.link import Host


@dataclass(frozen=True)
class LongCalls:
    """Calls of one kind into the device's runtime in which the host stays long while the device is idle."""

    kind: str
    """`allocation`, `uncached`, `compiling`, `torch.compile`, `loading`, `graphs`, `copies`, `setup` or `other`."""
    names: str
    """The names with the most time, the longest first."""
    spans: times.Intervals
    """When the host is in them while the device is idle."""

    @property
    def us(self) -> float:
        """How long the host is in them, microseconds; calls within others count once."""
        return times.total(self.spans)


def longest_calls(
    events: TraceEvents,
    waits: npt.NDArray[np.bool_],
    spans: times.Intervals,
    kinds: Collection[str] = (),
    window: tuple[float, float] | None = None,
) -> LongCalls | None:
    """The kind of runtime calls in which the host spent the longest of `spans`; None if it spent them outside of such
    calls. Calls that wait for the device (`waits`) and short ones do not count. Modules that are loaded do, where the
    profiler records that by itself, and so does torch.compile while it compiles, whatever it calls. `kinds`: those to
    choose from, else all. `window`: calls of an unknown kind that are around what happens in it are no cause of
    that."""
    spans = of_program(events, spans)
    if not len(spans[0]):
        return None
    name, start, end = _long_calls(events, waits)
    own_us = times.overlap_of_each(start, end, spans)
    loaded = np.arange(len(name)) >= len(name) - len(events.loadings) - len(events.compiling)
    loading = times.intersection(spans, times.union(start[loaded], end[loaded]))
    if len(loading[0]):  # it happens within calls, and tells more than their names
        own_us[~loaded] -= times.overlap_of_each(start[~loaded], end[~loaded], loading)
    us = np.bincount(name, np.maximum(own_us, 0.0), minlength=len(events.texts))
    by_kind: dict[str, list[int]] = {}
    for number in np.argsort(-us, kind="stable")[: np.count_nonzero(us)].tolist():
        kind, chosen = call_kind(events.texts[number]), name == number
        around_all = kind == "other" and window is not None and _is_around(start[chosen], end[chosen], spans, *window)
        if (not kinds or kind in kinds) and not around_all:
            by_kind.setdefault(kind, []).append(number)
    if not by_kind:
        return None
    during: dict[str, times.Intervals] = {}
    for kind, numbers in by_kind.items():
        chosen = np.isin(name, numbers)
        during[kind] = times.intersection(times.union(start[chosen], end[chosen]), spans)
    total = {kind: times.total(when) for kind, when in during.items()}
    kind = max(total, key=lambda kind: total[kind])
    starting = [k for k in _AT_THE_START if total.get(k, 0.0) >= MIN_START_RATIO * total[kind]]
    if kind in starting and len(starting) > 1:  # a program's first calls do all of it
        kinds = [k for k in _AT_THE_START if k in total]
        by_kind["setup"], kind = sorted((i for k in kinds for i in by_kind[k]), key=lambda i: -us[i]), "setup"
        during["setup"] = functools.reduce(times.merged, [during[k] for k in kinds])
    when = during[kind]
    long = [number for number in by_kind[kind] if us[number] >= MIN_NAME_FRAC * times.total(when)]
    listed_names = (events.texts[number] for number in long[: 1 if kind == "other" else _MAX_NAMES])
    names = ", ".join(name.removesuffix(f" {COMPILING}") for name in listed_names)
    listed = long[:_MAX_NAMES]
    if kind != "other" and listed and us[listed].sum() < NEARLY_ALL_FRAC * us[by_kind[kind]].sum():
        names += " and others"
    if kind == TORCH_COMPILE:  # its ranges are nested
        names = TORCH_COMPILE
    if kind == "allocation" and _is_uncached(events):
        kind = "uncached"
    elif kind == "allocation" and _longest_first_us(events) >= max(MIN_START_US, times.total(when) / 2):
        kind = "setup"  # the first call into a runtime makes its context
    return LongCalls(kind, names, when)


def _is_around(start: times.Floats, end: times.Floats, spans: times.Intervals, low: float, high: float) -> bool:
    """Whether these calls are around whatever happens in a window, as one per request of a server: they last for nearly
    all of it, or mostly while none of `spans` is."""
    during = times.clip(times.union(start, end), low, high)
    us = times.total(during)
    return us >= MAX_AROUND_FRAC * (high - low) or times.overlap(during, spans) < MIN_WITHIN_FRAC * us


MAX_AROUND_FRAC, MIN_WITHIN_FRAC = 0.9, 1 / 3
"""Share of a window in calls of one name from which whatever happens lies in them; and share of their time from which
what happens then is their doing."""


def _long_calls(
    events: TraceEvents, waits: npt.NDArray[np.bool_]
) -> tuple[npt.NDArray[np.int64], times.Floats, times.Floats]:
    """Name, start and end of the calls that may take long, then of the captures of graphs, whose calls launch nothing,
    and last of the loading of modules and of what torch.compile compiles."""
    start, end = np.asarray(events.calls.start), np.asarray(events.calls.end)
    chosen = ~waits & (end - start >= LONG_CALL_US)
    captures = np.array(_captures(events), dtype=float).reshape(-1, 3)
    last = (events.loadings, events.compiling)
    names = [np.asarray(events.calls.name)[chosen], captures[:, 0], *(np.asarray(one.name) for one in last)]
    return (
        np.concatenate(names).astype(int),
        np.concatenate([start[chosen], captures[:, 1], *(np.asarray(one.start) for one in last)]),
        np.concatenate([end[chosen], captures[:, 2], *(np.asarray(one.end) for one in last)]),
    )


def _captures(events: TraceEvents) -> list[tuple[int, float, float]]:
    """The captures of graphs: the name of the call that begins one, and when it begins and ends."""
    calls = events.calls
    begins, ends = (_called(events, pattern) for pattern in (_BEGINS_CAPTURE, _ENDS_CAPTURE))
    captures = []
    for call in begins.tolist():
        later = [calls.start[end] for end in ends.tolist() if calls.start[end] >= calls.end[call]]
        if later:
            captures.append((int(calls.name[call]), float(calls.start[call]), float(min(later))))
    return captures[:MAX_CAPTURES]


def _is_uncached(events: TraceEvents) -> bool:
    """Whether memory is freed after many launches. An allocator with a cache frees all of it at once, when memory is
    short; without one every tensor is freed alone."""
    frees, launches = _called(events, _FREES), _called(events, _LAUNCHES)
    calls = np.concatenate([frees, launches])
    freed = (np.arange(len(calls)) < len(frees))[np.argsort(np.asarray(events.calls.start)[calls], kind="stable")]
    after_launches = int((freed[1:] & ~freed[:-1]).sum())
    return after_launches >= max(MIN_FREES, MIN_UNCACHED_FRAC * len(launches))


def outer_frees(events: TraceEvents, host: Host) -> int:
    """How many long calls that free memory are in no operator, as those of `empty_cache`. An allocator that runs short
    of memory frees it in the operators that ask for more."""
    frees = _called(events, _FREES)
    us = np.asarray(events.calls.end)[frees] - np.asarray(events.calls.start)[frees]
    return int(((host.op_of_call[frees] < 0) & (us >= LONG_CALL_US)).sum())


def later_frees(events: TraceEvents, host: Host) -> int:
    """How many long calls free memory in operators, in marked steps after one in which none does. An allocator whose
    cache is not warm yet frees nothing, and one that frees in every step is never warm: memory runs short."""
    frees, steps = _called(events, _FREES), host.steps
    start, end = np.asarray(events.calls.start)[frees], np.asarray(events.calls.end)[frees]
    in_operators = start[(host.op_of_call[frees] >= 0) & (end - start >= LONG_CALL_US)]
    in_step = [int(((in_operators >= low) & (in_operators < high)).sum()) for low, high, _ in steps]
    first = next((number for number, count in enumerate(in_step) if not count), len(in_step))
    return sum(in_step[first:])


def _longest_first_us(events: TraceEvents) -> float:
    """How long the longest of `_FIRST_CALLS` takes; where there are many, of those before all work of the devices,
    which needs the context that the first one makes."""
    calls, frees = _called(events, _FIRST_CALLS), _called(events, _FREES)
    start, end = np.asarray(events.calls.start)[calls], np.asarray(events.calls.end)[calls]
    long = end - start >= LONG_CALL_US
    if np.isin(calls, frees)[long].sum() >= MIN_FLUSHES:  # an allocator that frees its cache
        long &= start < min(events.work.start, default=np.inf)
    return float((end - start)[long].max(initial=0.0))


def _called(events: TraceEvents, pattern: "re.Pattern[str]") -> npt.NDArray[np.int64]:
    """The calls whose names contain the pattern."""
    matches = np.array([pattern.search(text) is not None for text in events.texts], dtype=bool)
    return np.flatnonzero(matches[np.asarray(events.calls.name, dtype=np.int64)])


MIN_FREES = 20
MIN_UNCACHED_FRAC = 0.05
MIN_START_US = 20_000.0
"""To allocate or to free one block takes less, also where the driver has to find the memory."""
_FIRST_CALLS = re.compile(rf"^(?:{RUNTIMES})(?:Free|Malloc)$")
MIN_FLUSHES = 8
"""Long calls that free memory from which an allocator makes them, that runs short of it."""
MAX_CAPTURES = 1000
_BEGINS_CAPTURE, _ENDS_CAPTURE = re.compile(r"StreamBeginCapture"), re.compile(r"StreamEndCapture")
_FREES = re.compile(rf"^(?:{RUNTIMES})(?:Mem)?Free(?:_v2)?$")
_LAUNCHES = re.compile(r"Launch")


def call_kind(name: str) -> str:
    """What a call into a device's runtime is for, by its name."""
    return next((kind for kind, pattern in _CALL_KINDS.items() if pattern.search(name)), "other")


NEARLY_ALL_FRAC = 0.95
"""Share of the time of calls from which the listed names are told as all of them."""
_MAX_NAMES = 3
MIN_NAME_FRAC = 0.01
"""Share of the time of a kind of calls from which a name is given."""
_AT_THE_START = ("setup", "loading", "allocation")
MIN_START_RATIO = 0.25
"""Kinds of calls that each take this part of the longest one's time are taken together as the start of a program."""
TORCH_COMPILE = "torch.compile"
"""The kind of what torch.compile does while it compiles."""
_CALL_KINDS = {
    TORCH_COMPILE: re.compile(r"^(?!CUDAGraph).*\(dynamo_timed\)$"),  # what it captures, it has compiled
    "compiling": re.compile(r"aclopCompile"),
    "graphs": re.compile(r"Graph|Capture"),
    "copies": re.compile(r"Mem(?:cpy|set|ory|Copy|Fill|Buffer)|Prefetch", re.IGNORECASE),
    "allocation": re.compile(r"alloc|free|HostRegister|HostUnregister|Mem(?:Pool|Create|Map|Unmap|Release|SetAccess)|"
                             r"AddressReserve", re.IGNORECASE),
    "loading": re.compile(r"Launch|Enqueue|Invoke|runFunction|Module|Library|GetFunction|Func[GS]et|Kernel|Program|"
                          r"Occupancy|Loading|Link(?:Create|Add|Complete)"),
    "setup": re.compile(r"Create|Destroy|Init|Ipc|Peer|SetDevice|GetDevice|Ctx|Context"),
}  # fmt: skip
"""In this order, what the names of CUDA's, HIP's, Level Zero's, SYCL's, Cambricon's and
CANN's calls contain."""
