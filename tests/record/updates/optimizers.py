"""Optimizers of other packages' kinds, as their authors write them."""

from collections.abc import Callable, Iterable
from typing import Any

import torch


class Lion(torch.optim.Optimizer):
    """Sign of an interpolated momentum, decoupled weight decay (Chen et al., 2023, algorithm 2)."""

    def __init__(
        self, params: Iterable[Any], lr: float, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        if closure is not None:
            with torch.enable_grad():
                closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                momentum = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                first, second = group["betas"]
                p.add_((momentum * first + p.grad * (1 - first)).sign_(), alpha=-group["lr"])
                momentum.mul_(second).add_(p.grad, alpha=1 - second)


class KahanSgd(torch.optim.Optimizer):
    """Keeps what a 16-bit weight did not take up, and adds it to the next update."""

    def __init__(self, params: Iterable[Any], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                remainder = self.state[p].setdefault("kahan_comp", torch.zeros_like(p))
                remainder.add_(p.grad, alpha=-group["lr"])
                before = p.clone()
                p.add_(remainder)
                remainder.add_(before.sub_(p))


class SgdWithMasters(torch.optim.Optimizer):
    """Updates FP32 masters and copies them to the weights."""

    def __init__(self, params: Iterable[Any], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if "main_weight" not in self.state[p]:
                    self.state[p]["main_weight"] = p.float().clone()
                main = self.state[p]["main_weight"]
                main.add_(p.grad.to(main.dtype), alpha=-group["lr"])
                p.copy_(main)


class NormalisedSgd(torch.optim.Optimizer):
    """Divides each gradient by its own norm: no element moves without regard to the others."""

    def __init__(self, params: Iterable[Any], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        if closure is not None:
            with torch.enable_grad():
                closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad / p.grad.norm(), alpha=-group["lr"])


class CountingSgd(NormalisedSgd):
    """Writes to a tensor that no optimizer keeps as its state."""

    steps = torch.zeros(())

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        CountingSgd.steps.add_(1)
        super().step()


class NoisySgd(NormalisedSgd):
    """Moves by chance: repeated, the step is another."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(torch.randn_like(p), alpha=-group["lr"])


class Lookahead(torch.optim.Optimizer):
    """Steps an inner optimizer that counts in Python: repeated on copies, it would count twice."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner
        self.inner.steps = 0  # type: ignore[attr-defined]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        self.inner.steps += 1  # type: ignore[attr-defined]
        self.inner.step()


class CalledSgd(NormalisedSgd):
    """Counts the calls of its step where no tensor shows it."""

    calls = 0

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        CalledSgd.calls += 1
        super().step()


class LateClosureSgd(NormalisedSgd):
    """Moves by the gradients of the last step, and calls its closure for those of the next."""

    def step(self, closure: Callable[[], float] | None = None) -> None:
        super().step()
        assert closure is not None
        closure()
