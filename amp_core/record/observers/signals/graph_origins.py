"""Finds the operator whose result was the first that is not finite, from the graph of a tensor, before its backward.

    origin = origin_in_graph(loss, finite=[logits])     # `logits` and all before it was finite
    origin.op, origin.dtype, origin.value               # "exp", torch.float16, 21.5

An operator is the origin if its result is not finite, which what was saved of it or is computed again of its arguments
shows, and its arguments were finite, which is known or bounded. Nothing is said of one whose result nobody saved.
"""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from amp_core.record.observers.signals.saved_values import (
    LEAF,
    MAX_NODES,
    bound,
    leaf_values,
    operator,
    result_dtype,
    saved,
)
from amp_core.record.stats.layout import dtype_name
from amp_core.schema.event_kinds import BY_ZERO, OF_ZERO
from amp_core.store.writer import RunWriter

_OF_ZERO = ("log", "log2", "log10", "rsqrt", "reciprocal")
"""Operators whose result is infinite of a zero alone."""
_RESULTS = ("result", "output", "result0", "logsumexp")
"""Names under which nodes save what they computed."""
_AGAIN: dict[str, Callable[..., torch.Tensor]] = {
    "Mul": torch.mul,
    "Div": torch.div,
    "Log": torch.log,
    "Log2": torch.log2,
    "Log10": torch.log10,
    "Atan2": torch.atan2,
    "Acosh": torch.acosh,
    "Acos": torch.acos,
    "Asin": torch.asin,
    "Pow": torch.pow,
    "Dot": torch.dot,
    "Mv": torch.mv,
    "Mm": torch.mm,
    "Bmm": torch.bmm,
    "Addmm": torch.mm,  # what is added is not saved, and does not make an infinite product finite
    "Baddbmm": torch.bmm,
    "ToCopy": torch.clone,
}
"""Operators whose result is not saved, but the arguments are, or belong to a leaf."""
_OF_ONE = ("Log", "Log2", "Log10", "Acosh", "Acos", "Asin", "ToCopy")
_PLACES = {"self": 0, "input": 0, "query": 0, "other": 1, "vec": 1, "tensor": 1, "exponent": 1, "weight": 1, "mat1": 1,
           "mat2": 1, "batch1": 1, "key": 1, "batch2": 2, "value": 2}  # fmt: skip
"""The place among the arguments of what a node saves under a name."""
_CHOOSING = ("MaskedFill", "MaskedScatter", "Where", "IndexPut", "IndexFill", "Fill", "Scatter", "CopySlices", "Copy",
             "Cat", "Stack", "SliceScatter", "SelectScatter", "ConstantPadNd")  # fmt: skip
"""Operators that put numbers of others together, such as the -inf of a mask."""
_NAMES = {"ToCopy": "cast", "Log1P": "log1p", "NllLoss": "nll_loss"}


class Origin(NamedTuple):
    """The operator whose result was not finite although its arguments were."""

    op: str
    """Its name as in `torch`, such as `exp`, with `of 0` or `by 0` behind it if it takes the logarithm of a
    zero, or divides by one."""
    dtype: torch.dtype
    """Of its result."""
    value: float | None
    """The largest magnitude among its arguments, as far as they are saved."""


def origin_in_graph(tensor: torch.Tensor, finite: Iterable[torch.Tensor] = ()) -> Origin | None:
    """The origin of a tensor that is not finite; None if its graph does not show it.

    The graph is followed to tensors that are known to be finite, and to leaves.
    """
    known = {t.grad_fn for t in finite if t.grad_fn is not None}
    start = tensor.grad_fn
    if start is None or start in known:
        return None
    bad, seen, waiting = {start}, {start}, [start]
    found: dict[Any, list[torch.Tensor]] = {}
    while waiting and len(seen) <= MAX_NODES:
        node: Any = waiting.pop()
        arguments = _arguments(node)
        sound = True
        for place, (following, _) in enumerate(node.next_functions):
            value = arguments.get(place)
            state = _is_finite(following, value, known)
            sound = sound and state is True
            if following is None or state is True or operator(following) == LEAF:
                continue
            if state is False:
                bad.add(following)
            if following not in seen:
                seen.add(following)
                waiting.append(following)
        if sound and operator(node) not in _CHOOSING:
            found[node] = list(arguments.values())
    origins = [node for node in found if node in bad or _computes_bad(node, found[node])]
    if not origins:
        return None
    first = min(origins, key=lambda node: node._sequence_nr())
    return _origin(first, found[first])


def origin_of_call(op: str, arguments: Sequence[torch.Tensor], dtype: torch.dtype) -> Origin:
    """An origin, by its operator's name and its floating-point arguments as far as they are known."""
    if op in _OF_ZERO and any(bool((value == 0).any()) for value in arguments):
        op += OF_ZERO
    elif op == "div" and bool((arguments[-1] == 0).any()):
        op += BY_ZERO
    sizes = [float(value.detach().abs().max()) for value in arguments if value.is_floating_point()]
    return Origin(op, dtype, max(sizes, default=None))


def write_origin(writer: RunWriter, step: int, module: str | None, origin: Origin) -> None:
    """Write an event for the operator of this module that was found, or of the loss, if `module` is None."""
    writer.event(
        "non-finite operator",
        module or "",
        "" if module is None else "module",
        step,
        op=origin.op,
        dtype=dtype_name(origin.dtype),
        phase="forward",
        value=origin.value,
        limit=float(torch.finfo(origin.dtype).max),
    )


def _arguments(node: Any) -> dict[int, torch.Tensor]:
    """The arguments of the operator of a node that are saved, or are leaves, by their places."""
    arguments = {}
    for name, place in _PLACES.items():
        value = saved(node, name) if hasattr(node, f"_raw_saved_{name}") else None
        if value is not None and value.numel() and not value.is_complex():
            arguments[place + (name == "mat2" and hasattr(node, "_raw_saved_mat1"))] = value
    for place, (following, _) in enumerate(node.next_functions):
        if place not in arguments and following is not None and operator(following) == LEAF:
            arguments[place] = leaf_values(following)
    return dict(sorted(arguments.items()))


def _is_finite(node: Any, value: torch.Tensor | None, known: set[Any]) -> bool | None:
    """Whether an argument, which `node` computed, is finite; None if that is not known."""
    if value is not None:
        return bool(value.isfinite().all())
    if node is None:  # a constant that is not saved, such as that of an addition
        return None
    if node in known:
        return True
    if operator(node) == LEAF:
        return bool(leaf_values(node).isfinite().all())
    if (result := _result(node)) is not None:
        return bool(result.isfinite().all())
    if operator(node) not in _CHOOSING and bound(node) < math.inf:
        return True
    return None


def _result(node: Any) -> torch.Tensor | None:
    for name in _RESULTS:
        value = saved(node, name)
        if value is not None and value.is_floating_point() and value.numel():
            return value
    return None


def _computes_bad(node: Any, arguments: list[torch.Tensor]) -> bool:
    """Whether the result of an operator with these finite arguments is not finite."""
    if (result := _result(node)) is not None:
        return not bool(result.isfinite().all())
    op = operator(node)
    exponent = getattr(node, "_saved_exponent", None)
    given = [*arguments, exponent] if isinstance(exponent, int | float) else arguments
    given = given[-2:] if op in ("Addmm", "Baddbmm") else given
    if op not in _AGAIN or len(given) != 2 - (op in _OF_ONE):
        return False
    return not bool(_AGAIN[op](*given).to(result_dtype(node)).isfinite().all())


def _origin(node: Any, arguments: list[torch.Tensor]) -> Origin:
    op = operator(node)
    name = _NAMES.get(op) or re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", op).lower()
    return origin_of_call(name, arguments, result_dtype(node))
