"""What keeps the host busy the longest, in a trace that lacks the work of the device.

>>> longest_host_part(events, host, link_work(events, host))
HostPart(kind='idle-device', name='aten::normal_', frac=0.8)
>>> longest_timed_op(events)                  # where torch timed operators on the device, up to PyTorch 1.7
('aten::cudnn_convolution', 0.97)
"""

import re
from dataclasses import dataclass, replace

import numpy as np

from amp_core.traces import intervals as times
from amp_core.traces.events import OP, TraceEvents
from amp_core.traces.gpu_work import LinkedWork
from amp_core.traces.host_spans import READING, outside_operators
from amp_core.traces.link import BACKWARD, DATA, OPTIMIZER, Host
from amp_core.traces.loading import marked_time
from amp_core.traces.long_calls import TORCH_COMPILE, longest_calls
from amp_core.traces.operators import is_compiled_code, is_range
from amp_core.traces.waits import waiting_calls

MIN_HOST_FRAC = 0.2
"""Share of the time from which the longest part is named."""
MIN_NAMED_FRAC = 1 / 3
"""Share of the time from which a part is named before a longer time in no operator."""


@dataclass(frozen=True)
class HostPart:
    """One part of the host's time."""

    kind: str
    """`data`: loading data. `compiling`: torch.compile compiles. `calls`: calls into the device's runtime that do not
    wait for the device. `idle-device`: an operator that never calls into the runtime. `optimizer`: steps of the
    optimizer. `any-op`: an operator of a trace without launches, which may launch or wait itself, with those it calls.
    `waiting`: in such a trace, reading values of the device, with a call of the optimizer that waits. `range`: a range
    of the program's own, without the operators in it. `outside`: no operator and no call. `backward`: the same within a
    mark of backward, whose own threads were not recorded."""
    name: str
    """Name of the operator, or of the longest calls; "" for the others."""
    frac: float
    """Share of the time from the first event to the last."""
    call: str = ""
    """Of the optimizer, and of waiting: the operator of which one call takes most of the optimizer's time, far longer
    than its others; "" without one."""
    call_us: float = 0.0
    """How long that call takes, microseconds."""
    cause: str = ""
    """Of `any-op`, if its calls take about equally long: `launching`, or `waiting` for the device too, as it has to."""
    us: float = 0.0
    """How long it takes, microseconds."""


def longest_host_part(events: TraceEvents, host: Host, linked: LinkedWork) -> HostPart | None:
    """The longest part of the host's time; None if it is below `MIN_HOST_FRAC`. `linked` are the operators."""
    if not len(linked):
        return None
    spans = events.spans
    if (whole_range := host_range(events)) is None:
        return None
    first, last = whole_range
    whole = np.where(linked.serves >= 0, linked.serves, linked.op)
    us = np.bincount(np.asarray(spans.name)[whole], linked.own_us, minlength=len(events.texts))
    if events.launches:
        calling = host.op_of_call[host.op_of_call >= 0]
        us[np.unique(np.asarray(spans.name)[calling])] = 0.0
    ranges = np.array([is_range(text) and not is_compiled_code(text) for text in events.texts], dtype=bool)
    ranges &= any("::" in text for text in events.texts)
    in_range_us, us = np.where(ranges, us, 0.0), np.where(ranges, 0.0, us)
    longest, longest_range = int(us.argmax()), int(in_range_us.argmax())
    if events.launches:
        longest_op = HostPart("idle-device", events.texts[longest], float(us[longest]))
    else:
        of_name = np.asarray(spans.name) == longest
        whole_us = times.total(times.union(np.asarray(spans.start)[of_name], np.asarray(spans.end)[of_name]))
        longest_op = HostPart("any-op", events.texts[longest], whole_us)
    optimizing = marked_time(host, OPTIMIZER)
    held = _held_call(events, optimizing, times.total(optimizing))
    parts = [
        longest_op,
        HostPart("range", events.texts[longest_range], float(in_range_us[longest_range])),
        HostPart("data", "", times.total(marked_time(host, DATA))),
        HostPart("optimizer", "", times.total(optimizing), *held),
    ]
    if not events.launches:
        parts.append(_waiting(events, *held))
    everything = (np.array([first]), np.array([last]))
    in_calls = longest_calls(events, waiting_calls(events), everything)
    if in_calls is not None:
        kind = "compiling" if in_calls.kind == TORCH_COMPILE else "calls"
        parts.append(HostPart(kind, in_calls.names, in_calls.us))
    part = max(parts, key=lambda part: part.frac)
    if part.frac < MIN_NAMED_FRAC * (last - first):
        marked = times.merged(marked_time(host, DATA), optimizing)
        outside = times.without(outside_operators(events, host, everything), marked)
        backward_us = times.overlap(outside, marked_time(host, BACKWARD))
        rest = HostPart("outside", "", times.total(outside) - backward_us)
        part = max(part, HostPart("backward", "", backward_us), rest, key=lambda part: part.frac)
    frac = part.frac / (last - first)
    if frac < MIN_HOST_FRAC:
        return None
    return replace(part, frac=min(frac, 1.0), cause=_cause(events, part), us=part.frac)


def host_range(events: TraceEvents) -> tuple[float, float] | None:
    """When the first span or call of the host starts, and the last one ends; None without any that lasts."""
    spans, calls = events.spans, events.calls
    lasting = np.asarray(calls.end) > np.asarray(calls.start)  # memory may be freed long after all of it
    first = min([*spans.start, *np.asarray(calls.start)[lasting].tolist()], default=0.0)
    last = max([*spans.end, *np.asarray(calls.end)[lasting].tolist()], default=0.0)
    return (first, last) if first < last else None


MIN_EVEN_CALLS, MAX_EVEN_RATIO, MAX_FIRST_FRAC = 10, 2.0, 0.1
"""Calls from which it is known what they take, times the median of them up to which they take about equally long, and
share of their time in the first one up to which that is not to blame."""
_WAITS = re.compile(r"aten::(?:nonzero|item|is_nonzero|_local_scalar_dense|masked_select|_?unique\w*|equal)$")
"""Operators whose result the host has to know before it goes on."""


def _cause(events: TraceEvents, part: HostPart) -> str:
    """What the calls of an operator of a trace without launches do, where their times tell it; else empty."""
    if part.kind != "any-op":
        return ""
    start, end, name = (np.asarray(column) for column in (events.spans.start, events.spans.end, events.spans.name))
    calls = np.flatnonzero(name == events.texts.index(part.name))
    us = (end - start)[calls][np.argsort(start[calls], kind="stable")]
    if len(us) < MIN_EVEN_CALLS or us[0] > MAX_FIRST_FRAC * us.sum():
        return ""
    if _WAITS.match(part.name):
        return "waiting"
    return "launching" if us.max() < MAX_EVEN_RATIO * np.median(us) else ""


MIN_HELD_FRAC = 0.5
"""Share of a part of the host's time from which one call is told."""
MIN_HELD_RATIO = 20.0
"""A call that takes that many times as long as the median of its operator waits: the device's queue is full."""
MIN_CALLS = 4


def _held_call(events: TraceEvents, within: times.Intervals, us: float) -> tuple[str, float]:
    """The operator of which one call takes most of `us`, time that is `within`, and how long; "" and 0 without one."""
    if not len(within[0]):
        return "", 0.0
    start, end, name = (np.asarray(column) for column in (events.spans.start, events.spans.end, events.spans.name))
    inside = (np.asarray(events.spans.kind) == OP) & (times.overlap_of_each(start, end, within) > 0)
    if not inside.any():
        return "", 0.0
    took = np.where(inside, end - start, 0.0)
    longest = int(took.argmax())
    alike = (end - start)[name == name[longest]]
    held = took[longest] >= max(MIN_HELD_FRAC * us, MIN_HELD_RATIO * float(np.median(alike)))
    return (events.texts[name[longest]], float(took[longest])) if held and len(alike) >= MIN_CALLS else ("", 0.0)


def _waiting(events: TraceEvents, held_op: str, held_us: float) -> HostPart:
    """Reading values of the device, by the operator that does so the longest, with the call of the optimizer that
    waits."""
    spans, reading = events.spans, [n for n, text in enumerate(events.texts) if text in READING and text != held_op]
    start, end, name = (np.asarray(column) for column in (spans.start, spans.end, spans.name))
    reads = np.isin(name, reading)
    if not reads.any():
        return HostPart("waiting", "", 0.0)
    us = times.total(times.union(start[reads], end[reads]))
    longest = int(np.bincount(name[reads], (end - start)[reads]).argmax())
    return HostPart("waiting", events.texts[longest], us + held_us, held_op, held_us)


def longest_timed_op(events: TraceEvents) -> tuple[str, float] | None:
    """Name of the operator with the most time of its own on the device, by torch's events around operators, and its
    share of that of all operators. None for a trace without such times."""
    timed = events.timed
    if not len(timed):
        return None
    start, end, name = np.asarray(timed.start), np.asarray(timed.end), np.asarray(timed.name)
    order = np.lexsort((-end, start))
    start, end, name = start[order], end[order], name[order]
    own, around = end - start, list[int]()
    for item, began in enumerate(start.tolist()):
        while around and end[around[-1]] <= began:
            around.pop()
        if around:
            own[around[-1]] -= end[item] - start[item]
        around.append(item)
    us = np.bincount(name, np.maximum(own, 0.0), minlength=len(events.texts))
    longest = int(us.argmax())
    return (events.texts[longest], float(us[longest] / us.sum())) if us.sum() > 0 else None
