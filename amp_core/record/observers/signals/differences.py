"""Detects differences of values that were rounded to 16 bits before: most of them smaller than the rounding.

    found = Differences()
    found.check("sub", args, out)     # found: the share of such differences; None for others

Coordinates far from their origin, and times since an epoch, differ by little beside their size. A difference of rounded
values is exact; what it tells was lost in the cast.
"""

from collections.abc import Sequence
from typing import Any

import torch

from amp_core.record.model.narrow_dtypes import NARROW
from amp_core.record.observers.signals.marks import Found, Marks

MAX_SPACINGS = 2.0
"""A difference below this number of spacings of what it is taken from is mostly rounding."""
MIN_LOST_FRAC = 0.5
MIN_DIFFERENCES = 16
SELECTIONS = ("index", "index_select", "gather", "repeat", "clone")
"""Operators whose result has values of their first argument. Views have the mark of their base."""


class Differences:
    """The operators of one step, in their order."""

    def __init__(self) -> None:
        self._rounded: Marks[torch.dtype] = Marks()

    def check(self, op: str, args: Sequence[Any], out: Any) -> Found | None:
        """Inspect an operator that has run."""
        if not isinstance(out, torch.Tensor) or not out.is_floating_point() or not args:
            return None
        name, first = op.rstrip("_"), args[0]
        if name == "_to_copy" and out.dtype in NARROW and first.dtype in (torch.float32, torch.float64):
            self._rounded.put(out, out.dtype)
        elif name == "_to_copy" or name in SELECTIONS:
            if (dtype := self._rounded.of(first)) is not None:
                self._rounded.put(out, dtype)
        elif name == "sub" and out.numel() >= MIN_DIFFERENCES and len(args) > 1:
            dtype = self._rounded.of(first)
            if dtype is not None and self._rounded.of(args[1]) is not None:
                spacing = torch.finfo(dtype).eps * first.detach().abs()
                lost = (out.detach().abs() < MAX_SPACINGS * spacing).to(torch.float32).mean()
                return Found("rounded positions", "differences", dtype, lost, MIN_LOST_FRAC)
        return None
