"""Detects logarithms of a softmax over many classes in 16 bits, in one operator or in several, and ratios of
probabilities from 16-bit logarithms.

    classes = WideClasses(reports)
    classes.check("_log_softmax", args, out, module)       # after each operator with 16-bit input and output
    classes.check_ratio("sub", args, out, module)          # after each operator
"""

from collections.abc import Sequence
from typing import Any

import torch

from amp_core.record.model.narrow_dtypes import NARROW
from amp_core.record.observers.signals.op_reports import Module, OpReports

MIN_CLASSES = 8192
"""Classes from which the logarithm of a softmax in 16 bits is reported: their logarithm is 9 and more, where bfloat16
has steps of 2^-4."""

MIN_RATIOS = 16
"""Log-probabilities in float32 that a 16-bit dtype all holds exactly, and that are no integers, were rounded to it."""


class WideClasses:
    """The operators of one step, in their order."""

    def __init__(self, reports: OpReports) -> None:
        self._reports = reports
        self._softmax: dict[str, int] = {}  # classes of a softmax over many, by module
        self._sums: dict[tuple[int, ...], int] = {}  # terms of a sum over many classes, by its shape
        # By the id of a difference: itself, the 16-bit dtype in it, and whether it was in that, once that is known.
        self._differences: dict[int, tuple[Any, torch.dtype, torch.Tensor | None]] = {}

    def forget(self) -> None:
        """Forget what is known of tensors."""
        self._differences = {}

    def check(self, op: str, args: Sequence[Any], out: torch.Tensor, module: Module) -> None:
        """Inspect an operator with 16-bit input and output."""
        name, first = op.rstrip("_"), args[0]
        if name == "_softmax":
            if first.dim() and first.shape[-1] >= MIN_CLASSES:
                self._softmax[module()] = first.shape[-1]
        elif name == "sum":
            terms = first.numel() // max(1, out.numel())
            if terms >= MIN_CLASSES and out.numel() > 1:
                self._sums[tuple(out.shape)] = terms
        elif name in ("_log_softmax", "logsumexp", "log"):
            dim = args[1] if len(args) > 1 and isinstance(args[1], int) else -1
            classes = first.shape[dim] if first.dim() else 1
            if name == "log" and self._softmax:  # of the chosen class alone
                classes = max(classes, self._softmax.get(module(), 0))
            if name == "log":  # of the sum of all exponentials
                classes = max(classes, self._sums.get(tuple(first.shape), 0))
            if classes >= MIN_CLASSES:
                self._reports.write("narrow classes", op, module(), float(classes), float(MIN_CLASSES), first.dtype)

    def check_ratio(self, op: str, args: Sequence[Any], out: Any, module: Module) -> None:
        """The loss of a policy has the ratio of its probabilities to earlier ones: the exponential of a difference of
        which one part has a gradient."""
        terms = [a for a in args[:2] if isinstance(a, torch.Tensor)]
        if op == "sub" and len(terms) == 2 and terms[0].shape == terms[1].shape and terms[0].dim():
            if terms[0].requires_grad == terms[1].requires_grad:
                return
            narrow = next((t.dtype for t in terms if t.dtype in NARROW), None)
            earlier = terms[0] if terms[1].requires_grad else terms[1]
            if narrow is not None:
                self._differences[id(out)] = out, narrow, None
            elif earlier.dtype == torch.float32 and earlier.numel() >= MIN_RATIOS:
                self._differences[id(out)] = out, torch.bfloat16, _were_rounded(earlier.detach(), torch.bfloat16)
        elif op in ("exp", "_to_copy") and terms and (found := self._differences.get(id(terms[0]))) is not None:
            _, dtype, rounded = found
            if op == "_to_copy":  # autocast on a GPU casts what `exp` is given
                self._differences[id(out)] = out, dtype, rounded
            elif module() == "loss" and rounded is None:
                self._reports.write("narrow ratio", op, "loss", float(out.numel()), 0.0, dtype)
            elif module() == "loss":
                self._reports.later("narrow ratio", op, "loss", dtype, rounded * out.numel(), 0.0)
                self._reports.write("ratio", op, "loss", float(out.numel()), 0.0, torch.float32)


def _were_rounded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Whether a dtype holds all these values exactly, and they are not all integers."""
    return (values.to(dtype).to(values.dtype) == values).all() & (values != values.round()).any()
