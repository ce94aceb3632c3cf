"""The loss of a step and its samples, gathered over forwards and backwards until the step is attempted.

    gathered.entered(model)                      # a forward begins
    gathered.counted(32)                         # … and has ended: it was one of so many samples
    call = gathered.hooked(output)               # its output tells of its backward
    token = gathered.scaled(loss, result, …)     # a scaler has multiplied the loss
    gathered.called([loss], [None])              # backward is called
    gathered.arrived()                           # its first gradient has reached the model
    gathered.reached(call)                       # and comes through that forward
    gathered.ended()
    gathered.returned()
    loss, samples = gathered.take()

The loss of a backward is what it differentiates: the sum of its roots, each times its `grad_tensors` where it is given
them, before a scaler multiplied it. Only a backward that came through the model to its end counts: another model's does
not, nor one that an exception broke off. Where no output tells of backward (a part of the model was called, or the
model keeps its output to itself), it counts if it changed a gradient of the model. `torch.autograd.grad` by the model's
parameters counts in a step without such a backward, and never with `create_graph`.

Of the forwards only those count that a backward came through: not an evaluation, and not what a second network made of
the first one's output for its own loss. A loss whose gradients another optimizer's step used, and that were cleared
before the next backward, is that step's: a generator's loss comes through the discriminator too. Where an optimizer
steps within a backward, what is known of that backward is its step's, and of those that step after it.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from amp_core.record.backends import widened
from amp_core.record.model.parameters import in_backward

Call = list[int]
"""A forward: by which module, and of how many samples; of none once they were counted."""
Marks = list[tuple[int, int] | None]
LOOKED_AT = 3
"""Parameters whose gradients tell whether they were cleared."""


@dataclass
class Scaled:
    """A tensor that a scaler has multiplied."""

    value: torch.Tensor
    """A copy of what it was before."""
    result: "weakref.ref[torch.Tensor]"
    factor: Callable[[], torch.Tensor | None]
    """The loss scale, asked for during its backward."""


@dataclass
class _Backward:
    """The present call of `backward` or `grad`."""

    loss: torch.Tensor | None = None
    """What it differentiates; None where that is no one number."""
    unscaled: bool = True
    """Whether `loss` is without the loss scale, where a scaler multiplied it."""
    counts: bool = True
    by_grad: bool = False
    before: Marks | None = None
    through: list[Scaled] = field(default_factory=list)
    came: bool = False

    def value(self) -> torch.Tensor | None:
        """The loss, without the loss scale."""
        if self.loss is None or self.unscaled or not self.through:
            return self.loss
        factor = self.through[0].factor()
        return widened(self.loss) / factor.to(self.loss.device) if factor is not None else self.loss


class LossAndSamples:
    """Of one step. `parameters` gives those of the model."""

    def __init__(self, parameters: Callable[[], Sequence[torch.Tensor]]) -> None:
        self._parameters = parameters
        self._losses: list[torch.Tensor] = []
        self._by_grad: list[torch.Tensor] = []
        self._scaled: list[Scaled] = []
        self._outputs: list[weakref.ref[torch.Tensor]] = []  # of the model
        self._samples: dict[int, int] = {}  # by the module that was called with them
        self._reached: dict[int, int] = {}  # those of them that a backward came through
        self._present: Call = [0, 0]
        self._uncounted = False
        self._samples_then: dict[int, int] = {}
        self._reached_then: dict[int, int] = {}
        self._hooked = False  # whether an output tells of its backward
        self._told = False  # what is known of the present backward is some step's already
        self._called = False  # backward was called, and has not come to its end
        self._inside = False  # and it has reached the model
        self._backward: _Backward | None = None
        self._elsewhere: tuple[list[torch.Tensor], Marks, int, dict[int, int], dict[int, int]] | None = None

    @property
    def broken_off(self) -> bool:
        """Asked in a forward: whether the backward before it never came to its end."""
        return self._inside

    def entered(self, module: torch.nn.Module) -> None:
        """A forward begins."""
        if self._called:
            self._called = False
            self._samples, self._reached = dict(self._samples_then), dict(self._reached_then)
        self._present = [id(module), 0]

    def counted(self, samples: int | None) -> None:
        """The present forward was one of so many samples; None where it cannot be told: then the step's cannot either.

        Several modules that are called for the same samples count once.
        """
        if samples is None:
            self._uncounted = True
            return
        module = self._present[0]
        self._present[1] = samples
        self._samples[module] = self._samples.get(module, 0) + samples

    def hooked(self, output: torch.Tensor) -> Call:
        """An output of the present forward tells of its backward: of which `reached` must be given this."""
        self._hooked = True
        self._outputs = [*(held for held in self._outputs if held() is not None), weakref.ref(output)]
        return self._present

    def scaled(self, loss: torch.Tensor, result: torch.Tensor, factor: Callable[[], torch.Tensor | None]) -> Scaled:
        """A scaler has made `result` of `loss`. `through` must be given what is returned in its backward."""
        token = Scaled(loss.detach().clone(), weakref.ref(result), factor)
        self._scaled = [*(held for held in self._scaled if held.result() is not None), token]
        return token

    def called(
        self, roots: Sequence[torch.Tensor], weights: Sequence[torch.Tensor | None], counts: bool = True
    ) -> None:
        """Backward is called from these, with these `grad_tensors`. `counts`: it is to add to the model's gradients."""
        self._drop_cleared()
        loss, unscaled = self._loss_of(roots, weights) if counts else (None, True)
        before = self._marks() if counts and not self._hooked else None
        self._backward = _Backward(loss, unscaled, counts, before=before)
        self._called = self._hooked

    def called_grad(self, roots: Sequence[torch.Tensor], weights: Sequence[torch.Tensor | None], counts: bool) -> None:
        """`torch.autograd.grad` is called. `counts`: for gradients of the model's parameters, with none to follow."""
        loss, unscaled = self._loss_of(roots, weights) if counts else (None, True)
        self._backward = _Backward(loss, unscaled, counts, by_grad=True)

    def arrived(self) -> None:
        """The first gradient of a backward has reached the model."""
        self._inside = True

    def reached(self, call: Call) -> None:
        """A backward comes through that forward."""
        if self._backward is not None:
            self._backward.came = True
        module, samples = call
        if samples:
            self._reached[module] = self._reached.get(module, 0) + samples
            call[1] = 0

    def through(self, scaled: Scaled) -> None:
        """A backward comes through what a scaler has multiplied."""
        if self._backward is None:  # nothing of torch's that is listened to began it
            self._backward = _Backward(scaled.value.sum())
            self._backward.before = None if self._hooked else []
        self._backward.through.append(scaled)

    def ended(self) -> None:
        """A backward came to its end."""
        self._inside = self._called = False
        backward = self._backward
        if backward is not None and not backward.by_grad:
            if backward.came or backward.before == []:
                self._take_in(backward)
                self._backward = None
            elif backward.before is None:
                self._backward = None  # another model's
        if self._told:
            self._begin_anew()
        self._samples_then, self._reached_then = dict(self._samples), dict(self._reached)

    def returned(self) -> bool:
        """The call of `backward` or `grad` is over. Whether it counts although no output told of it."""
        backward, self._backward = self._backward, None
        if backward is None or not backward.counts:
            return False
        if backward.by_grad:
            loss = backward.value()
            self._by_grad += [loss] if loss is not None else []
            return False
        if backward.before is None or backward.before == self._marks():
            return False
        self._take_in(backward)
        if self._told:
            self._begin_anew()
        return True

    def stepped_elsewhere(self) -> None:
        """An optimizer that is not the run's steps: the gradients so far may have been for it."""
        if self._losses:
            given = [p for p in self._parameters() if p.grad is not None]
            chosen = [given[i * (len(given) - 1) // (LOOKED_AT - 1)] for i in range(LOOKED_AT)] if given else []
            self._elsewhere = (chosen, _marks(chosen), len(self._losses), dict(self._samples), dict(self._reached))

    def take(self) -> tuple[torch.Tensor | None, int]:
        """The step is attempted: the sum of its losses, if any were seen, and its samples, 0 if unknown."""
        losses = self._losses or self._by_grad
        if in_backward():
            self._told = True
            loss = self._backward.value() if self._backward is not None and self._backward.counts else None
            losses = [*losses, loss] if loss is not None else losses
        samples = 0 if self._uncounted else max((self._reached or self._samples).values(), default=0)
        if not self._told:
            self._begin_anew()
        if not losses:
            return None, samples
        if len(losses) == 1:
            return widened(losses[0]), samples
        return torch.stack([widened(loss.to(losses[0].device)) for loss in losses]).sum(), samples

    def forget(self) -> None:
        """An exception broke the step off."""
        self._begin_anew()
        self._inside = False

    def _begin_anew(self) -> None:
        self._losses, self._by_grad, self._scaled, self._outputs = [], [], [], []
        self._samples, self._reached, self._samples_then, self._reached_then = {}, {}, {}, {}
        self._hooked = self._called = self._told = self._uncounted = False
        self._elsewhere = None

    def _take_in(self, backward: _Backward) -> None:
        loss = backward.value() if backward.counts else None
        if loss is not None:
            self._losses.append(loss)

    def _drop_cleared(self) -> None:
        """Losses that another optimizer's step used, of whose gradients nothing is left."""
        if self._elsewhere is None:
            return
        chosen, marks, losses, samples, reached = self._elsewhere
        self._elsewhere = None
        if _marks(chosen) != marks:
            del self._losses[:losses]
            self._samples = {k: n - samples.get(k, 0) for k, n in self._samples.items()}
            self._reached = {k: n - reached.get(k, 0) for k, n in self._reached.items() if n > reached.get(k, 0)}

    def _loss_of(
        self, roots: Sequence[torch.Tensor], weights: Sequence[torch.Tensor | None]
    ) -> tuple[torch.Tensor | None, bool]:
        """What backward from these differentiates, and whether it is without the loss scale; None where it is no loss.

        A gradient that is given for the model's own output of two or more dimensions came from elsewhere, as in a stage
        of a pipeline: their product is no loss.
        """
        parts: list[torch.Tensor] = []
        tokens = [next((s for s in self._scaled if s.result() is root), None) for root in roots]
        for root, weight, token in zip(roots, weights, tokens, strict=True):
            value = token.value if token is not None else root.detach()
            if weight is None:
                if value.numel() != 1:
                    return None, True
                parts.append(value.clone().reshape(()))
            elif value.dim() > 1 and value.numel() > 1 and any(output() is root for output in self._outputs):
                return None, True
            else:
                parts.append((widened(value) * widened(weight.detach())).sum())
        if len(parts) < 2:
            return (parts[0] if parts else None), all(t is not None for t in tokens)
        total = torch.stack([widened(part.to(parts[0].device)) for part in parts]).sum()
        return total, any(t is not None for t in tokens)

    def _marks(self) -> Marks:
        return _marks(self._parameters())


def _marks(parameters: Sequence[torch.Tensor]) -> Marks:
    """Which gradient each parameter has, and how often it was written to."""
    return [(id(p.grad), p.grad._version) if p.grad is not None else None for p in parameters]
