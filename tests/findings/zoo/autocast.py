"""Faults of autocast regions: in backward, in threads, in recomputation, and layers that they do not reach."""

import contextlib
import threading
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.findings.zoo.case import WIDTH, Loop, Net, batches, case, fp16


def _backward_inside(loop: Loop, steps: int, faulty: bool) -> None:
    with loop.watched():
        for x, y in batches(steps):
            with loop.autocast():
                loss = F.cross_entropy(loop.model(x), y)
                if faulty:
                    loss.backward()
            if not faulty:
                loss.backward()
            loop.step()


@case("backward-under-autocast", "backward")
def backward_inside(into: Path, faulty: bool) -> None:
    _backward_inside(fp16(into, dtype=torch.bfloat16), 3, faulty)


@case("compile-autocast-mismatch", "torch.compile")
def compiled(into: Path, faulty: bool) -> None:
    loop = fp16(into, dtype=torch.bfloat16)
    loop.model = torch.compile(loop.model, backend="eager")
    _backward_inside(loop, 2, faulty)


@case("autocast-cache-no-grad", "first.weight")
def cached(into: Path, faulty: bool) -> None:
    loop = fp16(into, dtype=torch.bfloat16)
    with loop.watched():
        for x, y in batches(3):
            with torch.no_grad(), loop.autocast():
                loop.model(x)
            loss = loop.loss(x, y)
            loss.backward()
            if faulty:  # as torch before its repair in 2.10 left the weights whose casts were in the cache
                for module in (loop.model.first, loop.model.head):
                    module.weight.grad = None
            loop.step()


@case("stale-autocast-cache", "torch.autocast")
def region_around_the_loop(into: Path, faulty: bool) -> None:
    loop = fp16(into, dtype=torch.bfloat16)
    with loop.watched(), loop.autocast() if faulty else contextlib.nullcontext():
        for x, y in batches(12):
            loop.loss(x, y).backward()
            loop.step()


class Threaded(nn.Module):
    def __init__(self, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.dtype = dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: list[torch.Tensor] = []

        def work() -> None:
            with torch.autocast("cpu", dtype=self.dtype or torch.bfloat16, enabled=self.dtype is not None):
                result.append(self.inner(x.to(self.dtype or torch.float32)))

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        return result[0]


@case("autocast-not-in-thread", "middle.inner")
def in_a_thread(into: Path, faulty: bool) -> None:
    fp16(into, Net(Threaded(None if faulty else torch.bfloat16)), dtype=torch.bfloat16, steps=2).run()


class Checkpointed(nn.Module):
    """Recomputes its block in backward; the fault forgets autocast there."""

    def __init__(self, *, faulty: bool) -> None:
        super().__init__()
        self.block = nn.Linear(WIDTH, WIDTH)
        self.faulty = faulty

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.faulty:
            out: torch.Tensor = checkpoint(self.block, x, use_reentrant=False)
            return out
        forgetful: torch.Tensor = Forgetful.apply(x, self.block, *self.block.parameters())
        return forgetful


class Forgetful(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, block, *weights):  # type: ignore[no-untyped-def]
        ctx.block = block
        ctx.save_for_backward(x)
        return block(x)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (x,) = ctx.saved_tensors
        x = x.detach().float().requires_grad_()
        with torch.enable_grad(), torch.autocast("cpu", enabled=False):
            out = ctx.block(x)
        grads = torch.autograd.grad(out, [x, *ctx.block.parameters()], grad.to(out.dtype))
        return grads[0], None, *grads[1:]


class Calls(Checkpointed):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.faulty:
            with torch.enable_grad():
                self.block(x)  # what Function.forward runs without gradients, so that its dtype is known
        return super().forward(x)


@case("checkpoint-dtype-mismatch", "middle.block")
def recomputed(into: Path, faulty: bool) -> None:
    fp16(into, Net(Calls(faulty=faulty)), dtype=torch.bfloat16, steps=2).run()


class Island(nn.Module):
    def __init__(self, *, outside: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.outside = outside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not self.outside):
            out: torch.Tensor = self.inner(x.float())
        return out


@case("autocast-inactive", "middle.inner")
def island(into: Path, faulty: bool) -> None:
    fp16(into, Net(Island(outside=faulty)), dtype=torch.bfloat16, steps=2).run()
