"""Detects a GradScaler in use that `watch` was not given: it was created after `watch`, or elsewhere.

    scalers = UnknownScaler(writer, optimizers)
    scalers.adopt = …                 # takes the scaler, returns a callback for the losses and their scaled values

A scaler that scales a loss of the run's parameters is adopted from that moment on, and so is each that follows it:
fastai makes one for every `fit`, other loops one for each epoch. If it cannot be attributed, the run holds scaled
losses and gradients without their scale, which an event and `scaler_unseen` in `config` report. Otherwise a correct
training would look like FP16 without a scaler.
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

MAX_LOSSES = 20
"""Losses without a path to a parameter of the run after which a scaler is taken for another network's. In a run without
a scaler, checking ends after this many losses of any scaler."""


class UnknownScaler(Observer):
    """Detects enabled scalers, other than `given` (the one passed to `watch`), that scale a loss of the run."""

    def __init__(self, writer: RunWriter, optimizers: Sequence[torch.optim.Optimizer], given: Any = None) -> None:
        self.adopt: Callable[[Any], Callable[[Any, Any], None]] | None = None
        self._writer = writer
        self._optimizers = optimizers
        self._step = 0
        self._losses = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet() if given is None else weakref.WeakSet([given])
        self._others: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # losses of other scalers
        self._after: Callable[[Any, Any], None] | None = None  # for the current call, if it is the scaler's first
        self._scales = method_of_class(GradScaler, "scale")  # of any scaler
        self._scales.listen(self._on_scale)
        self._scales.listen_after(self._after_scale)

    def step_began(self, step: int) -> None:
        self._step = step

    def close(self) -> None:
        self._scales.unlisten(self._on_scale, self._after_scale)

    def _on_scale(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        scaler, outputs = args[0], argument(args, kwargs, "outputs")
        self._after = None
        if scaler in self._known or not scaler.is_enabled() or self._others.get(scaler, 0) >= MAX_LOSSES:
            return
        if self.adopt is not None and _leads_to(outputs, self._optimizers):
            self._known.add(scaler)
            self._after = self.adopt(scaler)
            return
        self._others[scaler] = self._others.get(scaler, 0) + 1
        if self._known:
            return
        self._losses += 1
        if self._losses == 1:
            detail = "loss scale and skipped steps: a GradScaler is at work that watch was not given"
            self._writer.event("warning", name="not recorded", detail=detail, step=self._step)
            self._writer.update_head(config=dict(self._writer.head.config) | {"scaler_unseen": True})
        elif self._losses == MAX_LOSSES:
            self.close()

    def _after_scale(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        after, self._after = self._after, None
        if after is not None:
            after(argument(args, kwargs, "outputs"), result)


def _leads_to(outputs: Any, optimizers: Sequence[torch.optim.Optimizer]) -> bool:
    """Whether backward from `outputs` would reach a parameter of one of the optimizers."""
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
