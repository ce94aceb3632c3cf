"""Gradients of a skipped step that the loop does not clear: their infinities stay, so each later step is skipped too.

    SkippedGradients(writer, model, optimizers, scaler)

A loop may clear gradients only after a step that was made, or leave the clearing to code that runs only then. As in
`stale_gradients`, the address and the version counter of a few gradients tell whether they were cleared before the
next step of the same optimizer. Their values are read only after `MIN_STEPS` steps without.
"""

from collections.abc import Sequence
from typing import Any

import torch

from amp_core.record.model import scaler_state as scaling
from amp_core.record.model.parameters import in_backward, named_parameters, unwrapped
from amp_core.record.observer import Observer
from amp_core.record.observers.signals.stale_gradients import local_gradient, marks_of
from amp_core.record.stats.host_transfer import HostTransfer
from amp_core.record.torch_internals import patched_functions
from amp_core.record.torch_internals.captures import capturing
from amp_core.store.writer import RunWriter

MIN_STEPS = 3
"""Consecutive steps whose gradients were kept before their values are read."""


class SkippedGradients(Observer):
    """Checks every optimizer's gradients between its steps, as long as a scaler is active."""

    def __init__(
        self, writer: RunWriter, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], scaler: Any
    ) -> None:
        self._writer = writer
        self._names = {id(p): n for n, p in named_parameters(unwrapped(model))}
        self._optimizers = optimizers
        self._step = 0
        self._chosen: dict[int, list[torch.nn.Parameter]] = {}
        self._kept: dict[int, list[tuple[int, int]]] = {}  # marks of gradients that were not cleared since the step
        self._steps: dict[int, int] = {}
        self._transfers: dict[int, HostTransfer] = {}
        self._read: set[int] = set()  # optimizers whose gradients were read: they are not checked again
        self.awake = False
        if scaling.is_active(scaler):
            self.scaler_found(scaler)

    def scaler_found(self, scaler: Any) -> None:
        if not self.awake:
            self.awake = True
            patched_functions.backward.listen(self._before)
            patched_functions.backward.listen_after(self._after)

    def optimizer_found(self, index: int, optimizer: Any) -> None:
        states: tuple[dict[int, Any], ...] = (self._chosen, self._kept, self._steps, self._transfers)
        for state in states:
            state.pop(index, None)
        self._read.discard(index)

    def step_began(self, step: int) -> None:
        self._step = step
        for index, transfer in list(self._transfers.items()):
            if transfer.ready():
                self._report(index, transfer)

    def called(self, what: str, optimizer: int | None) -> None:
        if what == "scaler.step" and optimizer is not None:
            self._steps[optimizer] = self._steps.get(optimizer, 0) + 1 if optimizer in self._kept else 0

    def step_ended(self, step: int) -> None:
        for index, optimizer in enumerate(self._optimizers):
            if index not in self._chosen:
                given = [p for p in _parameters(optimizer) if local_gradient(p) is not None]
                self._chosen[index] = [given[i] for i in sorted({0, len(given) // 2, len(given) - 1})] if given else []
            marks = marks_of(self._chosen[index]) if self._chosen[index] else None
            if marks is not None and index not in self._read:
                self._kept[index] = marks

    def close(self) -> None:
        patched_functions.backward.unlisten(self._before)
        patched_functions.backward.unlisten(self._after)
        for index, transfer in list(self._transfers.items()):
            if transfer.ready(wait=True):
                self._report(index, transfer)

    def _before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.at_own_work() or in_backward() or capturing():
            return
        for index, marks in list(self._kept.items()):
            if marks_of(self._chosen[index]) != marks:
                del self._kept[index]
            elif self._steps.get(index, 0) >= MIN_STEPS:  # `p.grad.data.zero_()` does not change the version
                self._read_values(index)

    def _after(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if self.at_own_work() or in_backward() or capturing():
            return
        for index in list(self._kept):
            marks = marks_of(self._chosen[index])
            if marks is None:
                del self._kept[index]
            else:
                self._kept[index] = marks

    def _read_values(self, index: int) -> None:
        grads = [g for p in _parameters(self._optimizers[index]) if (g := local_gradient(p)) is not None]
        self._transfers[index] = transfer = HostTransfer()
        transfer.put("finite", torch.stack([grad.isfinite().all() for grad in grads]))
        transfer.send()
        self._read.add(index)
        del self._kept[index]

    def _report(self, index: int, transfer: HostTransfer) -> None:
        """Report gradients that are not finite; of others `stale_gradients` tells."""
        if not transfer.values("finite").all():
            name = self._names.get(id(self._chosen[index][0]), "")
            self._writer.event("kept gradients", name, "skipped", self._step, count=MIN_STEPS, optimizer=index)
        del self._transfers[index]


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]
