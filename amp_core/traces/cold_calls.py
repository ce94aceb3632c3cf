"""First calls of operators in a trace that lacks the work of the device: there they take far longer than later ones.

>>> cold_calls(events, host, linked)
ColdCalls(us=192700.0, of_us=201900.0, ops={'aten::bmm': (112800.0, 2), 'aten::sum': (26200.0, 1)})

An operator of a device launches and returns within microseconds, whatever its sizes. Its first call loads kernels and
sets up libraries.
"""

import json
import math
import re
from dataclasses import dataclass, field

import numpy as np

from amp_core.traces import intervals as times
from amp_core.traces.events import TraceEvents
from amp_core.traces.gpu_work import LinkedWork
from amp_core.traces.host_alone import host_range
from amp_core.traces.link import Host
from amp_core.traces.operators import is_compiled_code, is_range, is_view
from amp_core.traces.waits import waiting_calls

MIN_FIRST_US, MIN_FIRST_RATIO = 1000.0, 10.0
"""A first call takes so long, and more than so many times as long as the median of the later ones."""
MAX_FIRST_CALLS = 3
"""First calls of one operator, each far longer than those after it: other sizes take other kernels."""
MAX_FEW_CALLS = 2
"""Calls of each operator up to which a trace holds a first pass alone."""
MAX_ELEMENTS = 2**20
"""Where sizes are known, a call on more may compute on the host meanwhile."""
_OTHERS = re.compile(
    r"aten::(?:nonzero|item|is_nonzero|_local_scalar_dense|masked_select|_?unique\w*|equal|copy_|to|_to_copy|"
    r"\w*(?:rand|normal|uniform|bernoulli|exponential)\w*)$|autograd::"
)
"""Operators that wait for the device or copy, and those that draw random numbers, often on the host."""


@dataclass(frozen=True)
class ColdCalls:
    """First calls of operators; times in microseconds."""

    us: float
    of_us: float
    """The time from the first event to the last."""
    ops: dict[str, tuple[float, int]] = field(default_factory=dict)
    """How long they take and how many there are, by operator, the longest first."""


def cold_calls(events: TraceEvents, host: Host, linked: LinkedWork) -> ColdCalls | None:
    """Such calls of a program that uses a device; None without them. A single call of an operator counts where others
    show first calls, or where each operator runs once or twice."""
    whole = host_range(events)
    if not events.uses_device or len(events.work) or not len(linked) or whole is None:
        return None
    us = linked.own_us - _not_its_own(events, host)[linked.op]
    name = np.asarray(events.spans.name)[linked.op]
    is_other = [_OTHERS.match(text) or is_view(text) or is_range(text) or is_compiled_code(text)
                for text in events.texts]  # fmt: skip
    chosen = np.flatnonzero(~np.array([bool(one) for one in is_other], dtype=bool)[name])
    chosen = chosen[np.argsort(linked.start_us[chosen], kind="stable")]
    shapes = np.asarray(events.spans.shapes)[linked.op]
    few = bool(len(chosen)) and int(np.bincount(name[chosen]).max()) <= MAX_FEW_CALLS
    found: dict[str, tuple[float, int]] = {}
    single: dict[str, tuple[float, int]] = {}
    for number in np.unique(name[chosen]).tolist():
        own = chosen[name[chosen] == number]
        its_us = us[own]
        count = _first_ones(its_us)
        if count and _elements(events.texts[shapes[own[0]]] if shapes[own[0]] >= 0 else "[]") < MAX_ELEMENTS:
            into = single if len(own) == 1 else found
            into[events.texts[number]] = float(its_us[:count].sum()), count
    if found or few:
        found |= single
    ops = dict(sorted(found.items(), key=lambda item: -item[1][0]))
    if not ops:
        return None
    return ColdCalls(sum(first_us for first_us, _ in ops.values()), whole[1] - whole[0], ops)


def _first_ones(us: times.Floats) -> int:
    """How many calls, from the first on, are each far longer than those after it."""
    count = 0
    while count < min(MAX_FIRST_CALLS, max(1, len(us) - 1)):
        later = us[count + 1 :]
        if us[count] < MIN_FIRST_US or (len(later) and us[count] <= MIN_FIRST_RATIO * float(np.median(later))):
            break
        count += 1
    return count


def _elements(shapes: str) -> int:
    """The elements of the largest input, by its recorded sizes; 0 where these tell nothing."""
    sizes = [size for size in json.loads(shapes) if isinstance(size, list)]
    return max((math.prod(size) for size in sizes if size and all(isinstance(n, int) for n in size)), default=0)


def _not_its_own(events: TraceEvents, host: Host) -> times.Floats:
    """Of each span, the time in which its calls wait for the device, and the profiler's own, microseconds."""
    calls = events.calls
    waits = waiting_calls(events) & (host.op_of_call >= 0)
    us = np.asarray(calls.end) - np.asarray(calls.start)
    waited: times.Floats = np.bincount(
        host.op_of_call[waits], us[waits].astype(np.float64), minlength=len(events.spans)
    ).astype(np.float64)
    profiling = times.union(np.asarray(events.profiling.start), np.asarray(events.profiling.end))
    if not len(profiling[0]):
        return waited
    return waited + times.overlap_of_each(np.asarray(events.spans.start), np.asarray(events.spans.end), profiling)
