"""The rows of `kernels` from a trace, and the windows to which they belong.

A window is a series of steps with consecutive numbers, as marked or as the optimizer ends them; a trace without steps
is one window without a number. Work launched outside of the steps is in `kernels` with a null step, and in no window. A
trace without steps has no rows for work that was launched before it began.
"""

import functools
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from amp_core.hardware.kernel_names import (
    COPIES,
    GEMM_CATEGORIES,
    SMALL_TYPES,
    classify_kernel,
    classify_npu_kernel,
    tells_type,
    with_dtype,
)
from amp_core.traces import intervals as times
from amp_core.traces.chains import FUSED_KINDS, fused_away_us
from amp_core.traces.device_times import StepTimes, whole_trace
from amp_core.traces.events import TraceEvents
from amp_core.traces.gpu_work import LinkedWork
from amp_core.traces.link import EVALUATE, PHASES, Host, Ints
from amp_core.traces.operators import operator_category, precision_of, refine
from amp_core.traces.scores import of_scores

Rows = dict[str, list[Any]]

_CHUNK = 2**16


@dataclass(frozen=True)
class Window:
    """Consecutive steps, or a whole trace without marked steps (`first` None); times in microseconds."""

    first: int | None
    steps: int | None
    start: float
    end: float
    """Times of the host."""
    device_start: float
    device_end: float
    """Times of the device: from the end of earlier work to the end of the last work launched in the window; where the
    device marks its steps, from the first work."""
    ready: float
    """When the host was in the window and the device had done all earlier work."""
    earlier: float = -np.inf
    """End of the work launched before a trace without marked steps."""


def trace_windows(events: TraceEvents, host: Host, linked: LinkedWork, step_times: Sequence[StepTimes]) -> list[Window]:
    """The windows of a trace, in order. `step_times` of each of `host.steps`."""
    if not host.steps:
        start, end = whole_trace(events, linked)
        earlier = float(linked.end_us[np.isneginf(linked.launched_us)].max(initial=-np.inf))
        # Work from before the trace shows that the program was running. Profiling operators takes long to start.
        ready = min(start, earlier) if np.isfinite(earlier) and not len(events.spans) else start
        return [Window(None, None, -np.inf, np.inf, start, end, ready, earlier)]
    windows: list[Window] = []
    for (start, end, number), step in zip(host.steps, step_times, strict=True):
        last = windows[-1] if windows else None
        if last is not None and last.first is not None and last.steps is not None and number == last.first + last.steps:
            windows[-1] = replace(
                last, steps=last.steps + 1, end=max(last.end, end), device_end=max(last.device_end, step.last_work)
            )
        else:
            windows.append(Window(number, 1, start, end, step.first_work, step.last_work, step.begins))
    return windows


def launch_windows(windows: Sequence[Window], linked: LinkedWork) -> Ints:
    """Index of the window in which each entry was launched; -1 outside of all windows."""
    if windows[0].first is None:
        return np.where(np.isneginf(linked.launched_us), -1, 0)
    starts, ends = np.array([w.start for w in windows]), np.array([w.end for w in windows])
    at = np.searchsorted(starts, linked.launched_us, side="right") - 1
    return np.where((at >= 0) & (linked.launched_us < ends[np.maximum(at, 0)]), at, -1)


def kernel_rows(
    events: TraceEvents,
    host: Host,
    linked: LinkedWork,
    windows: Sequence[Window],
    window_index: Ints,
    accelerator: str,
    amd: bool,
) -> Rows:
    """Rows of `kernels`; equal ones are summed. `amd`: the GPUs are AMD's, whose matrix cores multiply FP32 too."""
    spans, texts = events.spans, events.texts
    shapes, dtypes, names = (np.asarray(a) for a in (spans.shapes, spans.dtypes, spans.name))
    unnamed, beside, counted = unnamed_templates(events), _beside_collectives(events, linked), _counted(events, linked)
    lone, scores = (
        np.where(chosen, linked.own_us, 0.0) for chosen in (_is_lone(events, linked), of_scores(events, linked))
    )
    away = fused_away_us(events, host, linked)
    calls, masked = _first_products(events, linked), np.isin(linked.op, list(events.causal_spans))
    flops = _convolution_flops(events, linked, calls)
    moved = np.full(len(linked), math.nan)
    moved[list(events.moved_bytes)] = list(events.moved_bytes.values())
    sums: dict[tuple[int, ...], list[float]] = {}
    for low in range(0, len(linked), _CHUNK):
        part = slice(low, low + _CHUNK)
        op, top, serves = linked.op[part], linked.top[part], linked.serves[part]
        has, has_top = op >= 0, top >= 0
        columns = (
            window_index[part],
            linked.device[part],
            linked.name[part],
            np.where(has, names[op], -1) if len(names) else op,
            np.where(has_top, names[top], -1) if len(names) else top,
            linked.module[part],
            linked.phase[part],
            np.where(has, shapes[op], -1) if len(names) else op,
            np.where(has, dtypes[op], -1) if len(names) else op,
            np.where(serves >= 0, names[serves], -1) if len(names) else serves,
            unnamed[part] if len(unnamed) else np.zeros(len(op), dtype=bool),
        )
        keys = zip(*(c.tolist() for c in columns), strict=True)
        of_each = (
            numbers[part].tolist()
            for numbers in (linked.own_us, beside, counted, moved, lone, scores, away, calls, masked, flops)
        )
        for key, us, beside_us, counted_us, moved_bytes, lone_us, scores_us, away_us, is_call, is_masked, counts in zip(
            keys, *of_each, strict=True
        ):
            if key[0] < 0 and windows[0].first is None:
                continue
            sums_of_key = sums.get(key)
            if sums_of_key is None:
                parts = [beside_us, counted_us, moved_bytes, lone_us, scores_us, away_us, is_call, is_masked, counts]
                sums[key] = [1, us, us, *parts]
            else:
                sums_of_key[0] += 1
                sums_of_key[1] += us
                sums_of_key[2] = max(sums_of_key[2], us)
                sums_of_key[3] += beside_us
                sums_of_key[4] += counted_us
                sums_of_key[5] += moved_bytes
                sums_of_key[6] += lone_us
                sums_of_key[7] += scores_us
                sums_of_key[8] += away_us
                sums_of_key[9] += is_call
                sums_of_key[10] += is_masked
                sums_of_key[11] += counts
    rows: Rows = {name: [] for name in _KERNEL_COLUMNS}
    for key, (count, us, longest_us, beside_us, counted_us, moved_bytes, *parts) in sums.items():
        *parts, of_calls, causal, counts = parts
        window, device, name, op_name, top_name, module, phase, shape, dtype, served, is_unnamed = key
        launched_in = windows[window] if window >= 0 else None
        op_text = text_at(texts, op_name)
        types = parse_types(texts[dtype]) if dtype >= 0 else []
        tensor_core, precision, category = classed(
            texts[name], op_text, types, events.accelerator, on_cpu=device < 0, amd=amd
        )
        tensor_core = "unknown" if is_unnamed else tensor_core
        values = (
            launched_in.first if launched_in else None,
            texts[name],
            int(count),
            us,
            tensor_core,
            precision,
            op_text,
            host.modules[module] if module >= 0 else None,
            PHASES[phase],
            device_name(device, accelerator),
            launched_in.steps if launched_in else None,
            category,
            text_at(texts, shape),
            text_at(texts, dtype),
            _without_engine(text_at(texts, top_name)),
            text_at(texts, served),
            longest_us,
            round(beside_us, 3),
            round(counted_us, 3),
            int(moved_bytes) if moved_bytes < MAX_MOVED_BYTES else None,
            *(round(part, 3) for part in parts),
            int(of_calls),
            int(causal),
            int(counts),
        )
        for column, value in zip(_KERNEL_COLUMNS, values, strict=True):
            rows[column].append(value)
    _resolve_by_trace(rows)
    return rows


def _is_lone(events: TraceEvents, linked: LinkedWork) -> npt.NDArray[np.bool_]:
    """By work: whether neither the kernel before it on its stream nor the one after it is of `FUSED_KINDS`."""
    lone = np.zeros(len(linked), dtype=bool)
    if not len(events.work):
        return lone
    classes = [classify_kernel(text).category for text in events.texts]
    fuses, fills = (np.array([one in of for one in classes], dtype=bool) for of in (FUSED_KINDS, ("memset",)))
    order = np.lexsort((linked.start_us, linked.stream, linked.device))
    order = order[~fills[linked.name[order]]]
    place = np.stack([linked.device[order], linked.stream[order]])
    beside = np.concatenate([[False], (place[:, 1:] == place[:, :-1]).all(axis=0)])
    fused = fuses[linked.name[order]]
    after = beside & np.concatenate([[False], fused[:-1]])
    before = np.concatenate([beside[1:] & fused[1:], [False]])
    lone[order] = ~(after | before)
    return lone


def _first_products(events: TraceEvents, linked: LinkedWork) -> npt.NDArray[np.bool_]:
    """By work: whether it is the first product that a call of its operator launches, which may launch several."""
    product = np.array([classify_kernel(text).category in GEMM_CATEGORIES for text in events.texts], dtype=bool)
    first = product[linked.name]
    known = np.flatnonzero(first & (linked.op >= 0))
    first[known] = False
    first[known[np.unique(linked.op[known], return_index=True)[1]]] = True
    return first


def _convolution_flops(events: TraceEvents, linked: LinkedWork, calls: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """By work: the floating-point operations of the forward convolution that it is the first product of; 0 for others
    and where they are not recorded. On a CPU, the call itself."""
    flops = np.zeros(len(linked), dtype=np.int64)
    if events.convolution_flops:
        of_span = np.zeros(len(events.spans), dtype=np.int64)
        of_span[list(events.convolution_flops)] = list(events.convolution_flops.values())
        chosen = calls & (linked.op >= 0)
        flops[chosen] = of_span[linked.op[chosen]]
    return flops


def _beside_collectives(events: TraceEvents, linked: LinkedWork) -> times.Floats:
    """By work: for how long a collective of the same device runs beside it, microseconds."""
    us = np.zeros(len(linked))
    if not len(events.work):
        return us
    of_collectives = np.array([classify_kernel(text).category == "communication" for text in events.texts], dtype=bool)
    communication = of_collectives[linked.name]
    for device in np.unique(linked.device[communication]).tolist():
        own = linked.device == device
        spans = times.union(linked.start_us[own & communication], linked.end_us[own & communication])
        beside = own & ~communication
        us[beside] = times.overlap_of_each(linked.start_us[beside], linked.end_us[beside], spans)
    return us


def _counted(events: TraceEvents, linked: LinkedWork) -> times.Floats:
    """By work: the part of its time that counts once, microseconds. Of kernels that run at the same time on one device,
    products count first, then what began first. Collectives and copies count alone."""
    us = linked.own_us.copy()
    if not len(events.work):
        return us
    classes = [classify_kernel(text) for text in events.texts]
    multiplies, computes = (
        np.array([holds(kind) for kind in classes], dtype=bool)[linked.name]
        for holds in (
            lambda kind: kind.category in GEMM_CATEGORIES or kind.tensor_core == "yes",
            lambda kind: kind.category not in (*COPIES, "communication"),
        )
    )
    for device in np.unique(linked.device).tolist():
        taken = times.NONE
        for chosen in (multiplies & computes, ~multiplies & computes):
            items = np.flatnonzero(chosen & (linked.device == device))
            items = items[np.argsort(linked.start_us[items], kind="stable")]
            start, end = linked.start_us[items], linked.end_us[items]
            reach = np.maximum.accumulate(np.concatenate([[-np.inf], end]))[:-1]
            begins = np.minimum(np.maximum(start, reach), end)
            us[items] = end - begins
            if len(taken[0]):
                us[items] -= times.overlap_of_each(begins, end, taken)
            taken = times.union(start, end)
    return us


def unnamed_templates(events: TraceEvents) -> npt.NDArray[np.bool_]:
    """By work of a device: whether it is a kernel of PyTorch 2.0's Inductor, which numbers arguments and gives no name,
    that may be a template of a product: it takes no size of a loop, and much shared memory."""
    numbered = np.array([_WITHOUT_SIZES.match(text) is not None for text in events.texts], dtype=bool)
    shared = np.asarray(events.work.shared_bytes)
    return numbered[np.asarray(events.work.name, dtype=np.int64)] & (shared >= MIN_TEMPLATE_BYTES)


_WITHOUT_SIZES = re.compile(r"triton__[\dcd]+$")
"""Sizes are constants of a template. Other kernels take them as their last arguments, most of them marked `e`."""
MAX_MOVED_BYTES = 2.0**62
"""More cannot be stored; NaN is not below it either."""
MIN_TEMPLATE_BYTES = 10 * 1024
"""Tiles of two matrices take more shared memory, and reductions of a block less."""
MIN_SMALL_FRAC = 0.95
"""A model of which at least this share of the GEMM/conv time has inputs of 16 bits or fewer is one in 16 bits."""


def _resolve_by_trace(rows: Rows) -> None:
    """Classify the kernels that multiply by `tl.dot` and whose operator is not recorded, as in a captured graph: by
    kernels of the same name if those have one precision, else by the model's other products, if they are in 16 bits."""
    unknown = [
        i
        for i, (name, answer, precision) in enumerate(
            zip(rows["name"], rows["tensor_core"], rows["precision"], strict=True)
        )
        if answer == "unknown" and precision is None and classify_kernel(name).by_dtype
    ]
    if not unknown:
        return
    by_name: dict[str, set[str]] = {}
    us, small_us = 0.0, 0.0
    for name, answer, precision, category, time_us in zip(
        *(rows[c] for c in ("name", "tensor_core", "precision", "category", "total_us")), strict=True
    ):
        if category in GEMM_CATEGORIES and precision is not None:
            by_name.setdefault(name, set()).add(precision)
            us += time_us
            small_us += time_us if answer == "yes" and precision in SMALL_TYPES else 0.0
    for i in unknown:
        types = by_name.get(rows["name"][i], set())
        if len(types) == 1 and types.issubset(SMALL_TYPES):
            rows["tensor_core"][i], rows["precision"][i] = "yes", next(iter(types))
        elif not types and us > 0 and small_us >= MIN_SMALL_FRAC * us:
            rows["tensor_core"][i] = "yes"


def classed(
    name: str, op: str | None, types: list[str], accelerator: str | None = None, *, on_cpu: bool, amd: bool
) -> tuple[str | None, str | None, str]:
    """tensor_core, precision and category of a kernel by its name, and by the operator that launched it with the types
    of its inputs; on a CPU, of the operator `name`. `accelerator`: the type of the device, where a trace gives it."""
    tensor_core, precision = None, None
    if on_cpu:
        category = refine("other", name, types) if name == "aten::copy_" else operator_category(name)
    else:
        if op is not None and op.startswith("triton_") and _WITHOUT_NAME.fullmatch(name):
            name = op
        by_name = classify_npu_kernel(name) if accelerator == "npu" else classify_kernel(name)
        kernel = with_dtype(by_name, precision_of(types))
        tensor_core, precision = kernel.tensor_core, kernel.precision
        category = refine(kernel.category, op, types)
        if kernel.category == "other" and tensor_core == "no" and category in GEMM_CATEGORIES:
            category = "other"  # it serves the product, as by writing to a cache
        if tensor_core == "unknown" and kernel.category == "attention" and _is_flash(op, types):
            tensor_core, precision = "yes", precision_of(types)
    if precision is None and category in GEMM_CATEGORIES and not tells_type(name):
        precision = precision_of(types)
        if precision == "fp32" and tensor_core == "yes" and not amd:
            precision = None if accelerator == "npu" else "tf32"  # a setting of CANN's, or rounded to FP16
    return tensor_core, precision, category


def _is_flash(op: str | None, types: list[str]) -> bool:
    """Whether an operator is FlashAttention in 16 bits, of which all products run on tensor cores."""
    return op is not None and "_flash_attention" in op and precision_of(types) in ("fp16", "bf16")


_WITHOUT_NAME = re.compile(r"triton_+")
"""A kernel of Inductor that keeps no name of its own (`triton.unique_kernel_names`); its operator has it."""

_KERNEL_COLUMNS = (
    "step",
    "name",
    "count",
    "total_us",
    "tensor_core",
    "precision",
    "op",
    "module",
    "phase",
    "device",
    "steps",
    "category",
    "in_shapes",
    "in_dtypes",
    "top_op",
    "serves",
    "longest_us",
    "beside_us",
    "counted_us",
    "moved_bytes",
    "lone_us",
    "scores_us",
    "fused_away_us",
    "op_calls",
    "causal_count",
    "convolution_flops",
)


def device_name(device: int, accelerator: str) -> str:
    """`cuda:0`, or `cpu` for -1."""
    return "cpu" if device < 0 else f"{accelerator}:{device}"


def text_at(texts: list[str], number: int) -> str | None:
    """The text at an index; None for -1."""
    return texts[number] if number >= 0 else None


def _without_engine(name: str | None) -> str | None:
    return None if name is None else name.removeprefix(EVALUATE)


@functools.lru_cache(maxsize=65536)
def parse_types(text: str) -> list[str]:
    """The types in a JSON list; "" for entries that are not text."""
    return [t if isinstance(t, str) else "" for t in json.loads(text)]
