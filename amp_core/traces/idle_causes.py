"""Why a device was idle, gap by gap, and what the host did in the meantime.

    >>> causes = idle_causes(idle, starts, launched, returned, in_graph, wait_starts, wait_ends)
    >>> causes.sync_us, causes.dispatch_us, longest_op(events, host, causes.host)
    (90.0, 410.0, ('aten::copy_', 9000.0))
    >>> longest_calls(events, waits, causes.late)
    LongCalls(kind='allocation', names='cudaFree, cudaMalloc', us=7200.0)

A gap ends with a kernel. If the call that launched the kernel had returned before the gap, the kernel waited for other
work; while the call runs, the host is the cause: the first launch loads the kernel, which takes milliseconds. Otherwise
the host was late: it had waited for the device, it was dispatching operators, or it did something else. A kernel that
was launched in the gap and began much later than the call returned waited for other work, too.
"""

import functools
import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from amp_core.traces import intervals as times
from amp_core.traces.collect import LONG_CALL_US
from amp_core.traces.events import OP, TraceEvents
from amp_core.traces.link import EVALUATE, Host
from amp_core.traces.operators import COMPILED_CODE, is_compiled_code
from amp_core.traces.replay import Replay

LATENCY_US = 10.0
"""Gaps up to this between kernels that were both launched are the time to start a kernel."""
START_US = 100.0
"""A kernel that an idle device could begin begins sooner after its launch, also under the profiler."""
DISPATCH_US = 300.0
"""Python and the dispatch of operators between two launches take less than this, also under the profiler. A longer gap
is due to other work of the host: preprocessing, logging, setting up a library."""


@dataclass(frozen=True)
class IdleCauses:
    """Idle time by cause, microseconds. The rest of the idle time is in `host`."""

    sync_us: float
    """After the host waited for the device: no more than it waited, since it would have launched that much earlier."""
    wait_us: float
    """Launched work did not begin, for longer than it takes to start a kernel: it waits for other work, of this device
    or another."""
    lost_us: float
    """Part of `wait_us` that delays nothing: what follows is launched too late in any case."""
    graph_us: float
    """Part of `wait_us` that ends with the work of a captured graph, which starts later than a kernel."""
    latency_us: float
    """The same in shorter gaps."""
    dispatch_us: float
    """The host launched too late, in gaps up to `DISPATCH_US`."""
    host: times.Intervals
    """The longer gaps in which the host launched too late."""
    host_before: npt.NDArray[np.int64]
    """The work that ends each of them, an index of `starts`."""
    late: times.Intervals
    """The same of all lengths."""
    held: times.Intervals
    """When launched work did not begin, as in `wait_us`."""
    between_waits: tuple[float, float]
    """The part of the time in which the host launched too late that is between two waits with few launches between
    them, microseconds, and how many these are on average."""
    after_wait_us: times.Floats
    """`sync_us` by the waits that it came after: of one gap in proportion to their lengths."""


def idle_causes(
    idle: times.Intervals,
    starts: times.Floats,
    launched: times.Floats,
    returned: times.Floats,
    in_graph: npt.NDArray[np.bool_],
    wait_starts: times.Floats,
    wait_ends: times.Floats,
    few: int = 0,
    replay: Replay | None = None,
) -> IdleCauses:
    """The causes of `idle` times of a device. Of its work: `starts`, and when the calls that launched it began
    and `returned`, and whether they are a graph's. The waits are the host's. `few`: the most launches between two
    waits that are told apart. `replay` of the same work tells which waits of it delay nothing."""
    order = np.argsort(starts, kind="stable")
    idle = _cut(idle, starts[order])
    following = np.searchsorted(starts[order], idle[1], side="left")
    known = following < len(starts)
    launch, launch_end = np.full((2, len(idle[0])), np.inf)
    launch[known] = launched[order][following[known]]
    launch_end[known] = returned[order][following[known]]
    of_graph = np.zeros(len(idle[0]), dtype=bool)
    of_graph[known] = in_graph[order][following[known]]
    queued = launch <= idle[0]
    by_end = np.argsort(wait_ends)
    waited = np.concatenate([[0.0], np.cumsum((wait_ends - wait_starts)[by_end])])
    first, last = (np.searchsorted(wait_ends[by_end], edge, side="right") for edge in idle)
    waited_us = waited[last] - waited[first]
    length = idle[1] - idle[0]
    long_wait = length >= LATENCY_US
    launching = np.where(queued & long_wait, np.clip(launch_end - idle[0], 0.0, length), 0.0)
    has_call = launch_end > launch  # otherwise only the operator is known, in which the host may be for long
    start_us = np.where(has_call, np.clip(idle[1] - launch_end, 0.0, length), 0.0)
    late = np.where(queued, launching, length - np.where(start_us >= START_US, start_us, 0.0))
    sync = np.where(queued, 0.0, np.minimum(late, waited_us))
    late_us = late - sync
    dispatch = late_us < DISPATCH_US
    began = idle[0] + sync
    some, rest = late_us > 0, ~dispatch
    waiting = ~queued | long_wait
    held_us = np.where(waiting, length - late, 0.0)
    held_of_work = np.zeros(len(starts))
    np.add.at(held_of_work, order[following[known]], held_us[known])
    return IdleCauses(
        sync_us=float(sync.sum()),
        wait_us=float(held_us.sum()),
        lost_us=replay.lost_us(held_of_work) if replay is not None else 0.0,
        graph_us=float(held_us[of_graph].sum()),
        latency_us=float(length[queued & ~long_wait].sum()),
        dispatch_us=float(late_us[dispatch].sum()),
        host=(began[rest], (began + late_us)[rest]),
        host_before=order[np.minimum(following, len(starts) - 1)][rest],
        late=(began[some], (began + late_us)[some]),
        held=((idle[0] + late)[waiting & (late < length)], idle[1][waiting & (late < length)]),
        between_waits=_between_waits(launch, late_us, launched, np.sort(wait_ends), few),
        after_wait_us=_after_each(idle, sync, waited_us, wait_starts, wait_ends),
    )


def _between_waits(
    launch: times.Floats, late_us: times.Floats, launched: times.Floats, wait_ends: times.Floats, few: int
) -> tuple[float, float]:
    """`IdleCauses.between_waits`: of gaps that end with a `launch`, after `late_us`."""
    launches = np.unique(launched[np.isfinite(launched)])
    counts = np.bincount(np.searchsorted(wait_ends, launches), minlength=len(wait_ends) + 1)
    of_gap = np.searchsorted(wait_ends, launch)
    between = (of_gap > 0) & (of_gap < len(wait_ends)) & np.isfinite(launch) & (late_us > 0)
    between &= counts[of_gap] <= few
    us = float(late_us[between].sum())
    return us, float((counts[of_gap] * late_us)[between].sum() / us) if us > 0 else 0.0


def _after_each(
    idle: times.Intervals, sync_us: times.Floats, waited_us: times.Floats, starts: times.Floats, ends: times.Floats
) -> times.Floats:
    """Of each wait, the idle time after it. Of each gap, `sync_us` came after waits of `waited_us` that end in it."""
    gap = np.searchsorted(idle[1], ends, side="left")
    inside = gap < len(idle[0])
    inside[inside] &= idle[0][gap[inside]] < ends[inside]
    share = np.divide(sync_us, waited_us, out=np.zeros(len(sync_us)), where=waited_us > 0)
    us = np.zeros(len(ends))
    us[inside] = (ends - starts)[inside] * share[gap[inside]]
    return us


def long_launches(starts: times.Floats, launched: times.Floats, returned: times.Floats) -> times.Intervals:
    """When the host is in launches of kernels that take `MIN_LONG_LAUNCH_US` or more by themselves, as the first one of
    a kernel. Launches behind `MAX_QUEUED` others wait for the device."""
    queued = np.searchsorted(np.sort(launched), launched) - np.searchsorted(np.sort(starts), launched)
    chosen = np.isfinite(launched) & (returned - launched >= MIN_LONG_LAUNCH_US) & (queued < MAX_QUEUED)
    return times.union(launched[chosen], returned[chosen])


MIN_LONG_LAUNCH_US = 1000.0
MAX_QUEUED = 500
"""A queue of CUDA holds some thousand launches, and a launch waits for room in it."""


def _cut(idle: times.Intervals, starts: times.Floats) -> times.Intervals:
    """The idle times, in parts where work starts within: work of no length, in traces of whole microseconds."""
    if not len(idle[0]):
        return idle
    at = np.searchsorted(idle[0], starts, side="right") - 1
    inside = np.unique(starts[(at >= 0) & (starts > idle[0][at]) & (starts < idle[1][at])])
    return np.sort(np.concatenate([idle[0], inside])), np.sort(np.concatenate([inside, idle[1]]))


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
    start, end = (
        np.concatenate([np.asarray(of_spans)[outermost], np.asarray(of_calls)])
        for of_spans, of_calls in ((events.spans.start, events.calls.start), (events.spans.end, events.calls.end))
    )
    return times.without(spans, times.union(start, end))


NO_OPERATOR = "no operator"
"""What is said where the host is in none."""


def longest_function(events: TraceEvents, host: Host, spans: times.Intervals) -> tuple[str | None, float]:
    """The Python function of the loop's thread in which the host spent the longest of `spans`, without longer functions
    that it calls, and how long, in microseconds."""
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
    for item, began in enumerate(start.tolist()):
        while around and end[around[-1]] <= began:
            around.pop()
        if around:
            own[around[-1]] -= inside[item]
            if is_library[names[item]]:
                caller[item] = caller[around[-1]]
        around.append(item)
    skipped = _WAITS if events.uses_device else _OF_NOBODY
    own[np.array([skipped.search(text) is not None for text in events.texts], dtype=bool)[names]] = 0.0
    us = np.bincount(caller, own, minlength=len(events.texts))
    longest = int(us.argmax())
    return (events.texts[longest], float(us[longest])) if us[longest] > 0 else (None, 0.0)


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
_OF_NOBODY = re.compile(r"lock|nn\.Module: |_record_function_|torch/(?:autograd/)?profiler")
"""Functions that wait for another thread, modules, whose forward is named too, and the profiler's own."""
_WAITS = re.compile(rf"run_backward|synchronize|{_OF_NOBODY.pattern}")
"""With those that wait for the device, or for the thread that launches backward."""


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


def longest_calls(events: TraceEvents, waits: npt.NDArray[np.bool_], spans: times.Intervals) -> LongCalls | None:
    """The kind of runtime calls in which the host spent the longest of `spans`; None if it spent them outside of such
    calls. Calls that wait for the device (`waits`) and short ones do not count. Modules that are loaded do, where the
    profiler records that by itself, and so does torch.compile while it compiles, whatever it calls."""
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
        by_kind.setdefault(call_kind(events.texts[number]), []).append(number)
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
    names = ", ".join(events.texts[number] for number in long[: 1 if kind == "other" else _MAX_NAMES])
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
_FIRST_CALLS = re.compile(r"^(?:cuda|hip)(?:Free|Malloc)$")
MIN_FLUSHES = 8
"""Long calls that free memory from which an allocator makes them, that runs short of it."""
MAX_CAPTURES = 1000
_BEGINS_CAPTURE, _ENDS_CAPTURE = re.compile(r"StreamBeginCapture"), re.compile(r"StreamEndCapture")
_FREES = re.compile(r"^(?:cuda|hip|cuMem|hipMem)Free(?:_v2)?$")
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
    TORCH_COMPILE: re.compile(r"\(dynamo_timed\)$"),
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


_CHUNK = 2**16  # of the spans at a time, which take hundreds of megabytes in a trace of a gigabyte
