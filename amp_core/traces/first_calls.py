"""Operators and ranges of which the first calls take nearly all of their time: these set up a library, or compile.

>>> first_calls(events, host, linked)
{'aten::cudnn_convolution': (2336000.0, 1)}
"""

import re

import numpy as np
import numpy.typing as npt

from amp_core.traces.events import MARK, OP, TraceEvents
from amp_core.traces.gpu_work import LinkedWork
from amp_core.traces.link import EVALUATE, Host
from amp_core.traces.operators import is_compiled_code, is_range

MIN_FIRST_FRAC = 0.8
"""Share of an operator's time from which its first calls have nearly all of it."""
MAX_FIRST_CALLS = 3
MIN_FIRST_RATIO = 50.0
"""Each of the first calls takes at least that many times as long as the median one; memory that is not cached yet, or
a clock that is still low, costs less."""
MIN_CALLS = 3
SECOND_CALL = 2, 1
"""First calls, and short ones before the others among them, of a function of TorchScript: its second call compiles it
for what the first one got. Such an operator has no namespace."""
_SETS_UP = re.compile(r"StreamCreate|GetSymbolAddress|GetDeviceProperties")
"""In the names of calls that a library makes at its first use within an operator, as for its handle."""
MIN_TRACE_FRAC = 0.05
"""Share of the trace from which such a call is kept: no other operator is named first."""


def first_calls(events: TraceEvents, host: Host, linked: LinkedWork) -> dict[str, tuple[float, int]]:
    """Time in microseconds and number of such first calls, by operator. With the work of a device, the outermost
    operators and the ranges of a program count with all of their time, else all operators with their own, as where the
    host is told: there compiled code counts with what it calls.

    A call of another size may take longer for its size: where sizes are known, a later call has the same. On a CPU
    alone they have to be, but for compiled code, whose first call compiles. A call that sets up a library needs no
    later one.
    """
    spans = events.spans
    start, end, name, shapes = (np.asarray(c) for c in (spans.start, spans.end, spans.name, spans.shapes))
    is_op = np.asarray(spans.kind) == OP
    if not is_op.any():
        return {}
    if len(events.work):
        marked = np.asarray(spans.kind) == MARK
        calls, us = np.flatnonzero(marked | (is_op & (host.parent < 0))), end - start
    else:
        calls = linked.op[linked.serves < 0]
        us = np.bincount(np.where(linked.serves >= 0, linked.serves, linked.op), linked.own_us, minlength=len(name))
    on_cpu, whole_us = not events.uses_device, us
    if not on_cpu and not len(events.work) and not events.launches:
        compiled = np.array([is_compiled_code(text.removeprefix(EVALUATE)) for text in events.texts], dtype=bool)[name]
        whole_us = np.where(compiled, end - start, us)
        around = host.parent
        while (around >= 0).any():
            us = np.where((around >= 0) & compiled[around], 0.0, us)
            around = np.where(around >= 0, host.parent[around], -1)
    total = np.bincount(name[calls], us[calls], minlength=len(events.texts))
    found: dict[str, tuple[float, int]] = {}
    sets_up = _setting_up(events, host) if len(events.work) else np.zeros(len(name), dtype=bool)
    least_us = MIN_TRACE_FRAC * (end.max() - start.min())
    for number in np.flatnonzero((total > 0) & (total >= least_us)).tolist():
        own, op = calls[name[calls] == number], events.texts[number].removeprefix(EVALUATE)
        own = own[np.argsort(start[own], kind="stable")]
        if sets_up[own[0]] and us[own[0]] >= MIN_FIRST_FRAC * total[number]:
            found[op] = float(whole_us[own[0]]), 1
            continue
        counts = [(count, 0) for count in range(1, 1 + min(MAX_FIRST_CALLS, len(own) // MIN_CALLS))]
        if is_op[own[0]] and is_range(op) and len(own) > MIN_CALLS:
            counts.append(SECOND_CALL)
        for count, short in counts:
            first, later = own[:count], own[count:]
            same = later[np.isin(shapes[later], shapes[first])]
            if (
                np.isin(shapes[first], shapes[later]).all()
                and not (on_cpu and (shapes[first] < 0).any() and not is_compiled_code(op))
                and us[first].sum() >= MIN_FIRST_FRAC * total[number]
                and us[first[short:]].min() >= MIN_FIRST_RATIO * max(np.median(us[own]), np.median(us[same]))
            ):
                found[op] = float(whole_us[first].sum()), count
                break
    return found


def _setting_up(events: TraceEvents, host: Host) -> npt.NDArray[np.bool_]:
    """Of each span, whether it is an outermost one within which the host sets up a library."""
    named = np.array([_SETS_UP.search(text) is not None for text in events.texts], dtype=bool)
    op = host.op_of_call[named[np.asarray(events.calls.name, dtype=np.int64)]]
    op = op[op >= 0]
    found = np.zeros(len(events.spans), dtype=bool)
    found[np.where(host.top_of_span[op] >= 0, host.top_of_span[op], op)] = True
    return found
