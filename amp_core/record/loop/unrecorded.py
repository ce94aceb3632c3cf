"""Reports what a loop hides from the recorder: forwards, losses, and steps of the optimizer.

    >>> unrecorded = Unrecorded(writer, first=0)
    >>> unrecorded.backward_seen(step)
    >>> unrecorded.attempted(step, seen={"forward", "backward"})
    >>> unrecorded.check_losses(attempts)

Each is one event of the run, `not recorded`, with what to do about it.
"""

from collections.abc import Collection, Iterable, Sequence

import torch

from amp_core.record.loop.attempt import Attempt
from amp_core.record.stats import dispatch
from amp_core.store.writer import RunWriter

NO_FORWARD_ANY_MORE = (
    "forward of the model: the loop no longer calls the model or a part of it, so forward times, samples and module "
    "outputs are missing"
)
MAX_STEPS_WITHOUT_FORWARD = 5
"""Steps without a forward of the model before an event reports it."""
NO_FORWARD = (
    "forward of the model: not called in the first steps, so forward times, samples and module outputs are missing; "
    "compile the model before `watch` is called, and give `watch` the model that the loop calls"
)
NO_STEP = "steps: no optimizer that was given to `watch` has stepped; give `watch` the one that the loop steps"
NOTHING = (
    "steps: neither a forward nor a backward of the model nor a step of its optimizer was seen; give `watch` the model "
    "and the optimizer of the loop"
)
NO_LOSS = (
    "loss: none could be read from the calls of backward since step {step}; log it in each step with "
    "`rec.log(loss=loss)`"
)
FORWARDS_LOST_AFTER = 3
"""Steps from the last one with a forward (inclusive) after which all modules get hooks again."""
MAX_STEPS_WITHOUT_LOSS = 3
"""Consecutive steps without a loss after which an event reports it."""
MAX_LOSS_WARNINGS = 5
NO_MORE_STEPS = (
    "steps: {count} backward passes since the last step of an optimizer that `watch` was given; give `watch` the "
    "optimizer that the loop steps, which must be a `torch.optim.Optimizer`"
)
NO_VALUES = "gradients of parameters on the meta device: they hold no values"
MIN_UNSTEPPED_BACKWARDS = 50
UNSTEPPED_BACKWARDS_RATIO = 3
"""An event reports missing steps after more backward passes than this number, and than this ratio times the most that
any step had."""


class Unrecorded:
    """The reports of one run, whose first step is number `first`."""

    def __init__(self, writer: RunWriter, first: int) -> None:
        self.backwards = 0
        """Backward passes seen so far."""
        self._writer = writer
        self._first = first
        self._reported: set[str] = set()
        self._sees_forward: bool | None = None  # None: not known yet
        self._without_forward = 0  # consecutive steps, since the last one with a forward
        self._backwards_then = 0  # `backwards` at the last step
        self._most_backwards = 0  # of one step
        self._may_report_no_steps = True
        self._last_loss = first - 1  # the last step that has a loss
        self._loss_missing = False  # whether the current steps have none, as an event has reported
        self._loss_warnings = 0

    def backward_seen(self, step: int) -> None:
        """A backward reached the model."""
        self.backwards += 1
        since = self.backwards - self._backwards_then
        if (
            self._may_report_no_steps
            and self._most_backwards
            and since > max(MIN_UNSTEPPED_BACKWARDS, UNSTEPPED_BACKWARDS_RATIO * self._most_backwards)
        ):
            self._may_report_no_steps = False
            self._report(NO_MORE_STEPS.format(count=since), step)

    def attempted(self, step: int, seen: Collection[str]) -> None:
        """An optimizer has stepped, or its step was skipped; `seen` are the phases before it."""
        if "forward" in seen:
            self._sees_forward, self._without_forward = True, 0
        elif self._sees_forward is None and step == self._first + MAX_STEPS_WITHOUT_FORWARD:
            self._sees_forward = False
            self._report(NO_FORWARD, step)
        self._most_backwards = max(self._most_backwards, self.backwards - self._backwards_then)
        self._backwards_then = self.backwards

    def step_over(self, step: int) -> bool:
        """The step is complete. Whether the forwards that earlier steps had have just been lost."""
        self._without_forward += 1
        if self._sees_forward and self._without_forward == FORWARDS_LOST_AFTER + MAX_STEPS_WITHOUT_FORWARD:
            self.report_once(NO_FORWARD_ANY_MORE, step)
        return bool(self._sees_forward) and self._without_forward == FORWARDS_LOST_AFTER

    def check_losses(self, attempts: Sequence[Attempt], *, last: bool = False) -> None:
        """Nothing can be logged any more to these attempts; with `last`, no others follow."""
        for attempt in attempts:
            if "loss" in attempt.put_in or attempt.logged.get("loss") is not None:
                self._last_loss = attempt.step
                self._loss_missing = False
            missed = attempt.step - self._last_loss
            if not self._loss_missing and (
                missed >= MAX_STEPS_WITHOUT_LOSS or (last and missed and self._last_loss < self._first)
            ):
                self._loss_missing = True
                self._loss_warnings += 1
                if self._loss_warnings <= MAX_LOSS_WARNINGS:
                    self._report(NO_LOSS.format(step=self._last_loss + 1), attempt.step)

    def no_step(self, seen: bool) -> None:
        """The run ends without a step; `seen`: with a forward or a backward."""
        self._report(NO_STEP if self.backwards or seen else NOTHING)

    def check_kernels(self, parameters: Iterable[torch.Tensor], step: int) -> None:
        """Write one event for each device type of these parameters on which plain torch has to measure."""
        new = dispatch.fallbacks.keys() - self._reported
        if not new:
            return
        self._reported |= new
        for kind in new & {p.device.type for p in parameters}:
            detail = f"those on {kind} are computed in plain torch, which is slower: {dispatch.fallbacks[kind]}"
            self._writer.event("phase change", name="statistics", detail=detail, step=step)

    def report_once(self, what: str, step: int) -> None:
        """Write an event that something is not recorded, the first time only."""
        if what not in self._reported:
            self._reported.add(what)
            self._report(what, step)

    def _report(self, detail: str, step: int | None = None) -> None:
        self._writer.event("warning", name="not recorded", detail=detail, step=step)
