"""Work of Huawei's NPUs in traces of torch_npu (`trace_view.json`).

    >>> rows = AscendRows()
    >>> rows.add(event, start_us=3.0, duration_us=4.0)        # each event without a category
    >>> rows.add_arrow(event, at_us=3.0)                      # each arrow
    >>> rows.linked()[0].name
    'aclnnMm_MatMulCommon_MatMulV2'

Such a trace has the operators of torch, with their categories. All else has none: rows of the NPU's streams (with a
`Task Type`), whole collectives (`hcom_allReduce__868_0_1`), calls of the host into CANN (with a `Mode`), and sums of
these. Arrows link them: `async_npu` from the start of an operator to the start of a row that it causes, `HostToDevice`
from the moment of the launch, on a thread of its own, to the same row. Rows that no operator causes are waits, records
of events, and parts of collectives, which are counted whole.
"""

import json
import math
import re
from array import array
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from amp_core.traces.events import MAX_NAME_CHARS, MAX_NAMED_RANKS, OP, InternedTexts, TraceEvents

OPERATOR_ARROW, LAUNCH_ARROW = "async_npu", "HostToDevice"
_COLLECTIVE = "hcom_"
_COLLECTIVE_STREAMS = 1_000_000
"""Added to the number of a collective's row, which is none of the streams that the others count."""
WAIT = "Notify_Wait"
"""The part of a collective in which HCCL waits on a rank (`src rank`) for another one (`dst rank`)."""
_CALL = "AscendCL@"

_COLLECTIVE_NAME = re.compile(r"hcom_([A-Za-z]+)_+(\d+)_")
"""Kind and group of a collective: torch_npu ends the kind with the last digits of the group's identifier."""
_COUNTED = ("allReduce", "broadcast", "reduce")
"""Collectives whose `count` is the whole message. For others it is the part of one rank, of a number not recorded."""
_TYPES = {"BFP16": "bfloat16"}
"""HCCL's names of types that are no other's."""

Place = tuple[str, float]
"""Number of a row or thread as text, and a time of the trace in microseconds."""


@dataclass(frozen=True)
class NpuWork:
    """One kernel, copy or collective of an NPU; times of the trace in microseconds."""

    name: str
    start_us: float
    end_us: float
    stream: int
    operator: Place
    """Thread and start of the operator that causes it."""
    launch: Place
    """Thread and time of its launch; the operator's where the trace has none."""
    message: str = ""
    """Of a collective: JSON of what it carries, as in `TraceEvents.messages_of_work`."""


@dataclass
class AscendRows:
    """Collects the rows of NPUs and the arrows to them."""

    _rows: dict[Place, NpuWork] = field(default_factory=dict)
    _begins: dict[tuple[str, str], Place] = field(default_factory=dict)
    """By kind and identifier of an arrow: where it begins on the host."""
    _ends: dict[tuple[str, Place], str] = field(default_factory=dict)
    """By kind of an arrow and the row at which it ends: its identifier."""
    named_ranks: int = 0
    """One more than the largest rank that a part of a collective names."""
    waits_us: dict[tuple[int, int], float] = field(default_factory=dict)
    """By this rank and another one: how long collectives wait for the other, as `WAIT` names it."""

    def __len__(self) -> int:
        return len(self._rows) + len(self._begins) + len(self._ends)

    def add(self, event: dict[str, Any], start_us: float, duration_us: float) -> bool:
        """Add a row of the NPU, if `event` is one. Whether it is a call of the host instead."""
        arguments, name = event.get("args"), event.get("name")
        if not isinstance(arguments, dict) or not isinstance(name, str):
            return False
        if "Mode" in arguments:
            return name.startswith(_CALL)
        ranks = [rank for key in ("src rank", "dst rank") if (rank := _rank(arguments.get(key))) is not None]
        self.named_ranks = max(self.named_ranks, *(rank + 1 for rank in ranks), 0)
        if name == WAIT and len(ranks) == 2 and len(self.waits_us) < MAX_NAMED_RANKS:
            pair = (ranks[0], ranks[1])
            self.waits_us[pair] = self.waits_us.get(pair, 0.0) + duration_us
        collective = name.startswith(_COLLECTIVE)
        if collective or "Task Type" in arguments:
            row = str(event.get("tid"))[:40]
            number = int(row) if row.isdecimal() and len(row) < 10 else 0
            stream = number + _COLLECTIVE_STREAMS * collective
            place = (row, start_us)
            message = _message(name, arguments) if collective else ""
            self._rows.setdefault(place, NpuWork(name, start_us, start_us + duration_us, stream, place, place, message))
        return False

    def add_arrow(self, event: dict[str, Any], at_us: float) -> None:
        """Add one end of an arrow of `OPERATOR_ARROW` or `LAUNCH_ARROW`."""
        kind, number = str(event.get("cat")), str(event.get("id"))[:40]
        place = (str(event.get("tid"))[:40], at_us)
        if event.get("ph") == "s":
            self._begins[kind, number] = place
        elif event.get("ph") == "f":
            self._ends[kind, place] = number

    def linked(self) -> list[NpuWork]:
        """The rows that operators cause, with the place of each operator and launch."""
        linked = []
        for place, row in self._rows.items():
            operator, launch = (
                self._begins.get((kind, self._ends.get((kind, place), ""))) for kind in (OPERATOR_ARROW, LAUNCH_ARROW)
            )
            if operator is not None:
                linked.append(replace(row, operator=operator, launch=launch or operator))
        return linked


def _rank(value: object) -> int | None:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return value if isinstance(value, int) and is_number and 0 <= value < MAX_NAMED_RANKS else None


def _message(name: str, arguments: dict[str, Any]) -> str:
    """What a collective carries, from its name, `count` and `data_type`."""
    match, count, dtype = _COLLECTIVE_NAME.match(name), arguments.get("count"), str(arguments.get("data_type", ""))[:20]
    kind, group = match.groups() if match else ("", "")
    message = {"name": kind, "group": group, "dtype": _TYPES.get(dtype, dtype)}
    return json.dumps(message | ({"in": count} if kind in _COUNTED and isinstance(count, int) else {}))


def add_npu_work(
    events: TraceEvents, linked: list[NpuWork], base: float, texts: InternedTexts, threads: dict[tuple[str, str], int]
) -> None:
    """Add the work of NPUs with one call each, its launch. Threads of torch and of CANN are the same if their numbers
    are."""
    if not linked:
        return
    events.accelerator, events.converted = "npu", 0  # torch_npu writes all times as text
    spans, calls, work = events.spans, events.calls, events.work
    of_spans = set(np.unique(np.asarray(spans.thread)).tolist())
    by_number = {tid: thread for (_, tid), thread in threads.items() if thread in of_spans}
    same = np.arange(len(threads))
    for (_, tid), thread in threads.items():
        same[thread] = by_number.get(tid, thread)
    calls.thread = array("i", same[np.asarray(calls.thread, dtype=np.int64)].tolist())
    # Of operators that begin at one time, the innermost comes last and stays.
    begin = enumerate(zip(spans.thread, spans.start, strict=True))
    operators = {place: item for item, place in begin if spans.kind[item] == OP}
    launch = texts.intern(NPU_LAUNCH)
    for number, one in enumerate(linked):
        (issuer, at), (caller, begins) = one.launch, one.operator
        known = by_number.get(issuer)
        calls.thread.append(threads.setdefault(("", issuer), len(threads)) if known is None else known)
        calls.start.append(at - base)
        calls.end.append(at - base)
        calls.name.append(launch)
        calls.correlation.append(_OWN_IDS + number)
        operator = operators.get((by_number.get(caller, -1), begins - base))
        if operator is not None:
            spans.external[operator] = _OWN_IDS + operator
        work.start.append(one.start_us - base)
        work.end.append(one.end_us - base)
        work.device.append(0)
        work.stream.append(one.stream)
        work.name.append(texts.intern(one.name[:MAX_NAME_CHARS]))
        work.correlation.append(_OWN_IDS + number)
        work.external.append(-1 if operator is None else _OWN_IDS + operator)
        work.occupancy.append(math.nan)
        work.blocks_per_sm.append(math.nan)
        work.shared_bytes.append(math.nan)
        work.grid.append(math.nan)
        work.block.append(math.nan)
        work.process.append(-1)
        if one.message:
            events.messages_of_work[len(work) - 1] = texts.intern(one.message)
    events.launches += len(linked)


NPU_LAUNCH = "torch_to_npu"
"""Name of the launches of an NPU's work, as torch_npu calls the arrows."""
_OWN_IDS = 2**40
"""Identifiers from here on are given here: profilers count from 0."""
