"""Detects factors, such as the weights of losses, that are zero in 16 bits or leave nothing of what they multiply.

found = LostFactors()
found.check("mul", args, out)      # after each operator, found: how many factors are lost in which dtype
"""

import math
from collections.abc import Sequence
from typing import Any

import torch

from amp_core.record.model.narrow_dtypes import NARROW
from amp_core.record.model.parameters import in_backward
from amp_core.record.observers.signals.marks import Found, Marks

MAX_FACTORS = 256
"""Values of a tensor that may be factors: a weight for each class."""
WEIGHTED = {"mul": (0, 1), "nll_loss_forward": (2,), "nll_loss2d_forward": (2,), "binary_cross_entropy": (2,)}
"""Operators, with the arguments that are factors."""


class LostFactors:
    """The operators of one step, in their order."""

    def __init__(self) -> None:
        self._marks: Marks[tuple[torch.Tensor, torch.Tensor]] = Marks()  # what was cast, and to what

    def check(self, op: str, args: Sequence[Any], out: Any) -> Found | None:
        """Inspect an operator that has run."""
        name, first = op.rstrip("_"), args[0] if args else None
        if not isinstance(first, torch.Tensor) or in_backward():
            return None
        if name == "_to_copy":
            if may_be_factors(first) and isinstance(out, torch.Tensor) and out.dtype in NARROW:
                self._marks.put(out, (first.detach(), out.detach()))
            return None
        factors = [args[place] for place in WEIGHTED.get(name, ()) if place < len(args)]
        cast = next((mark for factor in factors if (mark := self._marks.of(factor)) is not None), None)
        if cast is not None:
            wide, narrow = cast
            zeros = ((narrow == 0) & (wide.to(narrow.device) != 0)).sum()
            return Found("lost factor", op, narrow.dtype, zeros, 0.0)
        if name not in ("mul", "div") or not _is_constant(args[1]):
            return None
        if out.dtype not in NARROW or out.data_ptr() == first.data_ptr():
            return None
        regular = (args[1] != 0) & (abs(args[1]) < math.inf)  # of an infinite divisor the overflow is told
        nothing = ~out.detach().any() & first.detach().any() & regular
        return Found("lost factor", op, out.dtype, nothing, 0.0)


def may_be_factors(tensor: torch.Tensor) -> bool:
    """Whether a tensor is as small as the weights of classes or the decays of channels, in a wide dtype, and no
    parameter."""
    wide = tensor.dtype in (torch.float32, torch.float64)
    return wide and tensor.dim() < 2 and tensor.numel() <= MAX_FACTORS and not isinstance(tensor, torch.nn.Parameter)


def _is_constant(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.dim() == 0 and not value.requires_grad and value.is_cpu
    return isinstance(value, float)
