"""Detects logits so large that 16 bits round them by more than one.

    found = CoarseLogits()
    found.check("_log_softmax", args, out)     # found: the size of the largest logit; None for others

A softmax takes differences of logits: where they are off by one, probabilities are off by the factor e. Similarities
that are divided by a small temperature are such logits.
"""

from collections.abc import Sequence
from typing import Any

import torch

from amp_core.record.model.narrow_dtypes import NARROW
from amp_core.record.observers.signals.marks import Found, Marks

MAX_RATIO = 16.0
"""Logits beyond so many times the limit make a softmax a maximum in any dtype."""


class CoarseLogits:
    """The operators of one step, in their order."""

    def __init__(self) -> None:
        self._rounded: Marks[torch.dtype] = Marks()

    def check(self, op: str, args: Sequence[Any], out: Any) -> Found | None:
        """Inspect an operator that has run."""
        if not isinstance(out, torch.Tensor) or not args or not isinstance(args[0], torch.Tensor):
            return None
        first = args[0]
        dtype = first.dtype if first.dtype in NARROW else self._rounded.of(first)
        if dtype is None or not first.dim():
            return None
        if op in ("_to_copy", "mul", "div"):
            if out.dtype == torch.float32 and out.numel() == first.numel():
                self._rounded.put(out, dtype)
        elif op in ("_log_softmax", "logsumexp") and first.numel():
            largest = first.detach().amax(-1).abs().to(torch.float32).median()  # of most rows
            limit = 2 / torch.finfo(dtype).eps
            return Found("coarse logits", op, dtype, largest * (largest <= MAX_RATIO * limit), limit)
        return None
