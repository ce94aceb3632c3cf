"""Sums of gradients that a loop keeps itself in 16 bits, beside the parameters: a list or a dictionary of tensors.

    bank = [torch.zeros_like(p, dtype=torch.bfloat16) for p in model.parameters()]
    ...
    for total, p in zip(bank, model.parameters()):
        total += p.grad

Such tensors have the shapes of the parameters, as averages and copies of weights do. They are sums of gradients if one
micro-batch changes them by its gradient, and they were not zero before. Where hooks take the gradients away within
backward, they are if the optimizer is given their values as gradients.
"""

import sys
from dataclasses import dataclass

import torch

from amp_core.record.model.narrow_dtypes import NARROW
from amp_core.record.model.own import without_torch_function
from amp_core.record.model.parameters import has_values, local_values, named_parameters, unwrapped
from amp_core.record.observer import Observer
from amp_core.record.stats.host_transfer import HostTransfer
from amp_core.record.stats.layout import dtype_name
from amp_core.record.updates.copies import Copy, reachable_copies
from amp_core.store.writer import RunWriter

STEPS = (1, 2, 3)
"""Steps in which they are looked for. In step 0 some loops have not made them yet."""
MAX_ELEMENTS = 4096
MAX_ERROR = 0.25
"""Relative error with which the change has to be a multiple of the gradient: rounding a sum in bfloat16 has a few
hundredths, a copy of another batch's gradient 0.7 and more."""
MAX_ERROR_OF_VALUES = 1e-5
"""Relative error with which the optimizer's gradient has to be a multiple of the sum: dividing it in float32 has 1e-7,
a gradient that was rounded to 16 bits 1e-3."""


@dataclass
class _Sum:
    copy: Copy
    name: str
    dtype: torch.dtype
    before: torch.Tensor | None = None
    grad: torch.Tensor | None = None


class GradientSums(Observer):
    """Compares the first elements of one tensor of each copy between the micro-batches of one step."""

    def __init__(self, writer: RunWriter, model: torch.nn.Module) -> None:
        self._writer = writer
        self._model = unwrapped(model)
        self._named: dict[str, torch.Tensor] = {}
        self._sums: list[_Sum] = []
        self._sent: list[tuple[_Sum, HostTransfer]] = []
        self._backwards = 0
        self._step = 0

    def step_began(self, step: int) -> None:
        self._step, self._backwards = step, 0
        self._sums = []
        self.awake = step in STEPS or bool(self._sent)

    def backward_ended(self) -> None:
        if self._step not in STEPS:
            return
        self._backwards += 1
        with torch.no_grad(), without_torch_function():
            if self._backwards == 2:  # a step of one micro-batch has nothing to add up
                self._find()
            for kept in self._sums:
                self._compare(kept)

    def _find(self) -> None:
        self._named = {n: p for n, p in named_parameters(self._model) if p.requires_grad and has_values(p)}
        for copy in reachable_copies(self._named, sys._getframe(1)):
            narrow = {n: t for n, t in copy.tensors(self._named).items() if t.dtype in NARROW and has_values(t)}
            if narrow:
                name = max(narrow, key=lambda n: min(narrow[n].numel(), MAX_ELEMENTS))
                self._sums.append(_Sum(copy, name, narrow[name].dtype))

    def _compare(self, kept: _Sum) -> None:
        """Between this backward and the one before, the loop has added the gradient of the one before."""
        tensor, grad = kept.copy.tensors(self._named).get(kept.name), self._named[kept.name].grad
        if tensor is not None and grad is None:
            kept.before, kept.grad = _first(tensor), None
        if tensor is None or grad is None or local_values(grad).numel() != local_values(tensor).numel():
            return
        now = _first(tensor)
        if kept.before is not None and kept.grad is not None:
            transfer = HostTransfer()
            transfer.put("sums", _products(now - kept.before, kept.before, kept.grad))
            transfer.send()
            self._sent.append((kept, transfer))
        kept.before, kept.grad = now, _first(grad)

    def called(self, what: str, optimizer: int | None) -> None:
        if what not in ("scaler.step", "optimizer.step") or self._step not in STEPS:
            return
        with torch.no_grad(), without_torch_function():
            for kept in self._sums:
                grad = self._named[kept.name].grad
                if kept.before is None or kept.grad is not None or grad is None:
                    continue
                given = _first(grad)
                if len(given) == len(kept.before):
                    transfer = HostTransfer()
                    transfer.put("given", torch.stack([kept.before @ kept.before, given @ given, kept.before @ given]))
                    transfer.send()
                    self._sent.append((kept, transfer))
        self._sums = []

    def step_ended(self, step: int) -> None:
        self._write(wait=False)

    def close(self) -> None:
        self._write(wait=True)

    def _write(self, *, wait: bool) -> None:
        while self._sent and self._sent[0][1].ready(wait):
            kept, transfer = self._sent.pop(0)
            if transfer.has("given"):
                sums, grads, both = transfer.values("given")
                found = grads > 0 and both**2 >= (1 - MAX_ERROR_OF_VALUES**2) * sums * grads
            else:
                changes, befores, grads, change_by_grad, before_by_grad = transfer.values("sums")
                # A copy of the last gradient was zero, or is a multiple of it already.
                new = before_by_grad**2 < (1 - MAX_ERROR**2) * befores * grads
                found = new and changes > 0 and change_by_grad**2 >= (1 - MAX_ERROR**2) * changes * grads
            if found:
                config = dict(self._writer.head.config) | {"gradient_sums": dtype_name(kept.dtype)}
                self._writer.update_head(config=config)


def _first(tensor: torch.Tensor) -> torch.Tensor:
    return local_values(tensor).detach().reshape(-1)[:MAX_ELEMENTS].to(torch.float64, copy=True)


def _products(change: torch.Tensor, before: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    return torch.stack([change @ change, before @ before, grad @ grad, change @ grad, before @ grad])
