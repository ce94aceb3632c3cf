"""Detects angles in FP32 of positions or timesteps that had 16 bits before: the cast back does not restore them.

    angles = RoundedAngles()
    angles.check("_to_copy", args, out)
    angles.check("mul", args, out)
    angles.check("cos", args, out)      # found: the largest angle, in the dtype that the positions had; None for others

Beyond 256 in bfloat16, and 2,048 in float16, integers collide, and a timestep of 998.4 becomes 1,000 (DiffSynth-Studio
pull request 1025). Positions have no gradient; activations of periodic functions do.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from amp_core.record.model.narrow_dtypes import NARROW
from amp_core.record.model.parameters import in_backward
from amp_core.record.observers.signals.marks import Found, Marks

PRODUCTS = ("mul", "div", "mm", "bmm", "add", "_to_copy")
"""Operators by which angles are made of positions and frequencies."""


class _Position(NamedTuple):
    dtype: torch.dtype
    """The 16-bit dtype that they had."""
    rounded: torch.Tensor
    """Whether the largest is beyond the integers that this dtype has all of."""


class RoundedAngles:
    """The operators of one step, in their order."""

    def __init__(self) -> None:
        self._marks: Marks[_Position] = Marks()

    def check(self, op: str, args: Sequence[Any], out: Any) -> Found | None:
        """Inspect an operator that has run."""
        first = args[0] if args and isinstance(args[0], torch.Tensor) else None
        # Under a mode, the result does not require a gradient yet.
        if not isinstance(out, torch.Tensor) or out.dtype in NARROW or first is None or first.requires_grad:
            return None
        if op == "_to_copy" and first.dtype in NARROW and not in_backward():
            if out.is_floating_point() and first.numel():
                exact = 2 / torch.finfo(first.dtype).eps
                self._marks.put(out, _Position(first.dtype, first.detach().abs().amax() > exact))
            return None
        position = next((mark for a in args[:2] if (mark := self._marks.of(a)) is not None), None)
        if position is None:
            return None
        if op in ("cos", "sin"):
            largest = out.new_tensor(0.0).where(~position.rounded, args[0].detach().abs().amax())
            limit = largest_exact_angle(position.dtype)
            return Found("rounded positions", "angles", position.dtype, largest, limit)
        if op.rstrip("_") in PRODUCTS:
            self._marks.put(out, position)
        return None


def largest_exact_angle(dtype: torch.dtype) -> float:
    """The angle from which neighbouring values of a dtype are a quarter of a radian apart: 32 for bfloat16."""
    return 0.25 / float(torch.finfo(dtype).eps)
