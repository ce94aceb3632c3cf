"""Detects products, squares, sums and norms that overflow float16 from finite numbers, though nothing infinite may come
out of the module: what divides by infinity is zero.

    overflows = InnerOverflows(reports)
    overflows.check("linalg_vector_norm", args, out, module)   # after each operator whose result is in float16
"""

from collections.abc import Sequence
from typing import Any

import torch

from amp_core.record.observers.signals.op_reports import Module, OpReports

MAGNITUDES = ("pow", "square", "sum", "mean", "var", "std", "norm", "linalg_vector_norm", "prod")
"""Operators whose results often divide."""
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution")
LOOP = "the loop"
"""The name of what runs outside of the model and its loss."""


class InnerOverflows:
    """The operators of one step."""

    def __init__(self, reports: OpReports) -> None:
        self._reports = reports

    def check(self, op: str, args: Sequence[Any], out: torch.Tensor, module: Module) -> None:
        """Inspect an operator that has run, with its result in float16."""
        name = op.rstrip("_")
        if name in PRODUCTS and module() == LOOP:  # perhaps of a frozen model that makes the inputs of the other
            self._later("input overflow", op, [a for a in args if isinstance(a, torch.Tensor)], out, LOOP)
        elif name in MAGNITUDES or name == "mul":
            factors = [a for a in args[:2] if isinstance(a, torch.Tensor) and a.dim()]
            hidden = torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1
            several = out.numel() > 1 or op in ("sum", "var", "std")  # numbers of what a loss is divided by
            if hidden and several and len(factors) > (name == "mul"):  # a mask is multiplied by a number
                self._later("inner overflow", op, factors, out, module())

    def _later(self, kind: str, op: str, factors: Sequence[torch.Tensor], out: torch.Tensor, module: str) -> None:
        infinite = out.detach().isinf().sum()
        for factor in factors:
            infinite = infinite * factor.detach().isfinite().all()
        self._reports.later(kind, op, module, out.dtype, infinite, 0.0)
