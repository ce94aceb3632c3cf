"""Inspects the operators of one step under a dispatch mode, from its first forward to the backward that follows.

class FirstOperators(StepOperators):
    def step_began(self, step):
        self.stop()
        if step == 0:
            self.inspect(Checking(step))    # a `StepMode`

    def inspected(self, mode):
        mode.write()
"""

import sys
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

import torch

from amp_core.record.model.frames import local_variables
from amp_core.record.model.parameters import in_backward, named_modules
from amp_core.record.observer import Observer
from amp_core.record.torch_internals import patched_functions
from amp_core.record.torch_internals.compiling import within_compiled
from amp_core.record.torch_internals.quiet_mode import QuietMode
from amp_core.store.writer import RunWriter
from amp_core.text.errors import in_one_line


class StepMode(QuietMode):
    """A mode that inspects operators until it is paused, or an inspection fails."""

    error: Exception | None = None
    """An exception of an inspection; the training continues."""
    of_backward = False
    """Whether operators of backward are inspected too."""

    def on_op(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        """Inspect an operator that has run. Never raises: see `error`."""
        if in_backward() and not self.of_backward:
            return
        try:
            self.inspect_op(func, args, kwargs, out)
        except Exception as error:
            self.error = error
            self.pause()

    def inspect_op(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        """Called with each operator after it has run."""
        raise NotImplementedError

    def pause(self) -> None:
        """Inspect no more operators."""
        raise NotImplementedError


class StepOperators(Observer):
    """Enters a mode, and leaves it after the next backward that reaches the model, or when the step ends.

    It is left before the optimizer steps: older torch versions do not compile an optimizer under a mode. A backward of
    another model, as of a critic between the forward of its generator and the loss, does not end it.
    """

    def __init__(self, writer: RunWriter) -> None:
        self._writer = writer
        self._mode: StepMode | None = None
        self._left_mode: StepMode | None = None  # `inspected` is still to be called with it
        self._reached = False  # whether a backward has reached the model since the mode was entered

    @property
    def active(self) -> bool:
        """Whether a mode was entered, and `inspected` not called yet."""
        return self._mode is not None or self._left_mode is not None

    def inspect(self, mode: StepMode) -> None:
        """Enter `mode`, unless compiled code runs."""
        if within_compiled():
            return
        self._mode, self._reached = mode, False
        mode.__enter__()
        patched_functions.backward.listen_after(self._after_backward)

    def inspected(self, mode: Any) -> None:
        """Called once `mode` was left."""

    def stop(self) -> None:
        """Pause the mode and leave it, if that is safe now; otherwise at the next opportunity."""
        self._leave()
        if self._left_mode is not None:
            mode, self._left_mode = self._left_mode, None
            report_error(self._writer, mode)
            self.inspected(mode)

    def _leave(self) -> None:
        if self._mode is None:
            return
        self._mode.pause()
        if self._mode.leave():
            self._left_mode, self._mode = self._mode, None
            patched_functions.backward.unlisten(self._after_backward)

    def called(self, what: str, optimizer: int | None) -> None:
        if what != "scale":  # perhaps of another model's loss
            self.stop()

    def backward_began(self) -> None:
        self._reached = True
        if self._mode is not None:
            self._mode.pause()

    def _after_backward(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if self._reached:
            self._leave()  # the rest follows where an error ends this observer alone

    def step_ended(self, step: int) -> None:
        self.stop()

    def close(self) -> None:
        self.stop()


def report_error(writer: RunWriter, mode: StepMode) -> None:
    """Write that an inspection failed, if one did."""
    if mode.error is not None:
        why = f"operators: {type(mode).__name__} stopped: {in_one_line(mode.error)}"
        writer.event("warning", name="not recorded", detail=why)


def running_module(model: torch.nn.Module, frame: FrameType | None = None, outside: str = "loss") -> str:
    """The name of the innermost module of the model among the callers; `outside` without one."""
    names: dict[int, str] = {id(m): n for n, m in named_modules(model)}
    frame = frame or sys._getframe(1)
    while frame is not None:
        owner = local_variables(frame).get("self")
        if isinstance(owner, torch.nn.Module) and id(owner) in names:
            return names[id(owner)]
        frame = frame.f_back
    return outside


def running_optimizer() -> str:
    """The class of the optimizer among the callers; empty without one."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = local_variables(frame).get("self")
        if isinstance(owner, torch.optim.Optimizer):
            return type(owner).__name__
        frame = frame.f_back
    return ""
