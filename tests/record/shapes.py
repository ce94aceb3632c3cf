"""Loops of many shapes, each a function of a `Lap`, which is watched or unwatched: tests compare the two.

lap = go(LOOPS["gan"], tmp_path / "run", torch.float16)
lap.losses, load_run(tmp_path / "run").steps
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from amp_core.record import Recorder, watch
from tests.record.loops import small_model

STEPS = 14
EVERY = 3


@dataclass
class Lap:
    """One run of a loop."""

    into: Path | None
    dtype: torch.dtype | None
    losses: list[float] = field(default_factory=list)
    rec: Recorder | None = None
    scaler: Any = None
    model: nn.Module | None = None

    def watch(self, model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
        self.model = model
        if self.dtype == torch.float16:
            self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=100)
        if self.into is not None:
            given = list(optimizers) if len(optimizers) > 1 else optimizers[0]
            self.rec = watch(model, given, scaler=self.scaler, into=self.into, every=EVERY)

    def autocast(self) -> Any:
        return torch.autocast("cpu", dtype=self.dtype or torch.bfloat16, enabled=self.dtype is not None)

    def backward(self, loss: torch.Tensor, **more: Any) -> None:
        (self.scaler.scale(loss) if self.scaler else loss).backward(**more)

    def step(self, *optimizers: torch.optim.Optimizer, update: bool = True) -> None:
        for optimizer in optimizers:
            self.scaler.step(optimizer) if self.scaler else optimizer.step()
        if self.scaler and update:
            self.scaler.update()


def batches(steps: int = STEPS, rows: int = 8) -> Any:
    g = torch.Generator().manual_seed(1)
    for _ in range(steps):
        yield torch.randn(rows, 24, generator=g), torch.randint(0, 10, (rows,), generator=g)


def adam(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam([p for p in module.parameters() if p.requires_grad], lr=1e-3)


def classify(lap: Lap, model: nn.Module, forward: Callable[..., torch.Tensor] | None = None, **zero: Any) -> None:
    """The usual loop around any model."""
    optimizer = adam(model)
    lap.watch(model, optimizer)
    for x, y in batches():
        with lap.autocast():
            loss = F.cross_entropy((forward or model)(x).float(), y)
        lap.backward(loss)
        lap.step(optimizer)
        optimizer.zero_grad(**zero)
        lap.losses.append(loss.item())


def gan(lap: Lap) -> None:
    both = nn.ModuleDict({"g": nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 24)), "d": nn.Linear(24, 1)})
    g, d = adam(both["g"]), adam(both["d"])
    lap.watch(both, d, g)
    for real, _ in batches():
        z = torch.randn(len(real), 8)
        with lap.autocast():
            fake = both["g"](z)
            of_d = F.softplus(-both["d"](real).float()).mean() + F.softplus(both["d"](fake.detach()).float()).mean()
        d.zero_grad()
        lap.backward(of_d)
        lap.step(d, update=False)
        with lap.autocast():
            of_g = F.softplus(-both["d"](fake).float()).mean()
        g.zero_grad()
        lap.backward(of_g)
        lap.step(g)
        lap.losses += [of_d.item(), of_g.item()]


def accumulation(lap: Lap) -> None:
    model = small_model()
    optimizer = adam(model)
    lap.watch(model, optimizer)
    for number, (x, y) in enumerate(batches(STEPS * 3)):
        with lap.autocast():
            loss = F.cross_entropy(model(x).float(), y) / 3
        lap.backward(loss)
        lap.losses.append(loss.item())
        if number % 3 == 2:
            if lap.scaler:
                lap.scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            lap.step(optimizer)
            optimizer.zero_grad()


def lbfgs(lap: Lap) -> None:
    model = nn.Sequential(nn.Linear(24, 10))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    lap.watch(model, optimizer)
    for x, y in batches():

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            optimizer.zero_grad()
            with lap.autocast():
                loss = F.cross_entropy(model(x).float(), y)
            loss.backward()
            return loss

        lap.losses.append(float(optimizer.step(closure)))


def gradient_penalty(lap: Lap) -> None:
    model = nn.Sequential(nn.Linear(24, 32), nn.Softplus(), nn.Linear(32, 1))
    optimizer = adam(model)
    lap.watch(model, optimizer)
    for x, _ in batches():
        x.requires_grad_()
        with lap.autocast():
            out = model(x).float().mean()
        scale = lap.scaler.get_scale() if lap.scaler else 1.0
        (grad,) = torch.autograd.grad(out * scale, x, create_graph=True)
        with lap.autocast():
            loss = out + 10 * ((grad.float() / scale).norm(dim=1) - 1).square().mean()
        lap.backward(loss)
        lap.step(optimizer)
        optimizer.zero_grad()
        lap.losses.append(loss.item())


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool):
        super().__init__()
        self.first, self.body, self.last = nn.Linear(24, 24), small_model(), nn.Linear(10, 10)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(checkpoint(self.body, self.first(x), use_reentrant=self.reentrant))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.body = nn.Embedding(24, 16), nn.Linear(16, 16)
        self.out = nn.Linear(16, 24, bias=False)
        self.out.weight = self.words.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.body(self.words(x.argsort(1)).mean(1)))


class Lora(nn.Module):
    def __init__(self, sized: int = 24) -> None:
        super().__init__()
        self.base = nn.Linear(sized, 10).requires_grad_(False)
        self.a, self.b = nn.Linear(sized, 4, bias=False), nn.Linear(4, 10, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.b(self.a(x))


def ema(lap: Lap) -> None:
    model = small_model()
    mean = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    optimizer = adam(model)
    lap.watch(model, optimizer)
    for x, y in batches():
        with lap.autocast():
            loss = F.cross_entropy(model(x).float(), y)
        lap.backward(loss)
        lap.step(optimizer)
        optimizer.zero_grad()
        mean.update_parameters(model)
        with torch.no_grad(), lap.autocast():
            lap.losses += [loss.item(), F.cross_entropy(mean(x).float(), y).item()]


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.GRU(4, 16, batch_first=True), nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        lengths = torch.tensor([6, 3, 5, 6, 1, 2, 4, 6])
        rows = nn.utils.rnn.pack_padded_sequence(x.view(8, 6, 4), lengths, batch_first=True, enforce_sorted=False)
        return self.out(self.rnn(rows)[1][0])


def sparse(lap: Lap) -> None:
    model = nn.Sequential(nn.EmbeddingBag(50, 10, sparse=True, mode="sum"))
    optimizer = torch.optim.SparseAdam(model.parameters(), lr=1e-2)
    # A scaler does not accept the sparse gradients of SparseAdam.
    lap.dtype = torch.bfloat16 if lap.dtype is not None else None
    lap.watch(model, optimizer)
    for x, y in batches():
        with lap.autocast():
            loss = F.cross_entropy(model((x.abs() * 10).long().clamp(max=49)), y)
        loss.backward()
        lap.step(optimizer)
        optimizer.zero_grad()
        lap.losses.append(loss.item())


@dataclass
class Answer:
    scores: torch.Tensor
    hidden: list[torch.Tensor]


class Answers(nn.Module):
    def __init__(self, as_dict: bool) -> None:
        super().__init__()
        self.body, self.as_dict = small_model(), as_dict

    def forward(self, *, x: torch.Tensor) -> Any:
        found = self.body(x)
        return {"scores": found, "hidden": [x]} if self.as_dict else Answer(found, [x])


def parameters_later(lap: Lap) -> None:
    model = nn.Sequential(nn.Linear(24, 16), nn.ReLU())
    head = nn.Linear(16, 10)
    optimizer = adam(model)
    lap.watch(model, optimizer)
    for number, (x, y) in enumerate(batches()):
        if number == 5:
            model.append(head)
            optimizer.add_param_group({"params": head.parameters()})
        with lap.autocast():
            h = model(x)
            loss = F.cross_entropy((h if number >= 5 else head(h)).float(), y)
        lap.backward(loss)
        lap.step(optimizer)
        optimizer.zero_grad()
        head.zero_grad()
        lap.losses.append(loss.item())


LOOPS: dict[str, Callable[[Lap], None]] = {
    "gan": gan,
    "accumulation": accumulation,
    "lbfgs": lbfgs,
    "gradient-penalty": gradient_penalty,
    "checkpoint": lambda lap: classify(lap, Checkpointed(reentrant=False)),
    "checkpoint-reentrant": lambda lap: classify(lap, Checkpointed(reentrant=True)),
    "tied": lambda lap: classify(lap, Tied(), lambda x: lap.model(x)[:, :10]),
    "lora": lambda lap: classify(lap, Lora()),
    "ema": ema,
    "packed-rnn": lambda lap: classify(lap, Packed(), lambda x: lap.model(torch.cat([x], 1))),
    "sparse": sparse,
    "dict": lambda lap: classify(lap, Answers(True), lambda x: lap.model(x=x)["scores"]),
    "dataclass": lambda lap: classify(lap, Answers(False), lambda x: lap.model(x=x).scores),
    "parameters-later": parameters_later,
    "zero-to-none": lambda lap: classify(lap, small_model(), set_to_none=True),
    "zero-to-zero": lambda lap: classify(lap, small_model(), set_to_none=False),
}


def go(loop: Callable[[Lap], None], into: Path | None, dtype: torch.dtype | None) -> Lap:
    torch.manual_seed(0)
    lap = Lap(into, dtype)
    loop(lap)
    if lap.rec is not None:
        lap.rec.close()
    return lap
