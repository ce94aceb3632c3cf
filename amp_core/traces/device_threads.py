"""Whether backward shows a device that was not recorded: autograd runs that of a CPU on the thread that calls it, and
that of a device on a thread of this device (`torch/csrc/autograd/engine.cpp`).

>>> operators_on_device_threads(events)
197
"""

import re

import numpy as np

from amp_core.traces import intervals as times
from amp_core.traces.events import OP, TraceEvents
from amp_core.traces.link import EVALUATE

MAX_OTHERS_FRAC = 0.05
"""Share of operators outside of backward's nodes with less than which a thread is one of autograd's own."""
_ON_OTHER_THREADS = re.compile(r"rpc_|.*(?:mkldnn|onednn|_for_cpu$)")
"""Operators of a backward that is distributed, which has threads of its own on a CPU, and those of a CPU alone."""


def operators_on_device_threads(events: TraceEvents) -> int:
    """How many operators run in backward, if all of it is on threads that run nothing else, and most of forward on
    others; else 0."""
    is_node = np.array([text.startswith(EVALUATE) for text in events.texts], dtype=bool)
    if not is_node.any() or any(map(_ON_OTHER_THREADS.match, events.texts)):
        return 0
    spans = events.spans
    start, end, thread, name = (np.asarray(column) for column in (spans.start, spans.end, spans.thread, spans.name))
    is_op = np.asarray(spans.kind) == OP
    node = is_op & is_node[name]
    within = 0
    for one in np.unique(thread[node]):
        here = (thread == one) & is_op
        nodes = times.union(start[here & node], end[here & node])
        outside = int((times.overlap_of_each(start[here], end[here], nodes) < (end - start)[here] / 2).sum())
        if outside > MAX_OTHERS_FRAC * here.sum():
            return 0
        within += int(here.sum()) - outside
    return within if within < is_op.sum() / 2 else 0
