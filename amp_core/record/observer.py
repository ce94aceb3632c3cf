"""What may look on while a `Recorder` finds the steps of a training loop: profiler windows, traces, samplers, checks.

    >>> class Printer(Observer):
    ...     def step_ended(self, step: int) -> None:
    ...         print("made step", step)

An observer overrides the moments it cares for; the others cost nothing. It is given to `Recorder(observers=[…])` and is
called on the training thread, its time is counted as `watch_ms`. One that raises is dropped: the run says so once, and
the training goes on.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from amp_core.store.writer import RunWriter

MOMENTS = (
    "step_began",
    "phase_entered",
    "forward_ended",
    "backward_began",
    "backward_ended",
    "called",
    "scaler_found",
    "optimizer_found",
    "step_ended",
    "close",
)

_ALWAYS = ("step_began", "scaler_found", "optimizer_found", "close")


class Observer:
    """All moments, doing nothing. `step` is the number of the step as `steps.step` has it."""

    awake = True
    """Set by an observer in `step_began`, or for good when it is made: whether it has anything to do in that step. One
    that is not awake is told `step_began`, `scaler_found`, `optimizer_found` and `close` alone: next to no cost."""
    bare = False
    """Whether the recorder wants to learn what the step takes without hooks. An observer that can do with fewer hooks
    does so then; one that cannot sets this to False in `step_began`. The recorder sets it before each step."""
    at_own_work: Callable[[], bool] = staticmethod(lambda: False)
    """Whether what runs just now is not of the step: the recorder's own work, or a closure's second call and those that
    follow it in one step of its optimizer. Set by the recorder."""

    def step_began(self, step: int) -> None:
        """The first forward of a step (or the first `scaler.scale`, in a loop that calls another module) comes next.

        Loading the step's data is over by then.
        """

    def phase_entered(self, phase: str) -> None:
        """The training thread is in `phase` now: one of `clock.PHASES`, or `after_backward`. Called very often."""

    def forward_ended(self, output: Any) -> None:
        """The model returned `output`, with gradients enabled; once per micro-batch."""

    def backward_began(self) -> None:
        """The first gradient of a backward pass arrived."""

    def backward_ended(self) -> None:
        """A backward pass is over; on CUDA its kernels may still be running."""

    def called(self, what: str, optimizer: int | None) -> None:
        """The loop is about to call `what` of the optimizer so numbered.

        One of `scale`, `unscale_`, `scaler.step`, `update`, `clip` and `optimizer.step`; the last is reported also
        where `scaler.step` makes the call. `optimizer` is None for `scale`, `update` and `clip`.
        """

    def scaler_found(self, scaler: Any) -> None:
        """A scaler that nobody knew of is about to scale the loss for the first time."""

    def optimizer_found(self, index: int, optimizer: Any) -> None:
        """An optimizer that `watch` was not given is about to step: it is the one so numbered from now on, in the place
        of another or behind the last. The list of optimizers that the observer was given holds it already."""

    def step_ended(self, step: int) -> None:
        """The step is made or skipped: after `scaler.update` with a scaler, else after the last optimizer's step."""

    def close(self) -> None:
        """The run is about to end: write what is held back, take off what was put on. Called once."""


class Observers:
    """Calls each observer's own moments, and lets none of them harm the training."""

    def __init__(self, writer: RunWriter, observers: Sequence[Observer], at_own_work: Callable[[], bool]) -> None:
        self._writer = writer
        for observer in observers:
            observer.at_own_work = at_own_work
        self._calls: dict[str, list[tuple[Observer, Callable[..., None]]]] = {
            moment: [
                (o, getattr(o, moment)) for o in observers if getattr(type(o), moment) is not getattr(Observer, moment)
            ]
            for moment in MOMENTS
        }
        self._observers = list(observers)
        self._awake: list[bool] = []
        self._told = self._calls  # who is told of what in the present step

    def has(self, moment: str) -> bool:
        """Whether any observer cares for that moment, in the present step."""
        return bool(self._told[moment])

    def begin(self, step: int, bare: bool) -> bool:
        """Tell of the begin of a step. With `bare` observers are to do with little; returns whether all of them do."""
        for observer in self._observers:
            observer.bare = bare
        self.tell("step_began", step)
        return bare and all(observer.bare for observer in self._observers)

    def tell(self, moment: str, *values: Any) -> None:
        """Call `moment` of every observer that has it, and is awake."""
        for observer, call in (self._calls if moment in _ALWAYS else self._told)[moment]:
            try:
                call(*values)
            except Exception as error:
                self._drop(observer)
                what = f"{type(observer).__name__} stopped at {moment}: {type(error).__name__}: {error}"
                self._writer.event("warning", name="not recorded", detail=what)
        if moment == "step_began":
            awake = [observer.awake for observer in self._observers]
            if awake != self._awake:
                self._awake = awake
                self._told = {name: [(o, c) for o, c in calls if o.awake] for name, calls in self._calls.items()}

    def _drop(self, observer: Observer) -> None:
        self._calls, self._told = (
            {name: [(o, c) for o, c in calls if o is not observer] for name, calls in moments.items()}
            for moments in (self._calls, self._told)
        )
        self._observers = [o for o in self._observers if o is not observer]
        self._awake = []
        with contextlib.suppress(Exception):  # it may hold hooks; what failed once may fail at that too
            observer.close()
