"""Detects products with 16-bit copies of trained weights that have no graph, so that the weights get no gradient.

    casts = GraphlessCasts(reports, model)
    casts.check("mm", args, module)        # after each product

A copy that was made under `no_grad` and kept, such as autocast's own before torch 2.10, has none. Whether such a weight
gets a gradient on another path is known after backward.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from amp_core.record.model.narrow_dtypes import NARROW
from amp_core.record.model.parameters import has_values, named_parameters
from amp_core.record.observers.signals.op_reports import Module, OpReports

MAX_COMPARED = 4
"""Factors that a weight is compared with: an input may have its shape."""


class GraphlessCasts:
    """The products of one step."""

    def __init__(self, reports: OpReports, model: torch.nn.Module) -> None:
        self._reports = reports
        self._matrices: dict[tuple[int, ...], list[tuple[str, torch.Tensor]]] = {}  # trained ones, by their shape
        for name, p in named_parameters(model):
            if p.requires_grad and p.dim() > 1 and type(p) is torch.nn.Parameter and has_values(p):
                self._matrices.setdefault(tuple(p.shape), []).append((name, p.detach()))
        self._compared: Counter[str] = Counter()

    def check(self, op: str, args: Sequence[Any], module: Module) -> None:
        """Inspect a product that has run."""
        if not self._matrices or not torch.is_grad_enabled():
            return
        for factor in args:
            is_copy = type(factor) is torch.Tensor and factor.dtype in NARROW and factor.dim() > 1
            if is_copy and not factor.requires_grad:
                self._compare(op, factor.detach(), module)

    def _compare(self, op: str, factor: torch.Tensor, module: Module) -> None:
        """Compare with the weights of the module that runs. A linear layer gives its weight transposed."""
        shapes = {tuple(factor.shape), tuple(factor.mT.shape)}
        alike = [pair for shape in shapes for pair in self._matrices.get(shape, ())]
        running = module() if alike else ""
        within = f"{running}." if running else ""  # the model itself has no name
        for name, weight in alike:
            if name.startswith(within) and self._compared[name] < MAX_COMPARED and weight.device == factor.device:
                self._compared[name] += 1
                cast = weight.to(factor.dtype)
                copies = [(cast == copy).all() for copy in (factor, factor.mT) if copy.shape == cast.shape]
                self._reports.later("graphless cast", op, name, factor.dtype, torch.stack(copies).sum(), 0.0)
