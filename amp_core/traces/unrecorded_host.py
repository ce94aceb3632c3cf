"""What a host does that launches work which the trace lacks: where it is the longest, and what it reads back.

>>> unrecorded_host(events, host)
UnrecordedHost(name='solver.py(524): matvec', us=21973.0, of_us=31764.0, launches=105, is_function=True, …,
               masks=('aten::index', 'aten::index_put_'), masks_us=6460.0, lookups=8, lookups_us=4210.0, waits=False)
"""

import re
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from amp_core.traces import intervals as times
from amp_core.traces.collect import LAUNCHES
from amp_core.traces.events import OP, TraceEvents
from amp_core.traces.host_alone import host_range
from amp_core.traces.host_functions import ASLEEP, launches_in, longest_function
from amp_core.traces.host_spans import longest_op
from amp_core.traces.link import Host
from amp_core.traces.waits import is_wait

_READS = re.compile(r"aten::(?:nonzero|item|is_nonzero|_local_scalar_dense|masked_select|_?unique\w*|equal)$")
"""Operators whose result the host has to read."""
_MASKED = re.compile(r"aten::(?:index|index_put_?|_index_put_impl_)$")
"""Operators that take boolean masks, and then call `aten::nonzero` to find where these are true."""
_COPIES = re.compile(r"Memcpy")


@dataclass(frozen=True)
class UnrecordedHost:
    """The host of a trace with launches and without kernels; times in microseconds."""

    name: str
    """The Python function in which the host is the longest, or the operator; "" where nothing tells."""
    us: float
    of_us: float
    """The time from the first event to the last."""
    launches: int
    """How many launches it makes in that function; 0 of an operator."""
    is_function: bool = False
    reads: int = 0
    """How often the host reads back from the device, beside masks."""
    reads_us: float = 0.0
    read_op: str = ""
    """The operator that does so for the longest."""
    masks: tuple[str, ...] = ()
    """Operators that look for where a boolean mask is true, and how long they take."""
    masks_us: float = 0.0
    lookups: int = 0
    """How often they do, for how long, and whether the host waits for the device then: a mask may be on the host."""
    lookups_us: float = 0.0
    waits: bool = False


def unrecorded_host(events: TraceEvents, host: Host) -> UnrecordedHost | None:
    """That of such a trace; None for others."""
    whole = host_range(events)
    if not events.launches or len(events.work) or not len(events.spans) or whole is None:
        return None
    low, high = whole
    on_loop = np.asarray(events.frames.thread) == host.loop_thread
    if on_loop.any():
        low = min(low, float(np.asarray(events.frames.start)[on_loop].min()))
        high = max(high, float(np.asarray(events.frames.end)[on_loop].max()))
    everything = (np.array([low]), np.array([high]))
    function, function_us = longest_function(events, host, everything)
    op, op_us = longest_op(events, host, everything)
    is_function = function is not None and function_us >= op_us
    launching = np.array([LAUNCHES.search(text) is not None for text in events.texts], dtype=bool)
    launched = np.asarray(events.calls.start)[launching[np.asarray(events.calls.name)]]
    launches = launches_in(events, host, function, launched) if is_function else 0
    name, us = (function, function_us) if is_function else (op, op_us)
    if function is not None and is_function:  # with what the profiler does in it
        its = on_loop & (np.asarray(events.frames.name) == events.texts.index(function.removesuffix(ASLEEP)))
        us = times.total(times.union(np.asarray(events.frames.start)[its], np.asarray(events.frames.end)[its]))
    place = UnrecordedHost(name or "", us, high - low, launches, is_function)
    return _with_reads(place, events, host)


def _with_reads(place: UnrecordedHost, events: TraceEvents, host: Host) -> UnrecordedHost:
    """The same, with what reads back, and masks. An operator reads back from a device only where a call within it
    copies or waits."""
    spans = events.spans
    start, end, name = (np.asarray(column) for column in (spans.start, spans.end, spans.name))
    reads, masked = (
        (np.array([pattern.match(text) is not None for text in events.texts], dtype=bool)[name])
        & (np.asarray(spans.kind) == OP)
        for pattern in (_READS, _MASKED)
    )
    calling = np.array([_COPIES.search(text) is not None or is_wait(text) for text in events.texts], dtype=bool)
    calls = calling[np.asarray(events.calls.name)] & (host.op_of_call >= 0)
    waiting = {_outermost(op, reads, host) for op in np.unique(host.op_of_call[calls]).tolist()} - {-1}
    lookups = {_outermost(op, reads, host) for op in np.flatnonzero(reads).tolist()}
    mask_of = {op: mask for op in lookups if (mask := _outermost(op, masked, host)) >= 0}
    others = waiting - mask_of.keys()
    reading, looking, masking = (
        np.array(sorted(one), dtype=np.int64) for one in (others, mask_of, set(mask_of.values()))
    )
    us = np.bincount(name[reading], (end - start)[reading], minlength=len(events.texts))
    return replace(
        place,
        reads=len(reading),
        reads_us=times.total(times.union(start[reading], end[reading])),
        read_op=events.texts[int(us.argmax())] if len(reading) else "",
        masks=tuple(sorted({events.texts[number] for number in name[masking].tolist()})),
        masks_us=times.total(times.union(start[masking], end[masking])),
        lookups=len(looking),
        lookups_us=times.total(times.union(start[looking], end[looking])),
        waits=bool(waiting & mask_of.keys()),
    )


def _outermost(op: int, chosen: npt.NDArray[np.bool_], host: Host) -> int:
    """The outermost of the chosen spans around an operator, itself among them; -1 without one."""
    found = -1
    while op >= 0:
        found = op if chosen[op] else found
        op = int(host.parent[op])
    return found
