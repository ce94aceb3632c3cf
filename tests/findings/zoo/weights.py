"""Faults of what a loop does with weights between steps: masters that are overwritten, weight decay by hand."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from tests.findings.zoo.case import WIDTH, Loop, batches, case

BF16 = torch.bfloat16


def _narrow_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 8)).to(BF16)


def _with_masters(
    into: Path, back: Callable[[int, Sequence[torch.Tensor], Sequence[torch.Tensor]], None], *, copied: bool = True
) -> None:
    """A BF16 model whose FP32 masters the loop keeps; `back(step, masters, parameters)` runs before each step, and the
    masters are `copied` to the model after it."""
    model = _narrow_model()
    parameters = list(model.parameters())
    masters = [p.detach().float().clone().requires_grad_() for p in parameters]
    loop = Loop(into, model, dtype=None, optimizer=torch.optim.AdamW(masters, lr=1e-4))
    with loop.watched():
        for i, (x, y) in enumerate(batches(20)):
            with torch.no_grad():
                back(i, masters, parameters)
            F.cross_entropy(model(x.to(BF16)).float(), y).backward()
            for master, p in zip(masters, parameters, strict=True):
                master.grad = p.grad.float()
            loop.step()
            model.zero_grad()
            with torch.no_grad():
                for master, p in zip(masters, parameters, strict=True):
                    (p if copied else p.clone()).copy_(master)


@case("overwritten-masters", "weight")
def masters_copied_from_the_model(into: Path, faulty: bool) -> None:
    def back(step: int, masters: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]) -> None:
        for master, p in zip(masters, parameters, strict=True):
            (master if faulty else p).data.copy_(p if faulty else master)

    _with_masters(into, back)


@case("uncopied-masters", "0.weight")
def masters_copied_to_a_copy(into: Path, faulty: bool) -> None:
    _with_masters(into, lambda step, masters, parameters: None, copied=not faulty)


@case("lost-weight-decay", "0.weight")
def decay_by_hand(into: Path, faulty: bool) -> None:
    rate = 1e-4 if faulty else 0.05
    model = _narrow_model()
    loop = Loop(into, model, dtype=None, optimizer=torch.optim.SGD(model.parameters(), lr=0.5))
    with loop.watched():
        for x, y in batches(12):
            F.cross_entropy(model(x.to(BF16)).float(), y).backward()
            loop.step()
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(1 - rate)


@case("lost-weight-decay", "0.weight")
def decay_by_hand_before_the_step(into: Path, faulty: bool) -> None:
    model = _narrow_model() if faulty else _narrow_model().float()
    dtype = model[0].weight.dtype
    loop = Loop(into, model, dtype=None, optimizer=torch.optim.SGD(model.parameters(), lr=0.5))
    with loop.watched():
        for x, y in batches(12):
            F.cross_entropy(model(x.to(dtype)).float(), y).backward()
            for p in model.parameters():
                p.data.add_(p.data, alpha=-1e-4)
            loop.step()
