"""A GradScaler at work that `watch` was not given: it was made after `watch`, or somewhere else.

    unseen = ScalerUnseen(writer, optimizers)
    unseen.adopt = …                  # takes the scaler, returns what wants to know what its `scale` gave

One that scales a loss of parameters that are trained here becomes the run's, from that moment on, and so does each that
follows it: fastai makes one for every `fit`, other loops one for each epoch. Where that cannot be told, the run holds
scaled losses and gradients without their scale, and says so: an event, and `scaler_unseen` in `config`. Otherwise a
training that is in order would look like FP16 without a scaler.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.utils._pytree import tree_leaves

from amp_core.record.observer import Observer
from amp_core.record.torch_internals.patched_functions import argument, method_of_class
from amp_core.store.writer import RunWriter

TRIES = 20
"""Losses of a scaler of which none leads to a parameter that is trained here: then it is another network's. In a run
that has no scaler, after so many losses of any no more are looked at."""


class ScalerUnseen(Observer):
    """Looks out for scalers that are enabled and scale a loss of ours, beside `given`, the one `watch` was given."""

    def __init__(self, writer: RunWriter, optimizers: Sequence[torch.optim.Optimizer], given: Any = None) -> None:
        self.adopt: Callable[[Any], Callable[[Any, Any], None]] | None = None
        self._writer = writer
        self._optimizers = optimizers
        self._step = 0
        self._tries = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet() if given is None else weakref.WeakSet([given])
        self._others: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # and the losses of others each
        self._after: Callable[[Any, Any], None] | None = None  # of the present call, if it is the scaler's first
        self._scales = method_of_class(GradScaler, "scale")  # of whatever scaler
        self._scales.listen(self._on_scale)
        self._scales.listen_after(self._after_scale)

    def step_began(self, step: int) -> None:
        self._step = step

    def close(self) -> None:
        self._scales.unlisten(self._on_scale, self._after_scale)

    def _on_scale(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        scaler, outputs = args[0], argument(args, kwargs, "outputs")
        self._after = None
        if scaler in self._known or not scaler.is_enabled() or self._others.get(scaler, 0) >= TRIES:
            return
        if self.adopt is not None and _leads_to(outputs, self._optimizers):
            self._known.add(scaler)
            self._after = self.adopt(scaler)
            return
        self._others[scaler] = self._others.get(scaler, 0) + 1
        if self._known:
            return
        self._tries += 1
        if self._tries == 1:
            detail = "loss scale and skipped steps: a GradScaler is at work that watch was not given"
            self._writer.event("warning", name="not recorded", detail=detail, step=self._step)
            self._writer.update_head(config=dict(self._writer.head.config) | {"scaler_unseen": True})
        elif self._tries == TRIES:
            self.close()

    def _after_scale(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        after, self._after = self._after, None
        if after is not None:
            after(argument(args, kwargs, "outputs"), result)


def _leads_to(outputs: Any, optimizers: Sequence[torch.optim.Optimizer]) -> bool:
    """Whether backward from these would add to the gradient of a parameter of one of the optimizers."""
    ours = {id(p) for o in optimizers for group in o.param_groups for p in group["params"]}
    waiting = [t.grad_fn for t in tree_leaves(outputs) if isinstance(t, torch.Tensor) and t.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if id(getattr(node, "variable", None)) in ours:
            return True
        following = {function for function, _ in node.next_functions if function is not None} - seen
        seen |= following
        waiting += following
    return False
