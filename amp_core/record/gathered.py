"""The loss of a step and its samples, gathered over forwards and backwards until the step is attempted.

    gathered.entered(model, 32)      # a forward begins, of so many samples
    call = gathered.hooked()         # its output tells of its backward
    gathered.add(loss)               # a scaler is given the loss: from then on it tells of all of them
    gathered.called(loss)            # backward is called
    gathered.arrived()               # its first gradient has reached the model
    gathered.reached(call)           # and comes through that forward
    gathered.ended()
    loss, samples = gathered.take()

Where no scaler is given the loss, it is what backward starts from. Only what came through the model to its end counts:
another model's backward does not, nor one that an exception broke off. Of the forwards only those count that a backward
came through: not an evaluation, and not what a second network made of the first one's output for its own loss. Where an
optimizer steps within a backward, what is known of that backward is its step's, and of those that step after it.
"""

import torch

from amp_core.record.gradients import in_backward

Call = list[int]
"""A forward: by which module, and of how many samples; of none once they were counted."""


class Gathered:
    """Of one step."""

    def __init__(self) -> None:
        self._scaled = False  # a scaler tells of the losses
        self._losses: list[torch.Tensor] = []
        self._samples: dict[int, int] = {}  # by the module that was called with them
        self._reached: dict[int, int] = {}  # those of them that a backward came through
        self._present: Call = [0, 0]
        self._sure = 0  # losses whose backward came to its end
        self._samples_then: dict[int, int] = {}
        self._reached_then: dict[int, int] = {}
        self._hooked = False  # whether an output tells of its backward; where none does, calling backward has to do
        self._told = False  # what is known of the present backward is some step's already
        self._called = False  # backward was called, and has not come to its end
        self._inside = False  # and it has reached the model

    @property
    def broken_off(self) -> bool:
        """Asked in a forward: whether the backward before it never came to its end."""
        return self._inside

    def entered(self, module: torch.nn.Module, samples: int) -> None:
        """A forward begins. Where several modules are called for the same samples, they count once."""
        if self._called:
            self._drop()
            self._samples, self._reached = dict(self._samples_then), dict(self._reached_then)
        self._samples[id(module)] = self._samples.get(id(module), 0) + samples
        self._present = [id(module), samples]

    def hooked(self) -> Call:
        """The output of the present forward tells of its backward: of which `reached` must be given this."""
        self._hooked = True
        return self._present

    def add(self, loss: torch.Tensor) -> None:
        """A loss, before the scaler multiplies it."""
        self._scaled = True
        self._keep(loss)

    def called(self, loss: torch.Tensor | None) -> None:
        """Backward is called, from `loss` where it is a single number."""
        if not self._scaled:
            self._drop()
            if loss is not None:
                self._keep(loss)
            if not self._hooked:
                self._sure = len(self._losses)
        self._called = self._hooked

    def arrived(self) -> None:
        """The first gradient of a backward has reached the model."""
        self._inside = True

    def reached(self, call: Call) -> None:
        """A backward comes through that forward."""
        module, samples = call
        if samples:
            self._reached[module] = self._reached.get(module, 0) + samples
            call[1] = 0

    def ended(self) -> None:
        """A backward came to its end."""
        self._inside = self._called = False
        if self._told:
            self._begin_anew()
        self._sure = len(self._losses)
        self._samples_then, self._reached_then = dict(self._samples), dict(self._reached)

    def take(self) -> tuple[torch.Tensor | None, int]:
        """The step is attempted: the sum of its losses, if any were seen, and the number of its samples."""
        if in_backward():
            self._told = True
        elif not self._scaled:
            self._drop()
        losses, samples = self._losses, max((self._reached or self._samples).values(), default=0)
        if not self._told:
            self._begin_anew()
        if not losses:
            return None, samples
        if len(losses) == 1:
            return losses[0].double(), samples
        return torch.stack([loss.to(losses[0].device).double() for loss in losses]).sum(), samples

    def forget(self) -> None:
        """An exception broke the step off."""
        self._begin_anew()
        self._inside = False

    def _begin_anew(self) -> None:
        self._losses, self._sure = [], 0
        self._samples, self._reached, self._samples_then, self._reached_then = {}, {}, {}, {}
        self._hooked = self._called = self._told = False

    def _keep(self, loss: torch.Tensor) -> None:
        self._losses.append(loss.detach().clone().reshape(()))

    def _drop(self) -> None:
        del self._losses[self._sure :]
        self._called = False
