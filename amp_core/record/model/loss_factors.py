"""The numbers by which a loss was multiplied, from its graph: nothing is computed, and no device is waited for.

factor_of(loss.grad_fn)         # 256.0 for `loss = mean * 256.0`; None without such a number
own_scale(loss)                 # 256.0 too; None for factors that no loss scale has
multiplied_by(loss, 256.0)      # whether one of its last operators did that
"""

import math
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

MIN_LOSS_SCALE = 64.0
"""Smaller constant factors of a loss are weights."""
MIN_OWN_SCALE = 128.0
"""A power of two that is smaller may be the weight of a loss too."""
MAX_OPERATORS = 4
"""Last operators of a loss that are searched: a mean over micro-batches may follow."""


def factor_of(node: Any) -> float | None:
    """The constant by which a node of the graph multiplies; None for other nodes, and for one on a GPU."""
    other = getattr(node, "_saved_other", None) if node is not None and node.name().startswith("MulBackward") else None
    if type(other) is not torch.Tensor or other.numel() != 1 or other.requires_grad or not other.is_cpu:
        return None
    with _disable_current_modes():  # they would be given a Python number in place of the tensor
        return float(other)


def own_scale(loss: torch.Tensor) -> float | None:
    """The loss scale by which the program's own code multiplied a loss in the end: a power of two of 128 or more."""
    factor = factor_of(loss.grad_fn)
    return factor if factor is not None and factor >= MIN_OWN_SCALE and math.frexp(factor)[0] == 0.5 else None


def multiplied_by(loss: torch.Tensor, scale: Any) -> bool:
    """Whether one of the last operators of a loss multiplied it by this loss scale."""
    node = loss.grad_fn
    for _ in range(MAX_OPERATORS if isinstance(scale, float) and scale >= MIN_LOSS_SCALE else 0):
        if node is None or factor_of(node) == scale:
            return node is not None
        node = node.next_functions[0][0] if node.next_functions else None
    return False
