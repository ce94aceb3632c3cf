"""Detects predictions that were rounded to 16 bits more coarsely than their targets differ from each other.

    found = CoarsePredictions()
    found.check("mse_loss", args, out)     # found: spacing over the targets' standard deviation; None for others

Near 100, bfloat16 has steps of 0.5: a regression on temperatures in kelvin or on prices comes no nearer.
"""

from collections.abc import Sequence
from typing import Any

import torch

from amp_core.record.model.narrow_dtypes import NARROW
from amp_core.record.observers.signals.marks import Found, Marks

LOSSES = ("mse_loss", "smooth_l1_loss", "huber_loss", "sub")
MIN_TARGETS = 16
MIN_SPACING_RATIO = 1.0
"""Spacing of the predictions' dtype at the targets' mean, over their standard deviation."""
MIN_SPREAD_RATIO = 1e-5
"""Standard deviation of the targets over their mean; below that they are all the same, as labels of a GAN are."""


class CoarsePredictions:
    """The operators of one step, in their order."""

    def __init__(self) -> None:
        self._rounded: Marks[torch.dtype] = Marks()

    def check(self, op: str, args: Sequence[Any], out: Any) -> Found | None:
        """Inspect an operator that has run."""
        if len(args) < 1 or not isinstance(args[0], torch.Tensor) or not isinstance(out, torch.Tensor):
            return None
        first, second = args[0], args[1] if len(args) > 1 else None
        if op == "_to_copy" and out.dtype == torch.float32 and first.dtype in NARROW and first.requires_grad:
            self._rounded.put(out, first.dtype)
        elif op in LOSSES and isinstance(second, torch.Tensor) and first.shape == second.shape:
            for prediction, target in ((first, second), (second, first)):
                dtype = self._rounded.of(prediction)
                if dtype is not None and target.dtype == torch.float32 and not target.requires_grad:
                    return self._compare(op, target.detach(), dtype)
        return None

    def _compare(self, op: str, target: torch.Tensor, dtype: torch.dtype) -> Found | None:
        if self._rounded.of(target) is not None or target.numel() < MIN_TARGETS:
            return None
        spread, mean = torch.std_mean(target)
        spacing = torch.finfo(dtype).eps / 2 * mean.abs()  # to twice that, within a power of two
        differ = spread > MIN_SPREAD_RATIO * mean.abs()
        ratio = spacing / spread.clamp_min(torch.finfo(torch.float32).tiny)
        return Found("coarse predictions", op, dtype, ratio * differ, MIN_SPACING_RATIO)
