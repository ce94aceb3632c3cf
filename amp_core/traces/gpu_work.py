"""Link work of a device to what launched it: one entry per kernel, copy or fill; on a CPU, one per operator.

    >>> linked = link_work(events, host)
    >>> linked.op[i], linked.phase[i], linked.launched_us[i]

A kernel names the call that launched it (`correlation`), and the call happened inside an operator. One call launches a
captured graph, and all its kernels name that call. Kernels that name no call in the trace, as on some versions of ROCm,
are linked to the operator whose `External id` they carry; otherwise only their time is known.

A profiler starts while the device still executes what was launched before. Such work has no launch in the trace.
"""

import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from amp_core.hardware.kernel_names import COPIES, classify_kernel
from amp_core.traces.events import OP, RUNTIMES, Calls, TraceEvents, Work
from amp_core.traces.link import UNMARKED, Floats, Host, Ints
from amp_core.traces.phases import infer_phases

Bools = npt.NDArray[np.bool_]


@dataclass
class LinkedWork:
    """Arrays of one length. -1 is none; `op` and `top` number spans, `module` is an index into `Host.modules`."""

    name: Ints
    start_us: Floats
    end_us: Floats
    own_us: Floats
    """Self time: all of a kernel's time, an operator's time less that of the operators inside it."""
    launched_us: Floats
    """Time of the launch; minus infinity for work that was launched before the trace began."""
    returned_us: Floats
    """When the launching call returned; the same as `launched_us` where no call is known."""
    in_graph: Bools
    """Whether it is part of a captured graph that the call launched."""
    blocking_calls: Ints
    """Calls that returned only when their copy to the host had ended: those from the device to pageable memory."""
    device: Ints
    """-1 is the CPU."""
    stream: Ints
    """-1 where it is not known, and on the CPU."""
    op: Ints
    serves: Ints
    """On a CPU, the product that a copy, fill, allocation or view serves (`join_products`); -1 for other work."""
    top: Ints
    module: Ints
    phase: Ints

    def __len__(self) -> int:
        return len(self.name)


def link_work(events: TraceEvents, host: Host) -> LinkedWork:
    """Work of the devices, or operators of the CPU in a trace without a device."""
    return _link_work(events, host) if len(events.work) else _link_operators(events, host)


def _link_work(events: TraceEvents, host: Host) -> LinkedWork:
    work, calls = events.work, events.calls
    call = _calls(work, calls)
    known = call >= 0
    start = np.asarray(work.start)
    op, module = np.full((2, len(work)), -1, np.int32)
    region = np.zeros(len(work), np.int8)
    launched, returned, in_graph = start.copy(), start.copy(), np.zeros(len(work), dtype=bool)
    if len(calls):
        graphs = np.array([_GRAPH_LAUNCH.search(text) is not None for text in events.texts], dtype=bool)
        in_graph[known] = graphs[np.asarray(calls.name)[call[known]]]
        op[known] = host.op_of_call[call[known]]
        module[known] = host.module_of_call[call[known]]
        region[known] = host.region_of_call[call[known]]
        launched[known] = np.asarray(calls.start)[call[known]]
        returned[known] = np.asarray(calls.end)[call[known]]
    external = np.asarray(work.external)
    # Some versions write the correlation there too, which would name an arbitrary operator.
    unlinked = op < 0 if events.accelerator == "npu" else ~known  # an NPU's work is launched outside of its operator
    by_id = unlinked & (external >= 0) & ((external != np.asarray(work.correlation)) | known)
    if by_id.any() and len(events.spans):
        is_op = np.asarray(events.spans.kind) == OP
        match = _matching(external[by_id], np.where(is_op, np.asarray(events.spans.external), -1))
        # Work that begins before an operator is none of its own: the number is another one's.
        follows = (match >= 0) & (np.asarray(events.spans.start)[match] <= start[by_id])
        where = np.flatnonzero(by_id)[follows]
        span = match[follows]
        op[where], module[where], region[where] = span, host.module_of_span[span], host.region_of_span[span]
        unknown = ~known[where]
        launched[where[unknown]] = returned[where[unknown]] = np.asarray(events.spans.start)[span[unknown]]
    before = _launched_before(work, known | (op >= 0))
    launched[before] = returned[before] = -np.inf
    # Nothing is known of work launched before the trace began; the phase at its own time is that of other work.
    phase = infer_phases(host, region, launched)
    phase[~known & (op < 0)] = UNMARKED
    return LinkedWork(
        name=np.asarray(work.name),
        start_us=start,
        end_us=np.asarray(work.end),
        own_us=np.asarray(work.end) - start,
        launched_us=launched,
        returned_us=returned,
        in_graph=in_graph,
        blocking_calls=_blocking_calls(events, call, returned),
        device=np.asarray(work.device),
        stream=np.asarray(work.stream),
        op=op,
        serves=np.full(len(work), -1, np.int32),
        top=_top(host, op),
        module=module,
        phase=phase,
    )


_GRAPH_LAUNCH, _WHOLE_GRAPH = re.compile(r"GraphLaunch|GraphExec|ExecuteGraph"), re.compile(r"GraphLaunch|ExecuteGraph")


def call_of_work(events: TraceEvents) -> Ints:
    """The number of the call that launched each work; -1 where it is not in the trace."""
    return _calls(events.work, events.calls)


def _calls(work: Work, calls: Calls) -> Ints:
    """The call that launched each work; -1 is none. Some versions of ROCm write the correlation as `External id`."""
    key, among = _correlation(work), np.asarray(calls.correlation)
    if not (key >= 0).any() and not (among >= 0).any():
        key, among = np.asarray(work.external), -2 - among
    return _matching(key, np.where(among >= 0, among, -1))


def _correlation(work: Work) -> Ints:
    """The correlation of each work; -1 is none. A profiler that writes 0 for several of them knows none of these."""
    correlation = np.asarray(work.correlation)
    return np.where(correlation == 0, -1, correlation) if (correlation == 0).sum() > 1 else correlation


def launches_without_work(events: TraceEvents) -> tuple[int, int, bool]:
    """How many launches of kernels lack their kernel in the trace, how many there are, and whether it is the last ones
    that lack it; zeros where kernels name no launch, and with captures of graphs, whose launches run nothing."""
    start, missing = _kernel_launches(events)
    if captures_graphs(events) or missing.all():
        return 0, 0, False
    are_last = bool(missing.any() and start[missing].min() > start[~missing].max())
    return int(missing.sum()), len(missing), are_last


def unrecorded_from_us(events: TraceEvents) -> float:
    """When the first launch begins from which on no launch has its kernel in the trace; infinity where the last launch
    has it, and where that is not known (`launches_without_work`)."""
    start, missing = _kernel_launches(events)
    if captures_graphs(events) or missing.all():
        return np.inf
    return float(start[missing & (start > start[~missing].max())].min(initial=np.inf))


def _kernel_launches(events: TraceEvents) -> tuple[Floats, Bools]:
    """When each launch of a kernel begins, and whether its kernel is missing in the trace."""
    launches = _named_calls(events, _KERNEL_LAUNCH)
    correlation, start = np.asarray(events.calls.correlation)[launches], np.asarray(events.calls.start)[launches]
    return start, (correlation >= 0) & ~np.isin(correlation, np.asarray(events.work.correlation))


def may_lack_work(events: TraceEvents, until_us: float) -> bool:
    """Whether a launch that begins before that time, of a kernel or a captured graph, lacks work in the trace. Where
    kernels name no launch, whether there are more launches than kernels. Launches within captures run nothing: with
    these, only what is launched behind the last one counts."""
    start, missing = _kernel_launches(events)
    if len(missing) and missing.all():
        return len(missing) > len(events.work)
    captured_us = np.asarray(events.calls.start)[_named_calls(events, _CAPTURE)].max(initial=-np.inf)
    begun = np.concatenate([start[missing & (start > captured_us)], _unfinished_graphs(events)])
    return bool((begun < until_us).any())


def _unfinished_graphs(events: TraceEvents) -> Floats:
    """When the launches of captured graphs begin that have no work in the trace; and the last one, if no other launch
    shows that as much work is all of it."""
    launches = np.flatnonzero(_named_calls(events, _WHOLE_GRAPH))
    start, correlation = (np.asarray(of_calls)[launches] for of_calls in (events.calls.start, events.calls.correlation))
    known = correlation >= 0
    start, correlation = start[known], correlation[known]
    if not len(start):
        return start
    of_work = np.sort(np.asarray(events.work.correlation))
    count = np.searchsorted(of_work, correlation, side="right") - np.searchsorted(of_work, correlation, side="left")
    last = int(start.argmax())
    lacking = count == 0
    lacking[last] |= not np.isin(count[last], np.delete(count, last))
    lacks: Floats = start[lacking]
    return lacks


def captures_graphs(events: TraceEvents) -> bool:
    """Whether the program captures graphs: launches within a capture run nothing."""
    return any(_CAPTURE.search(text) for text in events.texts)


def _named_calls(events: TraceEvents, pattern: "re.Pattern[str]") -> Bools:
    """Which calls have a name that contains the pattern."""
    matches = np.array([pattern.search(text) is not None for text in events.texts], dtype=bool)
    named: Bools = matches[np.asarray(events.calls.name, dtype=np.int64)]
    return named


def launches_block(events: TraceEvents, linked: LinkedWork) -> bool:
    """Whether each launch of a kernel returns only when the kernel has ended, as with CUDA_LAUNCH_BLOCKING=1 or in a
    debugger; also where launches of graphs do not. False where too few kernels are long enough to tell."""
    computes = np.array([classify_kernel(text).category not in COPIES for text in events.texts], dtype=bool)
    is_long = linked.end_us - linked.start_us >= MIN_TELLING_US
    by_call = (linked.returned_us > linked.launched_us) & (linked.start_us >= linked.launched_us)
    tells = computes[linked.name] & is_long & by_call & ~linked.in_graph
    waited = linked.returned_us[tells] >= linked.end_us[tells]
    return len(waited) >= MIN_TELLING and float(waited.mean()) >= MIN_WAITED_FRAC


MIN_TELLING, MIN_TELLING_US = 20, 20.0
"""Kernels, and time of each, from which they tell whether launches wait: one that does not wait takes some
microseconds, and may return after a shorter kernel's end."""
MIN_WAITED_FRAC = 0.95
"""Share of launches that end after their kernels from which all wait; of a host that runs ahead, hardly any does."""
_KERNEL_LAUNCH = re.compile(rf"^(?:{RUNTIMES})(?:Module|Ext)?Launch(?:Cooperative)?Kernel")
_CAPTURE = re.compile(r"(?:Begin|End)Capture")


def _blocking_calls(events: TraceEvents, call: Ints, returned: Floats) -> Ints:
    work = events.work
    to_host = np.array([TO_HOST.search(text) is not None for text in events.texts], dtype=bool)
    blocked: Bools = (call >= 0) & (returned >= np.asarray(work.end))
    result: Ints = call[blocked & to_host[np.asarray(work.name)]]
    return result


TO_HOST = re.compile(r"[Mm]em(?:cpy|Copy)\w* ?D(?:evice)?toH|CopyDeviceToHost|MEMCPY_DtoH")
"""In the names of copies to the host."""


def _launched_before(work: Work, linked: Bools) -> Bools:
    """Which work was launched before the trace began: it has no launch in the trace, and either comes first on its
    stream (streams run in order) or has a smaller correlation than all launches of the trace (they count up)."""
    if linked.all() or not linked.any():
        return np.zeros(len(work), dtype=bool)
    start, correlation = np.asarray(work.start), _correlation(work)
    place = np.unique(np.stack([np.asarray(work.device), np.asarray(work.stream)]), axis=1, return_inverse=True)[1]
    place = place.reshape(-1)
    first = np.full(place.max() + 1, np.nan)
    np.fmin.at(first, place[linked], start[linked])
    launches = correlation[linked & (correlation >= 0)]
    earlier = (correlation >= 0) & (correlation < launches.min()) if len(launches) else np.zeros(len(work), dtype=bool)
    result: Bools = ~linked & ((start < first[place]) | earlier)
    return result


def _link_operators(events: TraceEvents, host: Host) -> LinkedWork:
    spans = events.spans
    ops = np.flatnonzero(np.asarray(spans.kind) == OP).astype(np.int32)
    start, end = np.asarray(spans.start)[ops], np.asarray(spans.end)[ops]
    parent = host.parent[ops]
    inner = np.bincount(parent[parent >= 0], (end - start)[parent >= 0], minlength=len(spans))[ops]
    own = np.maximum(end - start - inner - host.watched_us[ops], 0.0)
    return LinkedWork(
        name=np.asarray(spans.name)[ops],
        start_us=start,
        end_us=end,
        own_us=own,
        launched_us=start,
        returned_us=start,
        in_graph=np.zeros(len(ops), dtype=bool),
        blocking_calls=np.zeros(0, np.int64),
        device=np.full(len(ops), -1, np.int32),
        stream=np.full(len(ops), -1, np.int64),
        op=ops,
        serves=np.full(len(ops), -1, np.int32),
        top=_top(host, ops),
        module=host.module_of_span[ops],
        phase=infer_phases(host, host.region_of_span[ops], start),
    )


def _top(host: Host, op: Ints) -> Ints:
    """The outermost operator around each, or itself."""
    if not len(host.top_of_span):
        return op
    top = np.where(op >= 0, host.top_of_span[op], -1)
    return np.where(top >= 0, top, op)


def _matching(keys: Ints, among: Ints) -> Ints:
    """Index of the first occurrence of each key in `among`; -1 where there is none, and for key -1."""
    if not len(among):
        return np.full(len(keys), -1)
    order = np.argsort(among, kind="stable")
    at = np.minimum(np.searchsorted(among[order], keys), len(among) - 1)
    match = order[at]
    return np.where((keys >= 0) & (among[match] == keys), match, -1)
