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


class WideClasses:
    """The operators of one step, in their order."""

    def __init__(self, reports: OpReports) -> None:
        self._reports = reports
        self._softmax: dict[str, int] = {}  # classes of a softmax over many, by module
        self._sums: dict[tuple[int, ...], int] = {}  # terms of a sum over many classes, by its shape
        self._differences: dict[int, tuple[Any, torch.dtype]] = {}  # the difference, and the 16-bit dtype in it, by id

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
            narrow = next((t.dtype for t in terms if t.dtype in NARROW), None)
            if narrow is not None and terms[0].requires_grad != terms[1].requires_grad:
                self._differences[id(out)] = out, narrow
        elif op in ("exp", "_to_copy") and terms and (found := self._differences.get(id(terms[0]))) is not None:
            if op == "_to_copy":  # autocast on a GPU casts what `exp` is given
                self._differences[id(out)] = out, found[1]
            elif module() == "loss":
                self._reports.write("narrow ratio", op, "loss", float(out.numel()), 0.0, found[1])
