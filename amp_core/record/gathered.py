"""The loss of a step and its samples, gathered over forwards and backwards until the step is attempted.

    gathered.entered(model, 32)      # a forward begins, of so many samples
    gathered.hooked = True           # its output tells of its backward
    gathered.add(loss)               # a scaler is given the loss: from then on it tells of all of them
    gathered.called(loss)            # backward is called
    gathered.arrived()               # its first gradient has reached the model
    gathered.ended()
    loss, samples = gathered.take()

Where no scaler is given the loss, it is what backward starts from. Only what came through the model to its end counts:
another model's backward does not, nor one that an exception broke off.
"""

import torch


class Gathered:
    """Of one step."""

    def __init__(self) -> None:
        self._scaled = False  # a scaler tells of the losses
        self._losses: list[torch.Tensor] = []
        self._samples: dict[int, int] = {}  # by the module that was called with them
        self._sure = 0  # losses whose backward came to its end
        self._samples_then: dict[int, int] = {}
        self._called = False  # backward was called, and has not come to its end
        self._inside = False  # and it has reached the model
        self.hooked = False
        """Whether an output of the model tells of its backward; where none does, calling backward has to do."""

    @property
    def broken_off(self) -> bool:
        """Asked in a forward: whether the backward before it never came to its end."""
        return self._inside

    def entered(self, module: torch.nn.Module, samples: int) -> None:
        """A forward begins. Where several modules are called for the same samples, they count once."""
        if self._called:
            self._drop()
            self._samples = dict(self._samples_then)
        self._samples[id(module)] = self._samples.get(id(module), 0) + samples

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
            if not self.hooked:
                self._sure = len(self._losses)
        self._called = self.hooked

    def arrived(self) -> None:
        """The first gradient of a backward has reached the model."""
        self._inside = True

    def ended(self) -> None:
        """A backward came to its end."""
        self._inside = self._called = False
        self._sure, self._samples_then = len(self._losses), dict(self._samples)

    def take(self) -> tuple[torch.Tensor | None, int]:
        """The step is attempted: the sum of its losses, if any were seen, and the number of its samples."""
        if not self._scaled:
            self._drop()
        losses, samples = self._losses, max(self._samples.values(), default=0)
        self._losses, self._samples, self._sure, self._samples_then = [], {}, 0, {}
        self.hooked = self._called = False
        if not losses:
            return None, samples
        return torch.stack([loss.to(losses[0].device).double() for loss in losses]).sum(), samples

    def forget(self) -> None:
        """An exception broke the step off."""
        self.take()
        self._inside = False

    def _keep(self, loss: torch.Tensor) -> None:
        self._losses.append(loss.detach().clone().reshape(()))

    def _drop(self) -> None:
        del self._losses[self._sure :]
        self._called = False
