"""The rows of `kernels` that a trace gives, and the windows they fall into.

A window is a stretch of marked steps whose numbers follow one another; a trace that marks no steps is one window
without a number. What was launched outside of the marked steps is in `kernels` with a null step, and in no window.
"""

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from amp_core.hardware.kernel_names import classify_kernel
from amp_core.traces.collect import Kept
from amp_core.traces.gpu_work import Tied
from amp_core.traces.link import EVALUATE, PHASES, Host, Ints
from amp_core.traces.operators import precision_of, refine, sort_of_operator

Rows = dict[str, list[Any]]

MATRIX = ("gemm", "conv", "attention")
_CHUNK = 2**16


@dataclass(frozen=True)
class Window:
    """Steps that follow one another, or a whole trace without marked steps (`first` None); microseconds."""

    first: int | None
    steps: int | None
    start: float
    end: float


def windows_of(kept: Kept, host: Host) -> list[Window]:
    """The windows of a trace, in order."""
    if not host.steps:
        starts = [min(s) for s in (kept.spans.start, kept.calls.start, kept.work.start) if len(s)]
        ends = [max(e) for e in (kept.spans.end, kept.calls.end, kept.work.end) if len(e)]
        return [Window(None, None, min(starts), max(ends))]
    found: list[Window] = []
    for start, end, number in host.steps:
        last = found[-1] if found else None
        if last is not None and last.first is not None and last.steps is not None and number == last.first + last.steps:
            found[-1] = Window(last.first, last.steps + 1, last.start, max(last.end, end))
        else:
            found.append(Window(number, 1, start, end))
    return found


def window_of_work(windows: Sequence[Window], tied: Tied) -> Ints:
    """In which window each was launched; -1 outside of all."""
    if windows[0].first is None:
        return np.zeros(len(tied), np.int64)
    starts, ends = np.array([w.start for w in windows]), np.array([w.end for w in windows])
    at = np.searchsorted(starts, tied.launched_us, side="right") - 1
    return np.where((at >= 0) & (tied.launched_us < ends[np.maximum(at, 0)]), at, -1)


def kernel_rows(
    kept: Kept, host: Host, tied: Tied, windows: Sequence[Window], of_window: Ints, accelerator: str
) -> Rows:
    """Rows of `kernels`: equal ones are added up."""
    spans, texts = kept.spans, kept.texts
    shapes, dtypes, names = (np.asarray(a) for a in (spans.shapes, spans.dtypes, spans.name))
    sums: dict[tuple[int, ...], list[float]] = {}
    for low in range(0, len(tied), _CHUNK):
        part = slice(low, low + _CHUNK)
        op, top = tied.op[part], tied.top[part]
        has, has_top = op >= 0, top >= 0
        columns = (
            of_window[part],
            tied.device[part],
            tied.name[part],
            np.where(has, names[op], -1) if len(names) else op,
            np.where(has_top, names[top], -1) if len(names) else top,
            tied.module[part],
            tied.phase[part],
            np.where(has, shapes[op], -1) if len(names) else op,
            np.where(has, dtypes[op], -1) if len(names) else op,
        )
        for key, us in zip(zip(*(c.tolist() for c in columns), strict=True), tied.own_us[part].tolist(), strict=True):
            found = sums.get(key)
            if found is None:
                sums[key] = [1, us]
            else:
                found[0] += 1
                found[1] += us
    rows: Rows = {name: [] for name in _KERNEL_COLUMNS}
    for key, (count, us) in sums.items():
        window, device, name, op_name, top_name, module, phase, shape, dtype = key
        of = windows[window] if window >= 0 else None
        op_text = text_of(texts, op_name)
        types = types_of(texts[dtype]) if dtype >= 0 else []
        if device < 0:
            tensor_core, precision, category = None, None, sort_of_operator(texts[name])
            if texts[name] == "aten::copy_":
                category = refine("other", texts[name], types)
        else:
            said = classify_kernel(texts[name])
            tensor_core, precision = said.tensor_core, said.precision
            category = refine(said.category, op_text, types)
        if precision is None and category in MATRIX:
            precision = precision_of(types)
            if precision == "fp32" and tensor_core == "yes":
                precision = "tf32"
        values = (
            of.first if of else None,
            texts[name],
            int(count),
            us,
            tensor_core,
            precision,
            op_text,
            host.modules[module] if module >= 0 else None,
            PHASES[phase],
            device_name(device, accelerator),
            of.steps if of else None,
            category,
            text_of(texts, shape),
            text_of(texts, dtype),
            _without_engine(text_of(texts, top_name)),
        )
        for column, value in zip(_KERNEL_COLUMNS, values, strict=True):
            rows[column].append(value)
    return rows


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
)


def device_name(device: int, accelerator: str) -> str:
    """`cuda:0`, or `cpu` for -1."""
    return "cpu" if device < 0 else f"{accelerator}:{device}"


def text_of(texts: list[str], number: int) -> str | None:
    """The text of that number; None for -1."""
    return texts[number] if number >= 0 else None


def _without_engine(name: str | None) -> str | None:
    return None if name is None else name.removeprefix(EVALUATE)


@functools.lru_cache(maxsize=65536)
def types_of(text: str) -> list[str]:
    """The types in a JSON list of them, "" for what is none."""
    return [t if isinstance(t, str) else "" for t in json.loads(text)]
