"""Stale gradients: they are never cleared, so each backward adds to those of all earlier steps.

    StaleGradients(writer, model, optimizers)

Before and after each backward, the address and the version counter of an optimizer's gradients are read. Any way of
clearing them changes one or the other between the step and the next backward. Loops with accumulation, closures or
several optimizers in turn also clear them before they step again. So an optimizer is no longer checked once its
gradients were cleared before a second step used them, which is in the second step of nearly every loop.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch

from amp_core.record.model.parameters import in_backward, named_parameters, unwrapped
from amp_core.record.observer import Observer
from amp_core.record.stats.host_transfer import HostTransfer
from amp_core.record.torch_internals import patched_functions
from amp_core.record.torch_internals.captures import capturing
from amp_core.record.torch_internals.compiling import untraced
from amp_core.record.torch_internals.optimizer_steps import after_step
from amp_core.store.writer import RunWriter

MIN_CLEARINGS = 2
"""Clearings, each after several steps had used the same gradients, before an event reports that."""
MIN_STEPS = 5
"""Consecutive steps, from the first, whose gradients were kept and added to before an event reports it."""


class _Kept:
    """State of one optimizer's gradients."""

    def __init__(self) -> None:
        self.chosen: list[torch.nn.Parameter] = []
        """The first, the middle and the last that had a gradient at the first step."""
        self.marks: list[tuple[int, int]] = []
        """Address and version of each of their gradients when last read."""
        self.added = False
        """Whether a backward has added to them since the last step."""
        self.steps = 0
        """Steps since the last clearing that used gradients of the step before."""
        self.clearings = 0
        """Clearings after such steps."""
        self.cleared = False
        """Whether backward will make new gradients."""
        self.transfer: HostTransfer | None = None
        """Whether gradients that seem kept are nonzero: `p.grad.data.zero_()` does not change the version."""


class StaleGradients(Observer):
    """Checks until every optimizer's gradients were cleared once."""

    def __init__(self, writer: RunWriter, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._writer = writer
        self._names = {id(p): n for n, p in named_parameters(unwrapped(model))}
        self._step = 0
        self._kept: dict[int, _Kept] = {}
        self._handles: dict[int, Any] = {}
        for index, optimizer in enumerate(optimizers):
            self.optimizer_found(index, optimizer)

    def optimizer_found(self, index: int, optimizer: Any) -> None:
        if index in self._kept:
            self._forget(index)
        if not self._kept:
            patched_functions.backward.listen(self._before)
            patched_functions.backward.listen_after(self._after)
        self._kept[index] = _Kept()
        stepped = untraced(functools.partial(self._stepped, index))
        self._handles[index] = after_step(stepped, optimizer)

    def step_began(self, step: int) -> None:
        self._step = step
        for index, kept in list(self._kept.items()):
            if kept.transfer is not None and kept.transfer.ready():
                self._report(index, kept, kept.transfer)

    def close(self) -> None:
        for index in list(self._kept):
            self._forget(index)

    def _forget(self, index: int) -> None:
        """Stop checking this optimizer; after the last one, detach from backward."""
        del self._kept[index]
        self._handles.pop(index).remove()
        if not self._kept:
            patched_functions.backward.unlisten(self._before)
            patched_functions.backward.unlisten(self._after)

    def _stepped(self, index: int, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        kept = self._kept.get(index)
        if kept is None or capturing():
            return
        if not kept.chosen:
            held = [(p, local_gradient(p)) for group in optimizer.param_groups for p in group["params"]]
            given = [p for p, grad in held if grad is not None and grad.numel()]  # a process may hold no part of one
            kept.chosen = [given[i] for i in sorted({0, len(given) // 2, len(given) - 1})] if given else []
        kept.steps += kept.added
        kept.added = False
        kept.marks = marks_of(kept.chosen) or []

    def _before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.at_own_work() or in_backward() or capturing():
            return
        for index, kept in list(self._kept.items()):
            if not kept.chosen:
                continue
            if marks_of(kept.chosen) != kept.marks:
                self._cleared(index, kept)
            elif kept.steps >= MIN_STEPS and kept.transfer is None:
                kept.transfer = HostTransfer()
                grads = [grad for grad in map(local_gradient, kept.chosen) if grad is not None]
                kept.transfer.put("any", torch.stack([(grad != 0).any() for grad in grads]))
                kept.transfer.send()

    def _after(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if self.at_own_work() or in_backward() or capturing():
            return
        for index, kept in list(self._kept.items()):
            if not kept.chosen:
                continue
            marks = marks_of(kept.chosen)
            if kept.cleared and marks is not None:
                kept.marks, kept.cleared = marks, False
            elif marks is None or any(now[0] != then[0] for now, then in zip(marks, kept.marks, strict=True)):
                self._forget(index)  # backward has replaced the gradients
            else:
                kept.added = kept.added or marks != kept.marks
                kept.marks = marks

    def _cleared(self, index: int, kept: _Kept) -> None:
        """The gradients were cleared since the last backward. Two clearings after several steps each are a habit."""
        if not kept.steps:
            self._forget(index)
            return
        kept.clearings += 1
        if kept.clearings >= MIN_CLEARINGS:
            self._write(index, kept, "now and then")
            self._forget(index)
        kept.steps, kept.added, kept.cleared = 0, False, True

    def _report(self, index: int, kept: _Kept, transfer: HostTransfer) -> None:
        if transfer.values("any").all():
            self._write(index, kept, "")
        self._forget(index)

    def _write(self, index: int, kept: _Kept, detail: str) -> None:
        name = self._names.get(id(kept.chosen[0]), "")
        self._writer.event("kept gradients", name, detail, self._step, count=kept.steps, optimizer=index)


def local_gradient(parameter: torch.nn.Parameter) -> torch.Tensor | None:
    """The gradient whose memory backward adds to; this process's part of a sharded one. None for a sparse one, and for
    zeros without memory."""
    grad = parameter.grad
    if grad is not None and hasattr(grad, "to_local"):
        with torch.no_grad():  # without grad it is the same tensor that FSDP2 adds to
            grad = grad.to_local()
    if type(grad) is not torch.Tensor or grad.layout != torch.strided or grad.is_meta or grad._is_zerotensor():
        return None
    return grad


def marks_of(parameters: Sequence[torch.nn.Parameter]) -> list[tuple[int, int]] | None:
    """Address and version counter of each gradient; None if one has no gradient."""
    grads = [local_gradient(p) for p in parameters]
    marks = [(grad.data_ptr(), grad._version) for grad in grads if grad is not None]
    return marks if len(marks) == len(grads) else None
