"""Names the module with the first non-finite output in a compiled model, whose graph calls no hooks.

The call of the compiled model is kept until backward begins. If what it returned is not finite, the same call is
repeated in eager mode, under the same autocast and from the same weights, and its modules are inspected as those of an
eager model are. Random numbers, buffers and counters are restored. A model of several processes is not called again:
the others would not take part in its collectives.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from amp_core.record.model.parameters import in_backward
from amp_core.record.model.unchanged import unchanged
from amp_core.record.observers.signals.nonfinite_outputs import ARMED_STEPS, ForwardCheck, ModuleCall, is_finite
from amp_core.record.torch_internals import patched_functions
from amp_core.record.torch_internals.compiling import eager
from amp_core.record.torch_internals.module_calls import after_call, before_call
from amp_core.store.writer import RunWriter

MAX_REPEATED = 3
"""Calls that are repeated in a run."""


class _Call(NamedTuple):
    """A call of the compiled model, and autocast's state in it."""

    args: Any
    kwargs: Any
    output: Any
    autocast: Callable[[], AbstractContextManager[Any]]


class CompiledForwardCheck(ForwardCheck):
    """`ForwardCheck` of a model that is compiled, or a part of which is."""

    def __init__(self, writer: RunWriter, model: torch.nn.Module, device: torch.device) -> None:
        super().__init__(writer, model, device, each_step=False)
        self._autocast: Callable[[], AbstractContextManager[Any]] | None = None
        self._call: _Call | None = None
        self._left = MAX_REPEATED
        self._due = ARMED_STEPS  # on a GPU: steps in which the host waits for the loss
        self._handles = [before_call(model, self._before), after_call(model, self._after)]
        if not self._on_cpu:
            patched_functions.backward.listen(self._on_backward)

    def step_began(self, step: int) -> None:
        self._step, self._call = step, None
        self.awake = bool(self._handles)

    def step_ended(self, step: int) -> None:
        self._call = None
        self._due -= self._due > 0

    def loss_nonfinite(self, step: int) -> None:
        self._due = ARMED_STEPS

    def close(self) -> None:
        self._stop()
        super().close()

    def _stop(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._call = [], None
        patched_functions.backward.unlisten(self._on_backward)

    def _before(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled() and not self.at_own_work() and not in_backward():
            kind = self._device.type
            dtype, enabled = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
            self._autocast = lambda: torch.autocast(kind, dtype=dtype, enabled=enabled)

    def _after(self, module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self._autocast is not None:
            self._call = _Call(args, kwargs, output, self._autocast)
        self._autocast = None

    def _on_backward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call, self._call = self._call, None
        if call is None or self.at_own_work() or not (self._on_cpu or self._due):
            return
        with self.watching():
            bad = self._nonfinite_losses(args)
            if not bad:
                return
            self._left -= 1
            if not self._left:
                self._stop()
            self._kept = [ModuleCall(0, (call.args, call.kwargs), call.output)]
            if not all(map(is_finite, self._kept[0].outputs)):
                self._repeat(call)
            self._report_first(bad[0])
            self._forget()

    def _repeat(self, call: _Call) -> None:
        """Put the calls of all modules in front of that of the model, if they show where it began."""
        compiled, self._kept = self._kept, []
        at_own_work, self.at_own_work = self.at_own_work, lambda: False  # for the hooks the call is one of the step
        self._attach(self._all)
        try:
            with unchanged(self._model, self._device), eager(), call.autocast():
                self._model.forward(*call.args, **call.kwargs)
        finally:
            self._attach(frozenset())
            self.at_own_work = at_own_work
        self._kept += compiled
