"""The rows of `collectives` from a trace: one per communication kernel, with the message that it carries.

Newer versions of torch record what a collective carries in `record_param_comms` and in NCCL's kernels. Of older
ones the range around the launch (`nccl:all_reduce`) has the shape and type of the input, and the kernel a name.
"""

import json
import math
import re
from typing import Any

import numpy as np

from amp_core.formats import dtype_of, element_bytes
from amp_core.hardware.kernel_names import classify_kernel
from amp_core.hardware.kernel_names.dtypes import of_template
from amp_core.traces import intervals as times
from amp_core.traces.events import MAX_NAMED_RANKS, TraceEvents
from amp_core.traces.gpu_work import LinkedWork
from amp_core.traces.kernel_rows import Rows, device_name, parse_types, text_at
from amp_core.traces.link import PHASES, Host

KINDS = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "barrier": "barrier",
    "sendrecv": "send_recv",
    "send": "send",
    "recv": "recv",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
}
"""Names of collectives by what their many spellings contain, longer ones first."""

_EXPERTS = re.compile(r"(?:deep_?|\b)ep::\w+::(?:dispatch|combine|notify_dispatch|cached_notify)\b", re.IGNORECASE)
"""Kernels of DeepEP, also before it was published, in which ranks send tokens to the experts of other ranks, and their
results back."""
_EXPERT_TYPES = {"internode_ll::dispatch<true": "float8_e4m3fn", "internode_ll::dispatch<false": "bfloat16"} | {
    "internode_ll::combine": "bfloat16"
}
"""What DeepEP's low-latency kernels send, by their names."""
_REDUCES = re.compile(r"_(?:Sum|Prod|Min|Max|Avg|PreMulSum|SumPostDiv)_([a-z]+\d*)")
"""The type in the name of a NCCL kernel that reduces; others move bytes."""
_KERNEL_TYPES = {"f": "float", "half": "float16", "f16": "float16", "bf16": "bfloat16", "bfloat": "bfloat16"} | {
    "f32": "float32", "f64": "float64"
}  # fmt: skip


def collective_rows(events: TraceEvents, host: Host, linked: LinkedWork, accelerator: str, origin_us: float) -> Rows:
    """Rows of `collectives`; those launched outside of the marked steps are left out. `amp_core.schema` describes the
    columns. `origin_us`: time 0 of the events on the machine's clock."""
    communicates = np.array([classify_kernel(text).category == "communication" for text in events.texts], dtype=bool)
    is_one = communicates[linked.name] & (linked.device >= 0) & ~np.isneginf(linked.launched_us)
    chosen = np.flatnonzero(is_one)
    chosen = chosen[np.argsort(linked.launched_us[chosen], kind="stable")]
    step = _steps(host, linked.launched_us[chosen])
    alone = _alone_us(linked, is_one)
    inner = _nccl_ranges(events, host)
    rows: Rows = {name: [] for name in _COLUMNS}
    numbers: dict[tuple[int | None, str | None, int], int] = {}
    for i, in_step in zip(chosen.tolist(), step, strict=True):
        if in_step is None and host.steps:
            continue
        op, device, kernel = int(linked.op[i]), int(linked.device[i]), events.texts[linked.name[i]]
        message = _message(events, i, op)
        group = ", ranks ".join(str(message[key]) for key in ("group", "ranks") if message.get(key) not in (None, ""))
        name = _kind(str(message.get("name", ""))) or _kind(_around(events, host, inner, op))
        name = name or _kind(kernel) or ("all_to_all" if _EXPERTS.search(kernel) else "")
        size = _whole(message.get("size"))
        dtype, elements = _elements(events, host, inner, op, message, name, size, kernel)
        place = (in_step, group or None, device)
        numbers[place] = numbers.get(place, -1) + 1
        width = element_bytes(dtype) if dtype else None
        values = (
            in_step,
            numbers[place],
            name or "other",
            group or None,
            size,
            dtype,
            elements * width if width is not None and elements is not None and elements * width < 2**63 else None,
            round(float(linked.own_us[i]), 3),
            round(float(alone[i]), 3),
            origin_us + float(linked.launched_us[i]) if linked.launched_us[i] < linked.start_us[i] else None,
            origin_us + float(linked.end_us[i]),
            PHASES[linked.phase[i]],
            device_name(device, accelerator),
            kernel,
        )
        for column, value in zip(_COLUMNS, values, strict=True):
            rows[column].append(value)
    return rows


_ON_HOST = re.compile(r"(?:gloo|mpi|ucc):")
"""Ranges of the backends that communicate from the host's memory, from the call until the collective is done."""


def host_collective_rows(events: TraceEvents, host: Host, linked: LinkedWork, origin_us: float) -> Rows:
    """The same of a trace without a device: one row per range of a backend. Its time counts from when the collectives
    have ended that began before, as of buckets of gradients, and `alone_us` is the part of it in which no operator
    runs. A send lasts until the program waits for it: what is communicated meanwhile is no part of its time. `linked`:
    the operators."""
    spans = events.spans
    name, start, end = (np.asarray(column) for column in (spans.name, spans.start, spans.end))
    on_host = np.array([_ON_HOST.match(text) is not None for text in events.texts], dtype=bool)
    chosen = np.flatnonzero(on_host[name]) if len(spans) else np.zeros(0, dtype=np.int64)
    rows: Rows = {column: [] for column in _COLUMNS}
    if not len(chosen):
        return rows
    chosen = chosen[np.argsort(start[chosen], kind="stable")]
    computes = linked.op[(linked.op >= 0) & ~on_host[name[linked.op]]]
    busy = times.union(start[computes], end[computes])
    numbers: dict[int | None, int] = {}
    is_send = np.array([_kind(text) == "send" for text in events.texts], dtype=bool)[name[chosen]]
    others, sends = chosen[~is_send], chosen[is_send]
    earlier = np.maximum.accumulate(np.concatenate([[-np.inf], end[others]]))[:-1]
    us = dict(zip(others.tolist(), (end[others] - np.maximum(start[others], earlier)).tolist(), strict=True))
    communicating = times.union(start[others], end[others])
    us |= {n: times.total(times.without((start[[n]], end[[n]]), communicating)) for n in sends.tolist()}
    alone: dict[int, float] = {}
    for span in (*others.tolist(), *sends.tolist()):
        when = times.without((start[[span]], end[[span]]), busy)
        busy, alone[span] = times.merged(busy, when), times.total(when)
    for span, in_step in zip(chosen.tolist(), _steps(host, start[chosen]), strict=True):
        if in_step is None and host.steps:
            continue
        numbers[in_step] = numbers.get(in_step, -1) + 1
        text = events.texts[name[span]]
        types = parse_types(events.texts[spans.dtypes[span]]) if spans.dtypes[span] >= 0 else []
        dtype = next((known for one in types if one != "Scalar" and (known := dtype_of(one))), None)
        elements = max((_count(s) for s in json.loads(text_at(events.texts, spans.shapes[span]) or "[]")), default=0)
        width = element_bytes(dtype) if dtype else None
        values = (
            in_step,
            numbers[in_step],
            _kind(text) or "other",
            None,
            None,
            dtype,
            elements * width if width is not None and 0 < elements * width < 2**63 else None,
            round(max(0.0, us[span]), 3),
            round(alone[span], 3),
            None,
            origin_us + float(end[span]),
            PHASES[host.region_of_span[span]],
            "cpu",
            text,
        )
        for column, value in zip(_COLUMNS, values, strict=True):
            rows[column].append(value)
    return rows


_COLUMNS = (
    "step",
    "number",
    "name",
    "group",
    "group_size",
    "dtype",
    "message_bytes",
    "total_us",
    "alone_us",
    "launched_us",
    "ended_us",
    "phase",
    "device",
    "kernel",
)


def named_ranks(events: TraceEvents) -> int:
    """Ranks of the training, at least, by the ranks and groups that its collectives name; 0 where they name none."""
    texts = {*events.messages_of_span.values(), *events.messages_of_work.values()}
    return max([events.named_ranks, *(_ranks_of_message(json.loads(events.texts[text])) for text in texts)])


def _ranks_of_message(message: dict[str, Any]) -> int:
    size, start, stride = (_whole(message.get(key)) for key in ("size", "start", "stride"))
    last = [int(rank) for rank in re.findall(r"\d{1,9}", str(message.get("ranks", "")))]
    if size and start is not None and stride:
        last.append(start + stride * (size - 1))
    return max((ranks for ranks in (size or 0, *(n + 1 for n in last)) if ranks <= MAX_NAMED_RANKS), default=0)


def _steps(host: Host, launched: times.Floats) -> list[int | None]:
    """The marked step in which each moment of the host lies."""
    if not host.steps:
        return [None] * len(launched)
    at = np.searchsorted([start for start, _, _ in host.steps], launched, side="right") - 1
    return [
        host.steps[n][2] if n >= 0 and moment < host.steps[n][1] else None
        for n, moment in zip(at.tolist(), launched.tolist(), strict=True)
    ]


def _alone_us(linked: LinkedWork, is_one: Any) -> times.Floats:
    """For each communication kernel, its time without a kernel of another kind on the device."""
    alone = linked.own_us.copy()
    for device in np.unique(linked.device[is_one]).tolist():
        here = linked.device == device
        starts, ends = times.union(linked.start_us[here & ~is_one], linked.end_us[here & ~is_one])
        if not len(starts):
            continue
        before = np.concatenate([[0.0], np.cumsum(ends - starts)])
        ones = np.flatnonzero(here & is_one)
        alone[ones] -= _covered(starts, ends, before, linked.end_us[ones]) - _covered(
            starts, ends, before, linked.start_us[ones]
        )
    return alone


def _covered(starts: times.Floats, ends: times.Floats, before: times.Floats, at: times.Floats) -> times.Floats:
    """Time before each moment that the intervals cover; `before`: the same at the start of each interval."""
    last = np.searchsorted(starts, at, side="right") - 1
    inside = np.where(last >= 0, np.minimum(at, ends[last]) - starts[last], 0.0)
    result: times.Floats = np.where(last >= 0, before[np.maximum(last, 0)] + inside, 0.0)
    return result


def _nccl_ranges(events: TraceEvents, host: Host) -> dict[int, int]:
    """By operator, the range `nccl:…` inside it, which has the shape and type of the input."""
    named = [n for n, text in enumerate(events.texts) if text.startswith("nccl:")]
    collectives = np.flatnonzero(np.isin(np.asarray(events.spans.name), named))
    return dict(zip(host.parent[collectives].tolist(), collectives.tolist(), strict=True))


def _message(events: TraceEvents, work: int, op: int) -> dict[str, Any]:
    text = events.messages_of_work.get(work, events.messages_of_span.get(op))
    message: dict[str, Any] = json.loads(events.texts[text]) if text is not None else {}
    return message


def _around(events: TraceEvents, host: Host, inner: dict[int, int], op: int) -> str:
    """Names of the range inside the operator of the launch, and of the operator around it."""
    spans = [inner.get(op, -1), int(host.parent[op]) if op >= 0 else -1, op]
    return next((text for n in spans if n >= 0 and _kind(text := events.texts[events.spans.name[n]])), "")


def _kind(text: str) -> str:
    folded = text.lower().replace("_", "")
    return next((name for word, name in KINDS.items() if word in folded), "")


def _elements(
    events: TraceEvents,
    host: Host,
    inner: dict[int, int],
    op: int,
    message: dict[str, Any],
    name: str,
    size: int | None,
    kernel: str,
) -> tuple[str | None, int | None]:
    """dtype and number of elements of the whole message; None for what the trace does not record."""
    dtype = dtype_of(str(message.get("dtype", "")))
    elements = max((n for key in ("in", "out") if (n := _whole(message.get(key))) is not None), default=None)
    spans, within = events.spans, inner.get(op, -1)
    around = int(host.parent[op]) if op >= 0 else -1  # c10d::…, which has inputs and outputs; the others have inputs
    for span in (around, within, op):
        if span < 0 or (span == around and not events.texts[spans.name[span]].startswith("c10d::")):
            continue
        types = parse_types(events.texts[spans.dtypes[span]]) if spans.dtypes[span] >= 0 else []
        dtype = dtype or next((d for one in types if one != "Scalar" and (d := dtype_of(one))), None)
        counts = [_count(s) for s in json.loads(text_at(events.texts, spans.shapes[span]) or "[]")]
        known = max((n for n in counts if n), default=None)
        if elements is None and known is not None:
            gathers = name == "all_gather" and span != around
            elements = known * size if gathers and size else None if gathers else known
    if dtype is None and (match := _REDUCES.search(kernel)) and name in ("all_reduce", "reduce_scatter", "reduce"):
        dtype = dtype_of(_KERNEL_TYPES.get(match[1], match[1]))
    dtype = dtype or next((one for text, one in _EXPERT_TYPES.items() if text in kernel), None)
    if dtype is None and "nccl" not in kernel:  # whose kernels move bytes
        dtype = dtype_of(of_template(kernel) or "")
    return dtype, elements


def _count(shape: Any) -> int:
    """Elements of a shape, or of a list of shapes together; 0 for none."""
    if not isinstance(shape, list) or not shape:
        return 0
    if isinstance(shape[0], list):
        return sum(map(_count, shape))
    return math.prod(shape) if all(_whole(n) is not None for n in shape) else 0


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53 else None
