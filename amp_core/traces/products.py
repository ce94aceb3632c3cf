"""Which matrix product each operator of a trace is a part of, and how many products the work of a device is.

>>> join_products(events, host, linked)     # on a CPU, the copy of a bias then counts as its aten::addmm
>>> product_numbers(events, host, linked, amd=False)     # by entry of `linked`: the same number for one product's work

A product copies its bias, allocates its output and views its inputs by operators of its own, which serve it alone. A
cast or a change of layout in between (`aten::to`, `aten::contiguous`) is work of another kind. One product may be
several nested operators, as `aten::conv2d` around `aten::convolution` around `aten::mkldnn_convolution`; a convolution
that unfolds its input calls matrix products, as `aten::thnn_conv2d_forward` calls `aten::addmm_`.
"""

from collections.abc import Collection

import numpy as np
import numpy.typing as npt

from amp_core.hardware.kernel_names import GEMM_CATEGORIES
from amp_core.traces.events import OP, TraceEvents
from amp_core.traces.gpu_work import LinkedWork
from amp_core.traces.kernel_rows import classed, parse_types
from amp_core.traces.link import EVALUATE, Host, Ints
from amp_core.traces.operators import operator_category, refine

Bools = npt.NDArray[np.bool_]


def join_products(events: TraceEvents, host: Host, linked: LinkedWork) -> None:
    """Set `linked.serves` of the copies, fills, allocations and views on a CPU that serve a product, and of the matrix
    products that serve a convolution: with nothing but such operators between the two. Copies between dtypes are casts,
    and serve none."""
    if len(events.work) or not len(events.spans):
        return
    names, parent = np.asarray(events.spans.name), host.parent
    serving = np.isin(names, [number for number, text in enumerate(events.texts) if text in _SERVING])
    serving &= (np.asarray(events.spans.kind) == OP) & ~_casts(events)
    around = np.where(serving, parent, -1)
    around = _beyond(around, serving, parent)
    around = np.where((around >= 0) & _is_product(events)[around], around, -1)
    multiplies = _is_product(events, ("gemm",))
    outer = _beyond(np.where(multiplies, parent, -1), serving | multiplies, parent)
    outer = np.where((outer >= 0) & _is_product(events, ("conv",))[outer], outer, -1)
    around = np.where(around >= 0, np.where(outer[around] >= 0, outer[around], around), outer)
    linked.serves = around[linked.op]


def _beyond(around: Ints, chosen: Bools, parent: Ints) -> Ints:
    """The first operators around each that are none of the `chosen`; -1 where there is none."""
    while (climbing := (around >= 0) & chosen[around]).any():
        around = np.where(climbing, parent[around], around)
    return around


_COPIES_AND_VIEWS = (
    "copy_ fill_ zero_ zeros zeros_like empty empty_like empty_strided new_empty new_empty_strided new_zeros "
    "resize_ resize_as_ _resize_output_ set_ view _unsafe_view _reshape_alias view_as as_strided as_strided_ t "
    "transpose transpose_ numpy_T permute expand expand_as select slice narrow split squeeze squeeze_ unsqueeze "
    "unsqueeze_ flatten unflatten detach alias conj resolve_conj resolve_neg"
)
_SERVING = frozenset(f"aten::{name}" for name in _COPIES_AND_VIEWS.split())


def product_numbers(events: TraceEvents, host: Host, linked: LinkedWork, *, amd: bool) -> Ints:
    """By entry of `linked`: a number of the product of which it is work, -1 for other work. On a CPU that is the
    outermost operator that is a product; on another device, the one around the launch of a kernel that multiplies."""
    op = linked.op
    known, names, dtypes = op >= 0, np.asarray(events.spans.name), np.asarray(events.spans.dtypes)
    if not len(names):
        known, names, dtypes = known & False, np.zeros(1, np.int64), np.zeros(1, np.int64)
        outermost = np.full(1, -1)
    else:
        outermost = _outermost_products(events, host)
    product = np.where(known, outermost[op], -1)
    if not len(events.work):
        return product
    keys = np.stack([linked.name, np.where(known, names[op], -1), np.where(known, dtypes[op], -1)])
    kinds, kind = np.unique(keys, axis=1, return_inverse=True)
    multiplies = np.array([_multiplies(events, *one, amd=amd) for one in kinds.T.tolist()], dtype=bool)
    unknown = len(events.spans) + np.arange(len(linked))  # each kernel of such a launch counts as one product
    product = np.where(product >= 0, product, np.where(known, op, unknown))
    result: Ints = np.where(multiplies[kind.reshape(-1)], product, -1)
    return result


def _multiplies(events: TraceEvents, name: int, op: int, dtypes: int, *, amd: bool) -> bool:
    texts = events.texts
    types = parse_types(texts[dtypes]) if dtypes >= 0 else []
    tensor_core, _, category = classed(
        texts[name], texts[op] if op >= 0 else None, types, events.accelerator, on_cpu=False, amd=amd
    )
    return category in GEMM_CATEGORIES or tensor_core == "yes"


def _is_product(events: TraceEvents, categories: Collection[str] = GEMM_CATEGORIES) -> Bools:
    """Which spans are operators that multiply matrices; nodes of autograd and marked ranges are none."""
    of_name = [
        "::" in text and not text.startswith(EVALUATE) and operator_category(text) in categories
        for text in events.texts
    ]
    result: Bools = np.array(of_name, dtype=bool)[np.asarray(events.spans.name)]
    result &= np.asarray(events.spans.kind) == OP
    return result


def _casts(events: TraceEvents) -> Bools:
    """Which spans have the inputs of a copy between dtypes."""
    dtypes = np.asarray(events.spans.dtypes)
    lists = np.unique(dtypes[dtypes >= 0]).tolist()
    return np.isin(dtypes, [n for n in lists if refine("other", "aten::copy_", parse_types(events.texts[n])) == "cast"])


def _outermost_products(events: TraceEvents, host: Host) -> Ints:
    """By span, the outermost product around it, or itself; -1 outside of products."""
    is_product, parent = _is_product(events), host.parent
    result: Ints = np.where(is_product, np.arange(len(parent)), -1)
    around = parent.copy()
    while (inside := around >= 0).any():
        result = np.where(inside & is_product[around], around, result)
        around = np.where(inside, parent[around], -1)
    return result
