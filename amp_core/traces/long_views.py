"""The longest call of an operator that computes nothing and moves nothing, as `aten::view`.

>>> long_view(events, host, linked)
LongView(op='aten::t', us=1534.0, place=1, calls=24)

Such a call takes microseconds. It takes longer the first time, when its code is loaded, or where its thread is
interrupted.
"""

from dataclasses import dataclass

import numpy as np

from amp_core.traces.events import TraceEvents
from amp_core.traces.gpu_work import LinkedWork
from amp_core.traces.link import DATA, Host
from amp_core.traces.operators import is_view


@dataclass(frozen=True)
class LongView:
    """The longest call of an operator that computes nothing."""

    op: str
    us: float
    """Its time with the views that it calls, microseconds."""
    place: int
    """Which of the calls of that operator it is, from 1 on."""
    calls: int
    """How many calls of that operator there are."""


def long_view(events: TraceEvents, host: Host, linked: LinkedWork) -> LongView | None:
    """That call in a trace of a CPU, beside loading data; None without one."""
    if events.uses_device or not len(linked):
        return None
    names = np.asarray(events.spans.name)[linked.op]
    views = np.array([is_view(text) for text in events.texts], dtype=bool)[names]
    views &= host.region_of_span[linked.op] != DATA
    if not views.any():
        return None
    us = linked.end_us - linked.start_us
    longest = int(np.where(views, us, -1.0).argmax())
    same = np.flatnonzero(views & (names == names[longest]))
    place = int((linked.start_us[same] <= linked.start_us[longest]).sum())
    return LongView(events.texts[names[longest]], float(us[longest]), place, len(same))
