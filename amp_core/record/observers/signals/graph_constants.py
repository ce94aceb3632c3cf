"""Finds a number without a gradient, such as a target, that is not finite and makes the loss so, from the loss's graph.

    found = constant_in_graph(loss, finite=[logits])    # `logits` and all before it was finite
    found.op, found.argument, found.dtype               # "mse_loss", "target", torch.float16: it was rounded to that

What autograd saves of an operator's arguments shows it. Where it saves none, as of an addition, the result does if the
other argument is finite and the result's format has float32's range, so that it did not overflow.
"""

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from amp_core.record.observers.signals.graph_origins import Origin, write_origin
from amp_core.record.observers.signals.saved_values import (
    LEAF,
    MAX_NODES,
    VIEWS,
    leaf_values,
    operator,
    result_dtype,
    saved,
)
from amp_core.schema.event_kinds import NONFINITE_CONSTANT
from amp_core.store.writer import RunWriter

_ARGUMENTS = {"self": 0, "input": 0, "other": 1, "target": 1, "weight": 2, "pos_weight": 3}
"""The place among the arguments of what a node saves under a name."""
_LOSSES = ("MseLoss", "SmoothL1Loss", "HuberLoss", "BinaryCrossEntropy", "BinaryCrossEntropyWithLogits")
_PRODUCTS = ("Mul", "Div")
_SUMS = ("Add", "Sub", "Rsub")
"""Operators that save none of their arguments."""
_DISTANCES = ("Abs", "Pow", "Mul")
"""Operators that save the sum they are given, and of which -inf makes no finite number, as a softmax does."""


class Constant(NamedTuple):
    """A non-finite argument without a gradient, of an operator whose other arguments are finite."""

    op: str
    """The operator's name as in `torch`."""
    argument: str
    """The name of the argument; `constant` where it has none that tells anything."""
    dtype: torch.dtype
    """`float16` if every finite number in it is one of float16, otherwise that in which the operator got it."""
    value: float | None = None
    """The largest finite magnitude in it; None if there is none, or it is not saved."""


def constant_in_graph(tensor: torch.Tensor, finite: Iterable[torch.Tensor] = ()) -> Constant | None:
    """The argument that made `tensor` non-finite; None if its graph shows none."""
    known = {t.grad_fn for t in finite if t.grad_fn is not None}
    waiting: list[tuple[Any, torch.Tensor | None]] = [(tensor.grad_fn, None)]
    seen = {tensor.grad_fn}
    found: list[tuple[int, Constant]] = []
    while waiting and len(seen) <= MAX_NODES:
        node, result = waiting.pop()
        if node is None or node in known or operator(node) == LEAF:
            continue
        if (constant := _constant_of(node, result, known)) is not None:
            found.append((node._sequence_nr(), constant))
        values = _saved_arguments(node)
        saves = operator(node) in _DISTANCES
        for place, (following, _) in enumerate(node.next_functions):
            if following not in seen:
                seen.add(following)
                waiting.append((following, values.get(place, ("", None))[1] if saves else None))
    return min(found, key=lambda one: one[0])[1] if found else None


def write_constant(writer: RunWriter, step: int, module: str | None, constant: Constant) -> None:
    """Write an event for a constant in this module, or in the loss, if `module` is None."""
    op = f"{NONFINITE_CONSTANT}{constant.argument} of {constant.op}"
    write_origin(writer, step, module, Origin(op, constant.dtype, constant.value))


def _constant_of(node: Any, result: torch.Tensor | None, known: set[Any]) -> Constant | None:
    """The non-finite constant of one operator, whose `result` an operator after it may have saved."""
    op = operator(node)
    if op not in (*_LOSSES, *_PRODUCTS, *_SUMS):
        return None
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", op).lower()
    values = _saved_arguments(node)
    others = [
        _is_finite(following, values.get(place, ("", None))[1], known)
        for place, (following, _) in enumerate(node.next_functions)
        if following is not None
    ]
    if not others or not all(others):
        return None
    if op in _SUMS:
        return Constant(name, "constant", result_dtype(node)) if _has_bad_term(node, op, result) else None
    for place, (argument, value) in values.items():
        without_graph = place >= len(node.next_functions) or node.next_functions[place][0] is None
        if without_graph and not bool(value.isfinite().all()):
            return Constant(name, argument if op in _LOSSES else "constant", *_dtype_and_size(value))
    return None


def _has_bad_term(node: Any, op: str, result: torch.Tensor | None) -> bool:
    """Whether a term that is not saved made this sum of a finite one non-finite. One of -inf is a mask."""
    if result is None or sum(following is None for following, _ in node.next_functions) != 1:
        return False
    if result_dtype(node) == torch.float16 or result.dtype == torch.float16:
        return False
    bad = result[~result.isfinite()]
    return bool(bad.numel()) and not (op == "Add" and bool((bad == float("-inf")).all()))


def _is_finite(node: Any, value: torch.Tensor | None, known: set[Any]) -> bool:
    """Whether an argument is known to be finite: it is saved, or a leaf, or a view or wider copy of what is known."""
    if value is not None:
        return bool(value.isfinite().all())
    while node not in known and node.next_functions and node.next_functions[0][0] is not None:
        wider = operator(node) == "ToCopy" and result_dtype(node) != torch.float16
        if not wider and operator(node) not in VIEWS:
            break
        node = node.next_functions[0][0]
    if operator(node) == LEAF:
        return bool(leaf_values(node).isfinite().all())
    return node in known


def _saved_arguments(node: Any) -> dict[int, tuple[str, torch.Tensor]]:
    """By place, the names and values of the floating-point arguments that a node saved."""
    found = {}
    for name, place in _ARGUMENTS.items():
        value = saved(node, name) if hasattr(node, f"_raw_saved_{name}") else None
        if value is not None and value.is_floating_point() and value.numel():
            found[place] = (name, value)
    return found


def _dtype_and_size(value: torch.Tensor) -> tuple[torch.dtype, float | None]:
    finite = value[value.isfinite()]
    if not finite.numel():
        return value.dtype, None
    return torch.float16 if bool((finite.half() == finite).all()) else value.dtype, float(finite.abs().max())
