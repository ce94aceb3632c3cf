"""Finds the operator behind which every gradient is zero, because all of its arguments are where it is flat.

    dead_operator(loss)     # "clamp": the output is outside of its limits everywhere; None if there is none

It reads what autograd has saved of the operators next to the loss.
"""

from typing import Any

import torch

from amp_core.record.observers.signals.saved_values import operator, saved

MAX_NODES = 32
"""Operators next to the loss that are looked at."""


def dead_operator(loss: torch.Tensor) -> str | None:
    """The name of the operator next to the loss that passes no gradient at all; None if each passes some."""
    waiting, seen = [loss.grad_fn], {loss.grad_fn}
    while waiting and len(seen) <= MAX_NODES:
        node: Any = waiting.pop(0)
        if node is None:
            continue
        if _is_flat(node):
            return operator(node).lower()
        following = {n for n, _ in node.next_functions if n is not None} - seen
        seen |= following
        waiting += following
    return None


def _is_flat(node: Any) -> bool:
    """Whether the derivative of an operator is zero at each of its arguments."""
    op = operator(node)
    if op in ("Clamp", "ClampMin", "ClampMax", "Hardtanh"):
        values = saved(node, "self")
        low = _limit(node, "min", "min_val", default=-torch.inf)
        high = _limit(node, "max", "max_val", default=torch.inf)
        return values is not None and bool(((values < low) | (values > high)).all())
    result = saved(node, "result")
    if result is None or not result.numel():
        return False
    if op == "Relu":
        return not bool(result.any())
    if op == "Sigmoid":
        return bool(((result == 0) | (result == 1)).all())
    return op == "Tanh" and bool((result.abs() == 1).all())


def _limit(node: Any, *names: str, default: float) -> float:
    found = (getattr(node, f"_saved_{name}", None) for name in names)
    return next((float(value) for value in found if isinstance(value, int | float)), default)
