"""State around forward and backward: autocast switched or left on, anomaly mode, the loss's dtype, gradients of
gradients.

Each is reported once, when it first occurs.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from amp_core.record.model import scaler_state as scaling
from amp_core.record.model.narrow_dtypes import NARROW
from amp_core.record.model.parameters import in_backward
from amp_core.record.observer import Observer
from amp_core.record.observers.signals.loss_dtype import loss_dtype
from amp_core.record.stats.layout import dtype_name
from amp_core.record.torch_internals import patched_functions
from amp_core.store.writer import RunWriter

MAX_CHECKED_BACKWARDS = 8
"""Backward passes in which the dtype of the loss's computation is checked."""


class AutocastKept(Observer):
    """Reports once if autocast is not in the same state after a forward as before."""

    def __init__(self, writer: RunWriter, device: torch.device) -> None:
        self._writer = writer
        self._kind = device.type
        self._before = False

    def step_began(self, step: int) -> None:
        self._before = torch.is_autocast_enabled(self._kind)

    def forward_ended(self, output: Any) -> None:
        after = torch.is_autocast_enabled(self._kind)
        if after != self._before and self.awake:
            self.awake = False
            self._writer.event("autocast changed", name="forward", value=float(after))


class BackwardState(Observer):
    """Checks the state of torch whenever `backward` or `torch.autograd.grad` is called."""

    def __init__(self, writer: RunWriter, device: torch.device, scaler: Any, scale_calls: Callable[[], int]):
        self._writer = writer
        self._kind = device.type
        self._scale_calls = scale_calls  # how often the loop has called get_scale
        self._step = 0
        self._reported: set[str] = set()
        self._scaled: list[weakref.ref[torch.Tensor]] = []
        self._checked = 0  # backward passes whose loss's dtype was checked
        self._calls_before: int | None = None  # calls of get_scale when scaled gradients with a graph were made
        self._scalings: list[patched_functions.Shared] = []
        if scaling.is_active(scaler):
            self.scaler_found(scaler)
        patched_functions.backward.listen(self._on_backward)
        patched_functions.grad.listen(self._on_grad)

    def step_began(self, step: int) -> None:
        self._step = step
        self._scaled = []

    def scaler_found(self, scaler: Any) -> None:
        method = patched_functions.method_of(scaler, "scale")
        method.listen_after(self._keep, of=scaler)
        self._scalings.append(method)

    def step_ended(self, step: int) -> None:
        self._step = step + 1
        self._calls_before = None

    def close(self) -> None:
        patched_functions.backward.unlisten(self._on_backward)
        patched_functions.grad.unlisten(self._on_grad)
        for method in self._scalings:
            method.unlisten(self._keep)

    def _keep(self, args: tuple[Any, ...], kwargs: dict[str, Any], scaled: Any) -> None:
        self._scaled += [weakref.ref(t) for t in tree_leaves(scaled) if isinstance(t, torch.Tensor)]

    def _on_backward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.at_own_work() or in_backward():  # checkpointing calls it for what it recomputes
            return
        if torch.is_autocast_enabled(self._kind):
            dtype = dtype_name(torch.get_autocast_dtype(self._kind))
            self._report("autocast in backward", name="backward", dtype=dtype)
        if torch.is_anomaly_enabled():
            self._report("anomaly mode", name="torch.autograd.set_detect_anomaly")
        roots = [t for t in tree_leaves(args[:1]) if isinstance(t, torch.Tensor)]
        narrow = next((t.dtype for t in roots if t.dtype in NARROW), None)
        if narrow is not None:
            self._report("loss dtype", name="loss", dtype=dtype_name(narrow))
        elif self._checked < MAX_CHECKED_BACKWARDS:
            self._checked += 1
            computed = next((d for t in roots if (d := loss_dtype(t)) in NARROW), None)
            if computed is not None:
                self._report("loss dtype", name="loss", dtype=dtype_name(computed), detail="computed")
        if kwargs.get("create_graph") or (len(args) > 3 and args[3]):  # (tensors, grad_tensors, retain_graph, …)
            self._on_created("backward", roots)
        elif self._calls_before is not None:  # by now the loop may have called get_scale to divide by it
            self._report(
                "create_graph", name="torch.autograd.grad", value=float(self._scale_calls() == self._calls_before)
            )
            self._calls_before = None

    def _on_grad(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if kwargs.get("create_graph") or (len(args) > 4 and args[4]):  # outputs, inputs, grad_outputs, retain_graph
            outputs = kwargs.get("outputs", args[0] if args else ())
            self._on_created("torch.autograd.grad", [t for t in tree_leaves(outputs) if isinstance(t, torch.Tensor)])

    def _on_created(self, name: str, roots: list[torch.Tensor]) -> None:
        scaled = {id(t) for ref in self._scaled if (t := ref()) is not None}
        if any(id(t) in scaled for t in roots):
            self._calls_before = self._scale_calls()
        else:
            self._report("create_graph", name=name, value=0.0)

    def _report(self, kind: str, **what: Any) -> None:
        if (key := f"{kind} {what.get('value')}") not in self._reported:
            self._reported.add(key)
            self._writer.event(kind, step=self._step, **what)
