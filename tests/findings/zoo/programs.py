"""Faults that raise: the run ends with torch's own error, and the finding names the module that raised it."""

import contextlib
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from amp_core.store.writer import RunWriter
from tests.findings.zoo.case import WIDTH, Net, batches, case, fp16


@case("fp16-parameters", "first.weight")
def unscaled(into: Path, faulty: bool) -> None:
    loop = fp16(into)
    if faulty:
        loop.model.first.half()
    with contextlib.suppress(ValueError):
        loop.run()


class Masked(nn.Module):
    def __init__(self, *, faulty: bool) -> None:
        super().__init__()
        self.faulty = faulty

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = x.half()
        lowest = -1e9 if self.faulty else torch.finfo(scores.dtype).min
        return scores.masked_fill(scores < 0, lowest).softmax(-1)


@case("mask-constant-overflow", "middle")
def mask(into: Path, faulty: bool) -> None:
    with contextlib.suppress(RuntimeError):
        fp16(into, Net(Masked(faulty=faulty)), steps=2).run()


class Penalised(nn.Module):
    def __init__(self, *, faulty: bool) -> None:
        super().__init__()
        self.lowest = -1e9 if faulty else -1e4

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = x.half()
        return (scores + (scores < 0).half().mul(self.lowest)).softmax(-1)


@case("mask-constant-overflow", "middle")
def mask_that_is_added(into: Path, faulty: bool) -> None:
    fp16(into, Net(Penalised(faulty=faulty)), steps=2).run()


class WithLoss(Net):
    def __init__(self, *, faulty: bool) -> None:
        super().__init__()
        self.criterion = nn.BCELoss() if faulty else nn.BCEWithLogitsLoss()
        self.faulty = faulty

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        out = super().forward(x)
        assert y is not None
        target = F.one_hot(y, 8).to(out.dtype)
        loss: torch.Tensor = self.criterion(out.sigmoid() if self.faulty else out, target)
        return loss


@case("bce-banned", "criterion")
def bce(into: Path, faulty: bool) -> None:
    loop = fp16(into, WithLoss(faulty=faulty))
    with loop.watched():
        for x, y in batches(2):
            with loop.autocast():
                loss = loop.model(x, y)
            loop.backward(loss)
            loop.step()


@case("bce-banned", "loss")
def bce_refused(into: Path, faulty: bool) -> None:
    text = "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast.\n"
    writer = RunWriter(into)
    writer.append("steps", {"step": [0], "loss": [1.0]})
    writer.close(*(("failed", f"RuntimeError: {text}") if faulty else ("finished", None)))


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, weight)
        return torch.mm(x, weight)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        x, weight = ctx.saved_tensors
        return torch.mm(grad, weight.t()), torch.mm(x.t(), grad)


class Custom(nn.Module):
    def __init__(self, *, faulty: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH))
        self.faulty = faulty

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            out: torch.Tensor = Scaled.apply(x, self.weight if self.faulty else self.weight.to(x.dtype))
        return out


@case("custom-function-dtype", "middle")
def custom(into: Path, faulty: bool) -> None:
    with contextlib.suppress(RuntimeError):
        fp16(into, Net(Custom(faulty=faulty)), steps=2).run()


class WideBackward(Scaled):
    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        x, weight = ctx.saved_tensors
        return torch.mm(grad, weight.float()), torch.mm(x.t(), grad)


class CustomBackward(nn.Module):
    def __init__(self, *, faulty: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH))
        self.function = WideBackward if faulty else Scaled

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.function.apply(x.half(), self.weight.half())
        return out


@case("custom-function-dtype", "WideBackward")
def custom_backward(into: Path, faulty: bool) -> None:
    with contextlib.suppress(RuntimeError):
        fp16(into, Net(CustomBackward(faulty=faulty)), steps=2).run()


@case("graphed-callable-cache", "make_graphed_callables")
def graphed(into: Path, faulty: bool) -> None:
    text = "make_graphed_callables does not support the autocast caching. Please set `cache_enabled=False`."
    writer = RunWriter(into)
    writer.append("steps", {"step": [0], "loss": [1.0]})
    writer.close(*(("failed", f"RuntimeError: {text}") if faulty else ("finished", None)))
