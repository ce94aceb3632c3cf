"""Detects differences of a cumulative sum that was rounded to 16 bits: they lose what tells neighbours apart.

    sums = CumulativeSums()
    sums.check("cumsum", (x, 1), total)
    sums.check("sub", (total[:, :, None], total[:, None]), out)      # whether that is so, terms and dtype

State-space models take the decay between two positions as the exponential of such a difference, moving averages as the
difference itself (mamba computes both in float32).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from amp_core.record.model.narrow_dtypes import NARROW
from amp_core.record.observers.signals.marks import Found, Marks

MIN_SPACING_RATIO = 0.25
"""Smallest spacing that the 16-bit dtype may have at the largest sum, over the mean magnitude of a term: the difference
of two neighbours is then off by up to a quarter of a term and more. In bfloat16 it takes 64 terms of one sign."""

SAME = ("neg", "mul", "_to_copy", "clone")
"""Operators whose results are as coarse as what they take."""


class _Rounded(NamedTuple):
    coarse: torch.Tensor
    """Whether the spacing at the largest sum is that large, a scalar."""
    terms: int
    dtype: torch.dtype


class CumulativeSums:
    """The operators of one step, in their order."""

    def __init__(self) -> None:
        self._marks: Marks[_Rounded] = Marks()

    def check(self, op: str, args: Sequence[Any], out: Any) -> Found | None:
        """Inspect an operator that has run."""
        if not isinstance(out, torch.Tensor) or not args or not out.numel():
            return None
        if op == "cumsum" and out.dtype in NARROW and out.dim():
            terms, sums = args[0].detach(), out.detach()
            spacing = sums.abs().amax().float() * torch.finfo(out.dtype).eps / 2
            coarse = spacing >= MIN_SPACING_RATIO * terms.abs().float().mean()
            self._marks.put(out, _Rounded(coarse, out.shape[args[1]], out.dtype))
        elif op in SAME and (rounded := self._marks.of(args[0])) is not None:
            self._marks.put(out, rounded)
        elif op == "sub":
            marks = [self._marks.of(a) for a in args[:2]]
            if marks[0] is not None and marks[0] is marks[1]:
                return Found("narrow sum", op, marks[0].dtype, marks[0].coarse * marks[0].terms, 0.0)
        return None
