"""The order in which a loop calls its optimizer, scaler and scheduler, step by step.

An event `calls` holds the calls from the end of one step to the end of the next. It is written only if they differ from
those of the step before: a loop that repeats the same calls writes one event. `schema.EVENT_KINDS` lists the calls.
"""

import functools
import sys
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from amp_core.record.model import own
from amp_core.record.model import scaler_state as scaling
from amp_core.record.model.loss_factors import multiplied_by
from amp_core.record.model.unwrap import unwrap_optimizer
from amp_core.record.observer import Observer
from amp_core.record.torch_internals import patched_functions
from amp_core.store.writer import RunWriter
from amp_core.text.errors import in_one_line

MAX_CALLS = 200
"""Calls of one step that are kept; a loop that never completes a step may call any number."""
MIN_SCALED_BY_HAND = 3
"""Consecutive losses: the weight of one may happen to be the loss scale, while that changes."""
MAX_FAILED = 3
"""Exceptions of the scaler that are written."""
MAX_EVENTS = 2000
"""Changes of order that are written; after that many, the order carries no information."""


class CallOrder(Observer):
    """Keeps the calls of the current step."""

    def __init__(
        self, writer: RunWriter, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], scaler: Any
    ) -> None:
        self._writer = writer
        self._model = model
        self._optimizers = optimizers
        self._scaler = scaler
        self._calls: list[str] = []
        self._last: list[str] | None = None
        self._step = 0
        self._written = 0
        self._inside = False  # of scaler.step
        self._failed = 0  # calls of the scaler that raised
        self._scale_calls = 0
        self._by_hand = 0  # consecutive losses that the loop multiplied by the loss scale itself
        self._known_scale: Any = None  # what `get_scale` last returned to the loop
        self._scaled: list[weakref.ref[torch.Tensor]] = []  # what `scale` returned since the last backward
        # Whether they were written.
        self._events = {"scaled twice": False, "cleared by hand": False, "clipped by value": False}
        self._methods: list[tuple[patched_functions.Shared, Any]] = []  # with their listeners
        for index, optimizer in enumerate(self._optimizers):
            self.optimizer_found(index, optimizer)
        if scaling.is_active(scaler):
            self.scaler_found(scaler)
        patched_functions.backward.listen(self._on_backward)
        patched_functions.scheduled.listen(self._on_scheduler)
        patched_functions.scheduled_on_plateau.listen(self._on_scheduler)
        patched_functions.grouped_for_clipping.listen(self._on_grouped)

    def scaler_found(self, scaler: Any) -> None:
        self._listen(scaler, "get_scale", "get_scale")
        get_scale = patched_functions.method_of(scaler, "get_scale")
        get_scale.listen_after(self._after_get_scale, of=scaler)
        self._methods.append((get_scale, self._after_get_scale))
        scale = patched_functions.method_of(scaler, "scale")
        scale.listen(self._before_scale, of=scaler)
        scale.listen_after(self._after_scale, of=scaler)
        self._methods += [(scale, self._before_scale), (scale, self._after_scale)]
        step = patched_functions.method_of(scaler, "step")
        step.listen_failed(self._leave_scaler_step, of=scaler)
        step.listen(self._enter_scaler_step, of=scaler)
        step.listen_after(self._leave_scaler_step, of=scaler)
        self._methods += [(step, self._enter_scaler_step), (step, self._leave_scaler_step)]
        for name in ("unscale_", "step", "update"):
            method, listener = patched_functions.method_of(scaler, name), functools.partial(self._on_failed, name)
            method.listen_failed(listener, of=scaler)
            self._methods.append((method, listener))

    def optimizer_found(self, index: int, optimizer: Any) -> None:
        self._listen(optimizer, "zero_grad", self._numbered("zero_grad", index))

    def called(self, what: str, optimizer: int | None) -> None:
        if what in ("optimizer.step", "unscale_") and self._inside:  # scaler.step makes these calls itself
            return
        if len(self._calls) < MAX_CALLS:
            self._calls.append(what if optimizer is None else self._numbered(what, optimizer))

    def scale_calls(self) -> int:
        """How often the loop has called `get_scale` so far."""
        return self._scale_calls

    def step_ended(self, step: int) -> None:
        self._write(step)
        self._step = step + 1

    def close(self) -> None:
        patched_functions.backward.unlisten(self._on_backward)
        patched_functions.scheduled.unlisten(self._on_scheduler)
        patched_functions.scheduled_on_plateau.unlisten(self._on_scheduler)
        patched_functions.grouped_for_clipping.unlisten(self._on_grouped)
        for method, listener in self._methods:
            method.unlisten(listener)
        if any(not call.startswith(("scheduler", "zero_grad", "get_scale")) for call in self._calls):
            self._write(self._step)  # a step that began and never completed

    def _write(self, step: int) -> None:
        if self._calls != self._last and self._written < MAX_EVENTS:
            self._written += 1
            self._writer.event("calls", " ".join(self._calls), step=step)
        self._last, self._calls = self._calls, []

    def _numbered(self, what: str, index: int) -> str:
        return f"{what}:{index}" if len(self._optimizers) > 1 else what

    def _note(self, call: str) -> None:
        self._scale_calls += call == "get_scale"
        if len(self._calls) < MAX_CALLS and not self.at_own_work():
            self._calls.append(call)

    def _listen(self, thing: Any, name: str, call: str) -> None:
        """Append `call` whenever the method `name` of `thing` is called."""
        method, listener = patched_functions.method_of(thing, name), functools.partial(self._on_method, call)
        method.listen(listener, of=thing)
        self._methods.append((method, listener))

    def _on_method(self, call: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._note(call)

    def _on_failed(self, call: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The scaler raised, and the program may catch that: then the run ends as if nothing had happened."""
        error = sys.exc_info()[1]
        if error is not None and not self.at_own_work() and self._failed < MAX_FAILED:
            self._failed += 1
            self._writer.event("failed call", f"scaler.{call}", in_one_line(error), self._step)

    def _before_scale(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = next(iter((*args[1:], *kwargs.values())), None)
        if not isinstance(given, torch.Tensor) or self._events["scaled twice"]:
            return
        self._by_hand = self._by_hand + 1 if multiplied_by(given, self._known_scale) else 0
        if self._by_hand >= MIN_SCALED_BY_HAND or any(ref() is given for ref in self._scaled):
            self._event_once("scaled twice")

    def _after_get_scale(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if not self.at_own_work():
            self._known_scale = result

    def _after_scale(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if isinstance(result, torch.Tensor):
            self._scaled.append(weakref.ref(result))

    def _event_once(self, kind: str) -> None:
        if not self._events[kind]:
            self._events[kind] = True
            self._writer.event(kind, step=self._step)

    def _enter_scaler_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._inside = True

    def _leave_scaler_step(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any = None) -> None:
        self._inside = False

    def _on_backward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._scaled = []
        again = "backward" in self._calls and not any(call.startswith("zero_grad") for call in self._calls)
        unknown = again and not self._events["cleared by hand"] and not self.at_own_work()
        if unknown and all(p.grad is None for p in own.parameters(self._model)):
            self._event_once("cleared by hand")
        self._note("backward")

    def _on_scheduler(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # A chained scheduler calls those it consists of: one entry is enough.
        if unwrap_optimizer(own.held(args[0], "optimizer")) in self._optimizers and self._calls[-1:] != ["scheduler"]:
            self._note("scheduler")

    def _on_grouped(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if patched_functions.clips_by_value():
            self._event_once("clipped by value")
            self._note("clip")
