"""Detects squared distances that lose their digits: the squares of two vectors less twice their product in 16 bits.

    found = Distances()
    found.check("sub", args, out)     # found: the share of the distances that lost their digits; None for others

The product is rounded by 2^-9 of its size in bfloat16, even if the squares are in float32. Where vectors are much
closer to each other than they are long, such as latents and the codes of a quantizer, rounding decides which is the
nearest.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from amp_core.record.model.narrow_dtypes import NARROW
from amp_core.record.observers.signals.marks import Found, Marks
from amp_core.record.observers.signals.variances import MIN_LOST_FRAC, is_two

MAX_SPACINGS = 4.0
"""A distance of fewer spacings of what it is subtracted from has lost its digits, as a variance has."""
SQUARE, SQUARES, BOTH_SQUARES = "square", "sum of squares", "sums of squares of two vectors"
PRODUCT, LESS_PRODUCT = "product", "sum of squares less a product"
DIFFERENCES = (("sub", BOTH_SQUARES, PRODUCT), ("add", LESS_PRODUCT, SQUARES), ("add", SQUARES, LESS_PRODUCT))


class _Part(NamedTuple):
    what: str
    dtype: torch.dtype | None
    """The 16-bit dtype to which it, or a part of it, was rounded."""


class Distances:
    """The operators of one step, in their order."""

    def __init__(self) -> None:
        self._marks: Marks[_Part] = Marks()

    def check(self, op: str, args: Sequence[Any], out: Any) -> Found | None:
        """Inspect an operator that has run."""
        if not isinstance(out, torch.Tensor) or not out.is_floating_point() or not args:
            return None
        name, first, second = op.rstrip("_"), args[0], args[1] if len(args) > 1 else None
        mark, narrow = self._marks.of(first), out.dtype if out.dtype in NARROW else None
        if name in ("mm", "bmm") and narrow is not None:
            self._marks.put(out, _Part(PRODUCT, narrow))
        elif name == "square" or (name == "pow" and is_two(second)) or (name == "mul" and second is first):
            self._marks.put(out, _Part(SQUARE, narrow))
        elif mark is None:
            return None
        elif name == "sum" and mark.what == SQUARE and 1 < out.numel() < first.numel():
            self._marks.put(out, _Part(SQUARES, mark.dtype or narrow))
        elif name in ("_to_copy", "neg") or (name in ("mul", "div") and not _is_tensor(second)):
            self._marks.put(out, mark)
        elif name in ("add", "sub") and (other := self._marks.of(second)) is not None:
            return self._combine(op, mark, other, first, out)
        return None

    def _combine(self, op: str, first: _Part, second: _Part, minuend: torch.Tensor, out: torch.Tensor) -> Found | None:
        dtype, parts = first.dtype or second.dtype, (op.rstrip("_"), first.what, second.what)
        if parts in DIFFERENCES and dtype is not None:
            spacing = torch.finfo(dtype).eps * minuend.detach().abs()
            lost = (out.detach() < MAX_SPACINGS * spacing).to(torch.float32).mean()
            return Found("narrow distance", op, dtype, lost, MIN_LOST_FRAC)
        if parts == ("add", SQUARES, SQUARES) and minuend.numel() < out.numel():
            self._marks.put(out, _Part(BOTH_SQUARES, dtype))
        elif parts == ("sub", SQUARES, PRODUCT):
            self._marks.put(out, _Part(LESS_PRODUCT, dtype))
        return None


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0
