"""Observers of a recorded training loop: profiler windows, traces, samplers, checks.

    >>> class Printer(Observer):
    ...     def step_ended(self, step: int) -> None:
    ...         print("made step", step)

An observer overrides the moments it needs; the others cost nothing. It is passed to `Recorder(observers=[…])` and
called on the training thread; its time counts as `watch_ms`. An observer that raises is dropped, one event reports it,
and the training continues.
"""

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from amp_core.record.stats.host_transfer import HostTransfer
from amp_core.store.writer import RunWriter
from amp_core.text.errors import in_one_line

MOMENTS = (
    "step_began",
    "evaluation_began",
    "evaluation_returned",
    "phase_entered",
    "forward_ended",
    "backward_began",
    "backward_ended",
    "called",
    "gradients_read",
    "closure_repeated",
    "scaler_found",
    "optimizer_found",
    "loss_nonfinite",
    "gradients_vanished",
    "step_ended",
    "close",
)

_ALWAYS = (
    "step_began",
    "evaluation_began",
    "evaluation_returned",
    "scaler_found",
    "optimizer_found",
    "loss_nonfinite",
    "gradients_vanished",
    "close",
)


class Observer:
    """All moments, as methods that do nothing. `step` is the step number, as in `steps.step`."""

    awake = True
    """Whether the observer has anything to do in this step. Set by the observer, in `step_began` or once at creation.
    One that is not awake receives only `step_began`, `evaluation_began`, `evaluation_returned`, `scaler_found`,
    `optimizer_found`, `loss_nonfinite`, `gradients_vanished` and `close`, at almost no cost."""
    bare = False
    """Whether the recorder wants to measure the step without hooks. An observer that can work with fewer hooks does so
    then; one that cannot sets this to False in `step_began`. The recorder sets it before each step."""
    watching: Callable[[], AbstractContextManager[Any]] = staticmethod(contextlib.nullcontext)
    """A context for work in hooks of the observer's own: its time counts as `watch_ms`, and what it raises is reported
    and never reaches the training. Set by the recorder."""
    at_own_work: Callable[[], bool] = staticmethod(lambda: False)
    """Whether the code that runs now is not part of the step: the recorder's own work, or the second and later calls of
    a closure in one step of its optimizer. Set by the recorder."""

    transfer: Callable[[], HostTransfer | None] = staticmethod(lambda: None)
    """In `step_ended`: the host transfer of that step, to which a few numbers can be added. It is sent when the next
    step begins. None if the step was not measured. Set by the recorder."""

    def step_began(self, step: int) -> None:
        """The first forward of a step (or the first `scaler.scale`, in a loop that calls another module) comes next.

        The step's data are already loaded.
        """

    def evaluation_began(self) -> None:
        """The model is about to be called without gradients, which computes no loss to train on."""

    def evaluation_returned(self) -> None:
        """The model, called without gradients, returned."""

    def phase_entered(self, phase: str) -> None:
        """The training thread entered `phase`: one of `amp_core.phases.PHASES`, or `after_backward`. Called very
        often."""

    def forward_ended(self, output: Any) -> None:
        """The model returned `output`, with gradients enabled; once per micro-batch."""

    def backward_began(self) -> None:
        """The first gradient of a backward pass arrived."""

    def backward_ended(self) -> None:
        """A backward pass is over; on CUDA its kernels may still be running."""

    def called(self, what: str, optimizer: int | None) -> None:
        """The loop is about to call `what` for the optimizer of this index.

        One of `scale`, `unscale_`, `scaler.step`, `update`, `clip`, `norm` and `optimizer.step`; the last is reported
        also where `scaler.step` makes the call. `norm` is a clip with an infinite threshold. `optimizer` is None for
        `scale` and `update`, and for `clip` and `norm` if it is not known whose gradients they read.
        """

    def gradients_read(self, optimizer: int, names: list[str]) -> None:
        """The gradients of the optimizer of this index were read, once per step: the names of its parameters that have
        one, in order. The same list as long as all of them do. Not called in steps that are not sampled and whose norms
        a budget leaves out."""

    def closure_repeated(self, optimizer: int) -> None:
        """Within one step, the optimizer of this index calls its closure again. The first call was followed by
        `called("optimizer.step", …)`."""

    def scaler_found(self, scaler: Any) -> None:
        """A scaler that was not passed to `watch` is about to scale the loss for the first time."""

    def optimizer_found(self, index: int, optimizer: Any) -> None:
        """An optimizer that was not passed to `watch` is about to step. It has this index from now on: it replaces
        another optimizer or is appended. The observer's list of optimizers already holds it."""

    def loss_nonfinite(self, step: int) -> None:
        """The numbers of an earlier step have arrived, and its loss was not finite; on a GPU some steps later."""

    def gradients_vanished(self, step: int, names: list[str]) -> None:
        """The tensors of an earlier sampled step have arrived, and the float16 output gradients of these modules were
        all zeros while others were not."""

    def step_ended(self, step: int) -> None:
        """The step was made or skipped: after `scaler.update` with a scaler, else after the last optimizer's step."""

    def close(self) -> None:
        """The run is about to end: write what is pending, detach all hooks. Called once."""


class Observers:
    """Notifies observers of the moments they override. Their exceptions never reach the training."""

    def __init__(
        self,
        writer: RunWriter,
        observers: Sequence[Observer],
        at_own_work: Callable[[], bool],
        watching: Callable[[], AbstractContextManager[Any]],
        transfer: Callable[[], HostTransfer | None] = lambda: None,
    ) -> None:
        self._writer = writer
        for observer in observers:
            observer.at_own_work = at_own_work
            observer.watching = watching
            observer.transfer = transfer
        self._calls: dict[str, list[tuple[Observer, Callable[..., None]]]] = {
            moment: [
                (o, getattr(o, moment)) for o in observers if getattr(type(o), moment) is not getattr(Observer, moment)
            ]
            for moment in MOMENTS
        }
        self._observers = list(observers)
        self._awake: list[bool] = []
        self._present = self._calls  # listeners by moment in the current step

    def wants(self, moment: str) -> bool:
        """Whether any observer overrides that moment and is to be called in the current step."""
        return bool((self._calls if moment in _ALWAYS else self._present)[moment])

    def begin(self, step: int, bare: bool) -> bool:
        """Notify observers that a step begins. `bare`: they should attach few hooks; returns whether all of them
        agree."""
        for observer in self._observers:
            observer.bare = bare
        self.notify("step_began", step)
        return bare and all(observer.bare for observer in self._observers)

    def notify(self, moment: str, *values: Any) -> None:
        """Call `moment` of every observer that overrides it and is awake."""
        for observer, call in (self._calls if moment in _ALWAYS else self._present)[moment]:
            try:
                call(*values)
            except Exception as error:
                self._drop(observer)
                what = f"{type(observer).__name__} stopped at {moment}: {in_one_line(error)}"
                self._writer.event("warning", name="not recorded", detail=what)
        if moment == "step_began":
            awake = [observer.awake for observer in self._observers]
            if awake != self._awake:
                self._awake = awake
                self._present = {name: [(o, c) for o, c in calls if o.awake] for name, calls in self._calls.items()}

    def _drop(self, observer: Observer) -> None:
        self._calls, self._present = (
            {name: [(o, c) for o, c in calls if o is not observer] for name, calls in moments.items()}
            for moments in (self._calls, self._present)
        )
        self._observers = [o for o in self._observers if o is not observer]
        self._awake = []
        with contextlib.suppress(Exception):  # it may hold hooks; after one failure, closing may fail too
            observer.close()
