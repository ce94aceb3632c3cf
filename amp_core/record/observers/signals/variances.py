"""Detects variances in 16 bits that are a difference of nearly equal numbers: a mean of squares less a squared mean.

    found = Variances()
    found.check("sub", args, out)     # found: the share of the variances that lose their digits; None for others

Both means are rounded by 2^-9 of their size in bfloat16. Where the variance is a few hundredths of them, that is a
tenth of it and more, and it may become negative. Values whose mean is near zero lose nothing.
"""

from collections.abc import Sequence
from typing import Any

import torch

from amp_core.record.model.narrow_dtypes import NARROW
from amp_core.record.observers.signals.marks import Found, Marks

MAX_SPACINGS = 4.0
"""A variance of fewer spacings of the number that it is subtracted from has lost its digits."""
MIN_LOST_FRAC = 0.5
"""Share of such variances."""
SQUARE, MEAN, MEAN_SQUARE, SQUARED_MEAN = "square", "mean", "mean of squares", "square of the mean"


class Variances:
    """The operators of one step, in their order."""

    def __init__(self) -> None:
        self._marks: Marks[str] = Marks()

    def check(self, op: str, args: Sequence[Any], out: Any) -> Found | None:
        """Inspect an operator that has run."""
        if not isinstance(out, torch.Tensor) or out.dtype not in NARROW or not args:
            return None
        name, first, second = op.rstrip("_"), args[0], args[1] if len(args) > 1 else None
        if name == "mean" or (name == "sum" and out.numel() < first.numel()):
            self._marks.put(out, MEAN_SQUARE if self._marks.of(first) == SQUARE else MEAN)
        elif name == "square" or (name == "pow" and is_two(second)) or (name == "mul" and second is first):
            self._marks.put(out, SQUARED_MEAN if self._marks.of(first) == MEAN else SQUARE)
        elif name in ("div", "mul") and not (isinstance(second, torch.Tensor) and second.dim()):
            if (mark := self._marks.of(first)) is not None:  # of a sum
                self._marks.put(out, mark)
        elif name == "sub" and self._marks.of(first) == MEAN_SQUARE and self._marks.of(second) == SQUARED_MEAN:
            spacing = torch.finfo(out.dtype).eps * first.detach().abs()
            lost = (out.detach() < MAX_SPACINGS * spacing).to(torch.float32).mean()
            return Found("narrow variance", op, out.dtype, lost, MIN_LOST_FRAC)
        return None


def is_two(exponent: Any) -> bool:
    """Whether a power with this exponent is a square."""
    return isinstance(exponent, int | float) and exponent == 2
