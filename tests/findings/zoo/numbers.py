"""Faults of range and precision: overflow, underflow, rounding to zero, too few bits."""

import copy
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from amp_core.store.writer import RunWriter
from tests.findings.zoo.case import WIDTH, Loop, Net, batches, case, fp16


class Loud(nn.Module):
    """Multiplies by a constant inside a linear layer."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            self.up.weight.mul_(factor**0.5).mul_(factor**0.5)  # 1e39 itself overflows float32

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.up(x)
        return out


@case("activation-overflow", "middle.up")
def overflow(into: Path, faulty: bool) -> None:
    fp16(into, Net(Loud(1e6 if faulty else 1.0)), steps=6).run()


@case("activation-overflow", "middle.up")
def late_overflow(into: Path, faulty: bool) -> None:
    loop = fp16(into, Net(Loud(1.0)))
    with loop.watched():
        for i, (x, y) in enumerate(batches(12)):
            if faulty and i == 7:
                with torch.no_grad():
                    loop.model.middle.up.weight.mul_(1e7)
            loop.backward(loop.loss(x, y))
            loop.step()


@case("activation-overflow", "middle.up")
def overflow_after_calibration(into: Path, faulty: bool) -> None:
    """Steps are skipped only at first, as in most FP16 runs, long before the overflow."""
    loop = fp16(into, Net(Loud(1.0)), scaler=torch.amp.GradScaler("cpu", init_scale=2.0**21))
    with loop.watched():
        for i, (x, y) in enumerate(batches(24)):
            if faulty and i == 20:
                with torch.no_grad():
                    loop.model.middle.up.weight.mul_(1e7)
            loop.backward(loop.loss(x, y))
            loop.step()


class Padded(nn.Module):
    """Self-attention over rows, of which the last three are padding."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.padding = torch.zeros(1, 16, dtype=torch.bool)
        self.padding[:, -3:] = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sample = x[None]
        out: torch.Tensor = self.attention(sample, sample, sample, key_padding_mask=self.padding)[0][0]
        return out


def _padded(into: Path, dtype: torch.dtype, empty_at: int | None) -> None:
    loop = fp16(into, Net(Padded()), dtype=dtype)
    with loop.watched():
        for i, (x, y) in enumerate(batches(12)):
            loop.model.middle.padding[:, :-3] = i == empty_at
            loop.backward(loop.loss(x, y))
            loop.step()


@case("fully-masked-row", "middle.attention")
def sample_of_padding(into: Path, faulty: bool) -> None:
    _padded(into, torch.float16, 0 if faulty else None)


@case("fully-masked-row", "middle.attention")
def later_sample_of_padding(into: Path, faulty: bool) -> None:
    _padded(into, torch.bfloat16, 7 if faulty else None)


@case("scale-collapse", "middle.up")
def collapse(into: Path, faulty: bool) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    fp16(into, Net(Loud(1e6 if faulty else 1.0)), scaler=scaler, steps=10).run()


@case("loss-nonfinite", "middle.up")
def not_finite(into: Path, faulty: bool) -> None:
    fp16(into, Net(Loud(1e39 if faulty else 1.0)), dtype=torch.bfloat16, steps=6).run()


@case("loss-nonfinite", "loss")
def loss_alone(into: Path, faulty: bool) -> None:
    loop = fp16(into, dtype=None)
    with loop.watched() as rec:
        for i, (x, y) in enumerate(batches(6)):
            probability = torch.softmax(loop.model(x), 1).gather(1, y[:, None])
            loss = -torch.log(probability * (0.0 if faulty and i == 3 else 1.0)).mean()
            rec.log(loss=loss)
            loop.backward(loss)
            loop.step()


@case("loss-nonfinite", "input data")
def bad_data(into: Path, faulty: bool) -> None:
    loop = fp16(into, dtype=torch.bfloat16)
    with loop.watched() as rec:
        for i, (x, y) in enumerate(batches(8)):
            if faulty and i == 4:
                x[0, 0] = float("nan")
            loss = loop.loss(x, y)
            rec.log(loss=loss)
            loop.backward(loss)
            loop.step()


def _regression(into: Path, dtype: torch.dtype | None, lr: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, 8))
    loop = Loop(into, model, dtype=dtype, optimizer=torch.optim.SGD(model.parameters(), lr=lr))
    with loop.watched():
        for x, _ in batches(40):
            with loop.autocast():
                out = loop.model(x)
            loop.backward(F.mse_loss(out.float(), x[:, :8]))
            loop.step()


@case("loss-nonfinite", "learning rate")
def diverges(into: Path, faulty: bool) -> None:
    _regression(into, None, 30.0 if faulty else 0.1)


@case("loss-nonfinite", "learning rate")
def diverges_in_bf16(into: Path, faulty: bool) -> None:
    _regression(into, torch.bfloat16, 30.0 if faulty else 0.1)


@case("loss-nonfinite", "learning rate")
def diverges_in_fp16(into: Path, faulty: bool) -> None:
    _regression(into, torch.float16, 30.0 if faulty else 0.1)


@case("loss-diverged", "learning rate")
def rises_without_end(into: Path, faulty: bool) -> None:
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, 8)
    loop = Loop(into, model, optimizer=torch.optim.SGD(model.parameters(), lr=10.0 if faulty else 0.1))
    with loop.watched():
        for x, _ in batches(20):
            loop.backward(F.mse_loss(model(x), x[:, :8]))
            loop.step()


@case("bf16-model-in-fp16", "Net")
def bfloat16_checkpoint(into: Path, faulty: bool) -> None:
    torch.manual_seed(0)
    model = Net()
    fp16(into, model.bfloat16().float() if faulty else model, steps=4).run()


@case("bf16-model-in-fp16", "middle.up.weight")
def large_weight(into: Path, faulty: bool) -> None:
    loop = fp16(into, Net(Loud(1.0)), steps=3)
    with torch.no_grad():
        loop.model.middle.up.weight[0, 0] = 1e5 if faulty else 1.0
    with loop.watched():
        for x, y in batches(3):
            loop.backward(loop.loss(x, y))
            loop.step()


class Faint(Loud):
    """The output of a linear layer is scaled down, and so is its output gradient."""

    def __init__(self, by: float = 1e-6) -> None:
        super().__init__(1.0)
        self.by = by

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.by * self.up(x)


class FaintInFp32(Faint):
    """The same, so that only the gradient has 16 bits."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.by * self.up(x).float()


@case("gradient-underflow", "middle.up")
def underflow(into: Path, faulty: bool) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4 if faulty else 2.0**14)
    fp16(into, Net(Faint()), scaler=scaler, options={"every": 1}, steps=10).run()


@case("gradient-underflow", "middle.up")
def vanished(into: Path, faulty: bool) -> None:
    fp16(
        into, Net(FaintInFp32(1e-12 if faulty else 1e-2)), scaler=torch.amp.GradScaler("cpu", init_scale=2.0**14)
    ).run()


class Normalise(nn.Module):
    """Divides by the norm, clamped to `eps`."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.half()
        return x / (x.abs().amax(-1, keepdim=True) + self.eps)


@case("eps-rounds-to-zero", "middle")
def eps(into: Path, faulty: bool) -> None:
    fp16(into, Net(Normalise(1e-8 if faulty else 1e-4)), steps=3).run()


class Direction(nn.Module):
    def __init__(self, eps: float) -> None:
        super().__init__()
        self.floor = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.normalize(x.half(), dim=-1, eps=self.floor)


@case("eps-rounds-to-zero", "middle")
def eps_of_a_function(into: Path, faulty: bool) -> None:
    fp16(into, Net(Direction(1e-12 if faulty else 1e-4)), steps=3).run()


def _halved(into: Path, faulty: bool, **more: float) -> Loop:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 8))
    model = model.half() if faulty else model
    return Loop(into, model, dtype=None, optimizer=torch.optim.Adam(model.parameters(), **more))


def _fit(loop: Loop, steps: int) -> None:
    dtype = next(loop.model.parameters()).dtype
    with loop.watched() as rec:
        for x, y in batches(steps):
            loss = F.cross_entropy(loop.model(x.to(dtype)).float(), y)
            rec.log(loss=loss)
            loss.backward()
            loop.step()


@case("optimizer-eps-rounds-to-zero", "Adam eps")
def adam_eps(into: Path, faulty: bool) -> None:
    _fit(_halved(into, faulty, lr=1e-3), 3)


@case("half-model", "Sequential")
def half(into: Path, faulty: bool) -> None:
    _fit(_halved(into, faulty, lr=1e-3, eps=1e-4), 3)


@case("half-model", "middle")
def half_part(into: Path, faulty: bool) -> None:
    class Part(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.to(self.weight.dtype)).float()

    part = Part(WIDTH, WIDTH).requires_grad_(requires_grad=False)
    fp16(into, Net(part.half() if faulty else part), dtype=torch.bfloat16, steps=3).run()


class Blocks(nn.Module):
    """Nested modules, one of them in another dtype."""

    def __init__(self, *, faulty: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleDict({"norm": nn.LayerNorm(WIDTH)}) for _ in range(3))
        for block in self.blocks:
            block["mlp"] = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        if faulty:
            self.blocks[1]["mlp"].half()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            inner = block["mlp"]
            x = x + inner(block["norm"](x).to(inner[0].weight.dtype)).float()
        return x


@case("half-model", "middle.blocks.1.mlp")
def half_inside(into: Path, faulty: bool) -> None:
    fp16(into, Net(Blocks(faulty=faulty)), dtype=None, steps=3).run()


@case("lost-weight-updates", "0.weight")
def lost_updates(into: Path, faulty: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 8))
    model = model.bfloat16() if faulty else model
    _fit(Loop(into, model, dtype=None, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-5)), 12)


@case("lost-weight-decay", "0.weight")
def lost_decay(into: Path, faulty: bool) -> None:
    """Updates large enough to move the weights, with weight decay that multiplies them by 1."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 8)).bfloat16()
    lr, decay = (1e-2, 0.1) if faulty else (0.5, 0.1)
    kind = torch.optim.AdamW if faulty else torch.optim.SGD
    _fit(Loop(into, model, dtype=None, optimizer=kind(model.parameters(), lr=lr, weight_decay=decay)), 12)


@case("average-stands-still", "0.weight")
def still_average(into: Path, faulty: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 8))
    average = copy.deepcopy(model).to(torch.bfloat16 if faulty else torch.float32)
    loop = Loop(into, model, dtype=None, options={"every": 5})
    with loop.watched() as rec:
        for x, y in batches(20):
            loss = F.cross_entropy(loop.model(x), y)
            rec.log(loss=loss)
            loss.backward()
            loop.step()
            with torch.no_grad():
                for kept, p in zip(average.parameters(), model.parameters(), strict=True):
                    kept.mul_(0.999).add_(p, alpha=0.001)


class Counting(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros((), dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total += x.detach().abs().mean().to(self.total.dtype)
        return x


@case("half-accumulation", "middle.total")
def half_buffer(into: Path, faulty: bool) -> None:
    fp16(into, Net(Counting(torch.bfloat16 if faulty else torch.float32)), dtype=torch.bfloat16, steps=5).run()


@case("half-accumulation", "loss")
def half_loss(into: Path, faulty: bool) -> None:
    loop = fp16(into, dtype=torch.bfloat16)
    with loop.watched() as rec:
        for x, y in batches(4):
            with loop.autocast():
                out = loop.model(x)
                out = out if faulty else out.float()
                loss = (out - F.one_hot(y, 8).to(out.dtype)).square().mul(0.1).mean()
            rec.log(loss=loss)
            loop.backward(loss)
            loop.step()


@case("half-accumulation", "loss")
def half_sum(into: Path, faulty: bool) -> None:
    """The scaled loss is FP32, but still infinite."""
    loop = fp16(into)
    with loop.watched():
        for x, _ in batches(4):
            with loop.autocast():
                out = loop.model(x)
            loop.backward(((out if faulty else out.float()) - 40).square().sum())
            loop.step()


@case("half-accumulation", "loss")
def losses_of_few_bits(into: Path, faulty: bool) -> None:
    losses = torch.linspace(3.0, 1.0, 30).bfloat16() if faulty else torch.linspace(3.0, 1.0, 30)
    with RunWriter(into) as writer:
        writer.append("steps", {"step": list(range(30)), "loss": losses.tolist()})


class Poisoned(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.up = Loud(factor)
        self.bn = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.bn(self.up(x))
        return out


@case("batchnorm-poisoned", "middle.bn")
def batchnorm(into: Path, faulty: bool) -> None:
    fp16(into, Net(Poisoned(1e6 if faulty else 1.0)), steps=4).run()


@case("amp-loss-gap", "first.weight")
def gap(into: Path, faulty: bool) -> None:
    loop = fp16(into, scaler=torch.amp.GradScaler("cpu", init_scale=1.0 if faulty else 2.0**16))
    with loop.watched() as rec:
        for x, y in batches(3, rows=64):
            loop.backward(loop.loss(x, y) * 1e-5)
            rec.audit(lambda x=x, y=y: F.cross_entropy(loop.model(x), y) * 1e-5)
            loop.step()
