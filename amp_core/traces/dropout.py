"""The time of dropout in traces of a CPU.

>>> dropout_time(events)
DropoutTime(us=4420.0)
"""

import re
from dataclasses import dataclass

import numpy as np

from amp_core.traces import intervals as times
from amp_core.traces.events import OP, TraceEvents

_DROPOUT = re.compile(r"aten::(?:(?:feature_)?(?:alpha_)?dropout_?|native_dropout|_fused_dropout)$")


@dataclass(frozen=True)
class DropoutTime:
    """Calls of dropout, with all that they call; in attention, too."""

    us: float


def dropout_time(events: TraceEvents) -> DropoutTime | None:
    """That of a trace of a CPU; None without dropout."""
    if events.uses_device:
        return None
    spans, is_dropout = events.spans, np.array([_DROPOUT.match(text) is not None for text in events.texts], dtype=bool)
    chosen = np.flatnonzero(np.asarray(spans.kind) == OP)
    chosen = chosen[is_dropout[np.asarray(spans.name)[chosen]]]
    start, end, thread = (np.asarray(column)[chosen] for column in (spans.start, spans.end, spans.thread))
    us = 0.0
    for one in np.unique(thread).tolist():  # dropout may call dropout
        us += times.total(times.union(start[thread == one], end[thread == one]))
    return DropoutTime(us) if us > 0 else None
