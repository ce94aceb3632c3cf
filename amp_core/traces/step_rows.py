"""The rows of `steps` and `ops` that a trace gives."""

import json
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from amp_core.formats import dtype_of, element_bytes
from amp_core.traces import intervals as times
from amp_core.traces.collect import OP, Kept
from amp_core.traces.gpu_work import Tied
from amp_core.traces.kernel_rows import MATRIX, Rows, Window, text_of, types_of
from amp_core.traces.link import BACKWARD, DATA, OPTIMIZER, PHASES, WATCH, Host, Ints
from amp_core.traces.operators import sort_of_operator
from amp_core.traces.window_rows import marked


def step_rows(kept: Kept, host: Host, tied: Tied, windows: Sequence[Window]) -> Rows:
    """Rows of `steps`: one per marked step. Phases are times of the device where there is one: a moment of the host
    becomes the later of it and the end of all that was launched before it."""
    if not host.steps:
        return {}
    order = np.argsort(tied.launched_us, kind="stable")
    launched = tied.launched_us[order]
    done = np.maximum.accumulate(tied.end_us[order]) if len(order) else order
    on_cpu = not len(kept.work)

    def mark(at: float) -> float:
        before = int(np.searchsorted(launched, at, side="left"))
        return at if on_cpu or not before else max(at, float(done[before - 1]))

    data, backward, optimizer = (marked(host, region) for region in (DATA, BACKWARD, OPTIMIZER))
    rows: Rows = {name: [] for name in _STEP_COLUMNS}
    origin = windows[0].start
    for start, end, number in host.steps:
        loaded = times.clip(data, start, end)
        back = times.clip(backward, start, end)
        stepped = times.clip(optimizer, start, end)
        has_backward = len(back[0]) > 0
        forward = (
            float(loaded[1][-1]) if len(loaded[0]) and (not has_backward or loaded[1][-1] <= back[0][0]) else start
        )
        first, last = (mark(float(back[0][0])), mark(float(back[1][-1]))) if has_backward else (None, None)
        rows["step"].append(number)
        rows["time_s"].append((end - origin) / 1e6)
        rows["skipped"].append(None)  # a trace does not tell
        rows["step_ms"].append((end - start) / 1e3)
        rows["data_ms"].append(times.total(loaded) / 1e3 if len(data[0]) else None)
        rows["forward_ms"].append(None if first is None else max(0.0, first - mark(forward)) / 1e3)
        rows["backward_ms"].append(None if first is None or last is None else (last - first) / 1e3)
        ended = None if last is None or not len(stepped[0]) else max(0.0, mark(float(stepped[1][-1])) - last)
        rows["optimizer_ms"].append(None if ended is None else ended / 1e3)
    return rows


_STEP_COLUMNS = ("step", "time_s", "skipped", "step_ms", "data_ms", "forward_ms", "backward_ms", "optimizer_ms")


def op_rows(kept: Kept, host: Host, windows: Sequence[Window], phase: Ints) -> Rows:
    """Rows of `ops`: operators that do the work, of the first marked step; without steps, of the whole trace.

    `phase`: of each span.
    """
    spans, texts = kept.spans, kept.texts
    low, high, step = windows[0].start, windows[0].end, windows[0].first
    if host.steps:
        low, high, step = host.steps[0]
    start = np.asarray(spans.start)
    working = _working(kept, host) & (start >= low) & (start < high) & (host.region_of_span != WATCH)
    sums: dict[tuple[int, int, int, int, int], int] = {}
    for i in np.flatnonzero(working).tolist():
        key = (spans.name[i], int(host.module_of_span[i]), int(phase[i]), spans.shapes[i], spans.dtypes[i])
        sums[key] = sums.get(key, 0) + 1
    rows: Rows = {n: [] for n in ("step", "module", "op", "phase", "in_dtypes", "in_shapes", "count", "cast_bytes")}
    for (name, module, region, shapes, dtypes), count in sums.items():
        if not texts[name].startswith("aten::"):
            continue
        types = types_of(texts[dtypes]) if dtypes >= 0 else []
        rows["step"].append(step)
        rows["module"].append(host.modules[module] if module >= 0 else None)
        rows["op"].append(texts[name])
        rows["phase"].append(PHASES[region])
        rows["in_dtypes"].append(", ".join(dict.fromkeys(filter(None, map(dtype_of, types)))) or None)
        rows["in_shapes"].append(text_of(texts, shapes))
        rows["count"].append(count)
        rows["cast_bytes"].append(_cast_bytes(texts[name], types, texts[shapes] if shapes >= 0 else "") * count)
    return rows


def _working(kept: Kept, host: Host) -> npt.NDArray[np.bool_]:
    """Which spans are operators that do the work themselves: they call no other one, but for views, allocations and
    fills. Products, convolutions and attentions do, whatever they call: on a CPU a product copies its bias first."""
    names = np.asarray(kept.spans.name)
    is_op = np.asarray(kept.spans.sort) == OP
    idle, filling, matrix = (
        np.isin(names, [i for i, name in enumerate(kept.texts) if told(name)])
        for told in (_NO_WORK.__contains__, _FILLS.__contains__, lambda name: sort_of_operator(name) in MATRIX)
    )
    matrix &= is_op
    parent = host.parent
    above = np.zeros(len(names), dtype=bool)  # matrix work is going on inside
    within = np.flatnonzero(matrix)
    while len(within):
        outer = parent[within]
        outer = np.unique(outer[outer >= 0])
        within = outer[~above[outer]]
        above[within] = True
    unit = matrix & ~above
    working = is_op & ~idle
    calls_work = (parent >= 0) & ~idle & ~filling
    working[parent[calls_work]] = False
    inside = parent.copy()  # of each span, the operators around it, one after another
    while (inside >= 0).any():
        working[(inside >= 0) & unit[inside]] = False
        inside = np.where(inside >= 0, parent[inside], -1)
    found: npt.NDArray[np.bool_] = working | unit
    return found


_LOOKS = (
    "empty empty_like empty_strided new_empty new_empty_strided resize_ resize_as_ set_ record_stream view "
    "_unsafe_view reshape _reshape_alias as_strided t transpose permute expand expand_as select slice narrow split "
    "split_with_sizes chunk unbind squeeze unsqueeze flatten unflatten detach detach_ alias lift_fresh conj "
    "resolve_conj resolve_neg broadcast_tensors is_floating_point _has_compatible_shallow_copy_type "
    "item _local_scalar_dense"
)
_NO_WORK = frozenset(f"aten::{name}" for name in _LOOKS.split())
"""Operators that look at memory in another way, or ask for it."""
_FILLS = frozenset({"aten::fill_", "aten::zero_"})


def _cast_bytes(op: str, types: list[str], shapes: str) -> int:
    """Bytes that a copy between types writes."""
    if op != "aten::copy_" or len(types) < 2 or types[0] == types[1]:
        return 0
    written = element_bytes(types[0])
    if written is None or element_bytes(types[1]) is None:
        return 0
    sizes = json.loads(shapes) if shapes else []
    first = sizes[0] if sizes else None
    if not isinstance(first, list) or not all(isinstance(n, int) and 0 <= n < 2**40 for n in first):
        return 0
    elements = 1
    for n in first:
        elements *= n
    return min(elements, 2**50) * written
