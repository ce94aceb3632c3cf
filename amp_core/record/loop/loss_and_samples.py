"""The loss of a step and its number of samples, collected over forwards and backwards until the step is attempted.

    step.entered(model)                      # a forward begins
    step.counted(32)                         # … and has ended; it had 32 samples
    call = step.hooked(output)               # a hook on its output reports its backward
    token = step.scaled(loss, result, …)     # a scaler has multiplied the loss
    step.called([loss], [None])              # backward is called
    step.arrived()                           # its first gradient has reached the model
    step.reached(call)                       # and comes through that forward
    step.ended()
    step.returned()
    loss, samples = step.take()

The loss of a backward is what it differentiates: the sum of its roots, each times its `grad_tensors` if given, before a
scaler multiplied it, or the program's own code by a loss scale, where it computes in FP16. Only a backward that passes
through the model and completes counts: another model's does not, nor one that an exception aborted. If no output
reports backward (a part of the model was called, the model does not return its output, or the loss depends on gradients
of the output alone), a backward counts if it changed a gradient of the model. `torch.autograd.grad` with respect to the
model's parameters counts in a step without such a backward, and never with `create_graph`.

Only forwards that a backward passes through count: not an evaluation, and not a second network's forward on the first
one's output for its own loss. If another optimizer's step used the gradients of a loss, and they were cleared before
the next backward, the loss belongs to that step: a generator's loss passes through the discriminator too. If an
optimizer steps within a backward, the values of that backward belong to its step and to the steps that follow within
it.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from amp_core.record.backends import widened
from amp_core.record.model.loss_factors import own_scale
from amp_core.record.model.parameters import in_backward

Call = list[int]
"""A forward: the `id` of its module, and its number of samples; 0 once they were counted."""
Marks = list[tuple[int, int] | None]
MAX_CHECKED = 3
"""Number of parameters whose gradients are checked for having been cleared."""
MAX_MARKED = 16
"""About how many parameters' gradients are checked for having changed, where an output could have reported backward."""


@dataclass
class Scaled:
    """A tensor that a scaler has multiplied."""

    value: torch.Tensor
    """A copy of its value before."""
    result: "weakref.ref[torch.Tensor]"
    factor: Callable[[], torch.Tensor | None]
    """Returns the loss scale; called during its backward."""


@dataclass
class _Backward:
    """The current call of `backward` or `grad`."""

    loss: torch.Tensor | None = None
    """What it differentiates; None if that is not a single number."""
    unscaled: bool = True
    """Whether `loss` is without the loss scale, where a scaler multiplied it."""
    own_scale: float | None = None
    """The loss scale by which the program's own code multiplied `loss`, if it computes in FP16."""
    counts: bool = True
    by_grad: bool = False
    before: Marks | None = None
    marked: Sequence[torch.Tensor] = ()
    """The parameters of `before`."""
    through: list[Scaled] = field(default_factory=list)
    came: bool = False

    def value(self) -> torch.Tensor | None:
        """The loss, without the loss scale."""
        if self.loss is None or self.unscaled or not self.through:
            return self.loss
        factor = self.through[0].factor()
        return widened(self.loss) / factor.to(self.loss.device) if factor is not None else self.loss


class LossAndSamples:
    """Loss and samples of the current step. `parameters` returns those of the model; `optimizers` are those that step
    them, a list that may grow. `in_fp16` tells whether the loop computes in FP16."""

    def __init__(
        self,
        parameters: Callable[[], Sequence[torch.Tensor]],
        optimizers: Sequence[torch.optim.Optimizer],
        in_fp16: Callable[[], bool],
    ) -> None:
        self._parameters = parameters
        self._optimizers = optimizers
        self._in_fp16 = in_fp16
        self._losses: list[torch.Tensor] = []
        self._by_grad: list[torch.Tensor] = []
        self._scaled: list[Scaled] = []
        self._outputs: list[weakref.ref[torch.Tensor]] = []  # of the model
        self._samples: dict[int, int] = {}  # by the module that was called with them
        self._reached: dict[int, int] = {}  # those that a backward passed through
        self._present: Call = [0, 0]
        self._uncounted = False
        self._samples_then: dict[int, int] = {}
        self._reached_then: dict[int, int] = {}
        self._hooked = False  # whether a hook on an output reports its backward
        self._already_taken = False  # the present backward's values already belong to a step
        self._called = False  # backward was called and has not completed
        self._inside = False  # and it has reached the model
        self._backward: _Backward | None = None
        self._elsewhere: tuple[list[torch.Tensor], Marks, int, dict[int, int], dict[int, int]] | None = None

    @property
    def interrupted(self) -> bool:
        """Whether the last backward did not complete; to be called in a forward."""
        return self._inside

    def entered(self, module: torch.nn.Module) -> None:
        """A forward begins."""
        if self._called:
            self._called = False
            self._samples, self._reached = dict(self._samples_then), dict(self._reached_then)
        self._present = [id(module), 0]

    def counted(self, samples: int | None) -> None:
        """The present forward had `samples` samples; with None, if that is unknown, the step's samples are unknown too.

        Several modules that are called for the same samples count once.
        """
        if samples is None:
            self._uncounted = True
            return
        module = self._present[0]
        self._present[1] = samples
        self._samples[module] = self._samples.get(module, 0) + samples

    def hooked(self, output: torch.Tensor) -> Call:
        """A hook on `output` of the current forward reports its backward. It must pass the result to `reached`."""
        self._hooked = True
        self._outputs = [*(held for held in self._outputs if held() is not None), weakref.ref(output)]
        return self._present

    def scaled(self, loss: torch.Tensor, result: torch.Tensor, factor: Callable[[], torch.Tensor | None]) -> Scaled:
        """A scaler has scaled `loss` to `result`. In its backward, the return value must be passed to `through`."""
        token = Scaled(widened(loss.detach(), copy=True), weakref.ref(result), factor)
        self._scaled = [*(held for held in self._scaled if held.result() is not None), token]
        return token

    def called(
        self, roots: Sequence[torch.Tensor], weights: Sequence[torch.Tensor | None], counts: bool = True
    ) -> None:
        """Backward is called on `roots`, with `weights` as `grad_tensors`. `counts`: it adds to the model's
        gradients."""
        self._drop_cleared()
        loss, unscaled = self._loss_of(roots, weights) if counts else (None, True)
        marked = self._marked() if counts else []
        before = _marks(marked) if counts else None
        self._backward = _Backward(loss, unscaled, self._own_scale(roots), counts, before=before, marked=marked)
        self._called = self._hooked

    def called_grad(self, roots: Sequence[torch.Tensor], weights: Sequence[torch.Tensor | None], counts: bool) -> None:
        """`torch.autograd.grad` is called. `counts`: for gradients of the model's parameters, without
        `create_graph`."""
        loss, unscaled = self._loss_of(roots, weights) if counts else (None, True)
        self._backward = _Backward(loss, unscaled, self._own_scale(roots), counts, by_grad=True)

    def arrived(self) -> None:
        """The first gradient of a backward has reached the model."""
        self._inside = True

    def reached(self, call: Call) -> None:
        """A backward passes through that forward."""
        if self._backward is not None:
            self._backward.came = True
        module, samples = call
        if samples:
            self._reached[module] = self._reached.get(module, 0) + samples
            call[1] = 0

    def through(self, scaled: Scaled) -> None:
        """A backward passes through a loss that a scaler has multiplied."""
        if self._backward is None:  # no patched function of torch started it
            self._backward = _Backward(scaled.value.sum())
            self._backward.before = None if self._hooked else []
        self._backward.through.append(scaled)

    def ended(self) -> None:
        """A backward completed."""
        self._inside = self._called = False
        backward = self._backward
        if backward is not None and not backward.by_grad:
            if backward.came or backward.before == []:
                self._add(backward)
                self._backward = None
            elif backward.before is None:
                self._backward = None  # another model's
        if self._already_taken:
            self._reset()
        self._samples_then, self._reached_then = dict(self._samples), dict(self._reached)

    def returned(self) -> bool:
        """The call of `backward` or `grad` returned. Whether it counts although no hook on an output reported it."""
        backward, self._backward = self._backward, None
        if backward is None or not backward.counts:
            return False
        if backward.by_grad:
            loss = self._value(backward)
            self._by_grad += [loss] if loss is not None else []
            return False
        if backward.before is None or backward.before == _marks(backward.marked):
            return False
        self._add(backward)
        if self._already_taken:
            self._reset()
        return True

    def stepped_elsewhere(self) -> None:
        """An optimizer outside of the run steps: the gradients so far may have been for it."""
        if self._losses:
            given = [p for p in self._parameters() if p.grad is not None]
            chosen = [given[i * (len(given) - 1) // (MAX_CHECKED - 1)] for i in range(MAX_CHECKED)] if given else []
            self._elsewhere = (chosen, _marks(chosen), len(self._losses), dict(self._samples), dict(self._reached))

    def take(self) -> tuple[torch.Tensor | None, int]:
        """The step is attempted. Returns the sum of its losses, None without any, and its samples, 0 if unknown."""
        losses = self._losses or self._by_grad
        if in_backward():
            self._already_taken = True
            loss = self._value(self._backward) if self._backward is not None and self._backward.counts else None
            losses = [*losses, loss] if loss is not None else losses
        samples = 0 if self._uncounted else max((self._reached or self._samples).values(), default=0)
        if not self._already_taken:
            self._reset()
        if not losses:
            return None, samples
        if len(losses) == 1:
            return losses[0], samples
        return torch.stack([widened(loss.to(losses[0].device)) for loss in losses]).sum(), samples

    def forget(self) -> None:
        """An exception aborted the step."""
        self._reset()
        self._inside = False

    def _reset(self) -> None:
        self._losses, self._by_grad, self._scaled, self._outputs = [], [], [], []
        self._samples, self._reached, self._samples_then, self._reached_then = {}, {}, {}, {}
        self._hooked = self._called = self._already_taken = self._uncounted = False
        self._elsewhere = None

    def _add(self, backward: _Backward) -> None:
        loss = self._value(backward) if backward.counts else None
        if loss is not None:
            self._losses.append(loss)

    def _own_scale(self, roots: Sequence[torch.Tensor]) -> float | None:
        by_scaler = any(token.result() is root for root in roots for token in self._scaled)
        return own_scale(roots[0]) if len(roots) == 1 and not by_scaler else None

    def _value(self, backward: _Backward) -> torch.Tensor | None:
        """The loss of a backward, without any loss scale. Whether the loop computes in FP16 may be known only now."""
        loss = backward.value()
        own = backward.own_scale if self._in_fp16() else None
        return widened(loss) / own if loss is not None and own is not None else loss

    def _drop_cleared(self) -> None:
        """Drop losses that another optimizer's step used and whose gradients were cleared."""
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
        """What backward on `roots` differentiates, None if that is not a loss, and whether it is without the loss
        scale.

        A gradient that is given for an output of the model with two or more dimensions comes from elsewhere, as in a
        pipeline stage: their product is not a loss.
        """
        parts: list[torch.Tensor] = []
        tokens = [next((s for s in self._scaled if s.result() is root), None) for root in roots]
        for root, weight, token in zip(roots, weights, tokens, strict=True):
            value = token.value if token is not None else root.detach()
            if weight is None:
                if value.numel() != 1:
                    return None, True
                single = value if token is not None else value.clone()  # a token has its own
                parts.append(single.reshape(()) if single.dim() else single)
            elif value.dim() > 1 and value.numel() > 1 and any(output() is root for output in self._outputs):
                return None, True
            else:
                parts.append((widened(value) * widened(weight.detach())).sum())
        if len(parts) < 2:
            return (parts[0] if parts else None), all(t is not None for t in tokens)
        total = torch.stack([widened(part.to(parts[0].device)) for part in parts]).sum()
        return total, any(t is not None for t in tokens)

    def _marked(self) -> Sequence[torch.Tensor]:
        """The model's parameters; where hooks on outputs report nearly every backward, a few of those that are stepped,
        since to walk the model takes longer than all else that a backward costs."""
        if not self._hooked:
            return self._parameters()
        groups = [group["params"] for optimizer in self._optimizers for group in optimizer.param_groups]
        some = [p for params in groups for p in params[:: max(1, len(params) // MAX_MARKED)]]
        return some[:: max(1, len(some) // MAX_MARKED)]


def _marks(parameters: Sequence[torch.Tensor]) -> Marks:
    """The identity and version counter of each parameter's gradient."""
    return [(id(p.grad), p.grad._version) if p.grad is not None else None for p in parameters]
