"""Faults of operators in 16 bits: large vocabularies, routers, statistics, sums, positions."""

from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from tests.findings.zoo.case import WIDTH, Loop, Net, batches, case, fp16

VOCABULARY = 32_000


class Head(nn.Module):
    """A language model of an embedding and a tied head, with its loss."""

    def __init__(self, spelling: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.spelling = spelling

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = F.linear(self.embedding(tokens), self.embedding.weight)[:-1]
        if "wide" in self.spelling:
            logits = logits.float()
        if "logsumexp" in self.spelling:
            chosen = logits.gather(1, tokens[1:, None])[:, 0]
            return (logits.logsumexp(1) - chosen).float().mean()
        with torch.autocast("cpu", enabled=False):  # which would run it in float32
            return F.cross_entropy(logits, tokens[1:]).float()


def _language(into: Path, spelling: str) -> None:
    torch.manual_seed(0)
    model = Head(spelling)
    loop = Loop(into, model, dtype=torch.bfloat16, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    with loop.watched():
        for _ in range(3):
            tokens = torch.randint(VOCABULARY, (24,))
            with loop.autocast():
                loss = model(tokens)
            loss.backward()
            loop.step()


@case("half-logits", "")
def cross_entropy(into: Path, faulty: bool) -> None:
    _language(into, "narrow" if faulty else "wide")


@case("half-logits", "")
def logsumexp(into: Path, faulty: bool) -> None:
    _language(into, "narrow logsumexp" if faulty else "wide logsumexp")


@case("rounded-probabilities", "loss")
def binary_cross_entropy_of_probabilities(into: Path, faulty: bool) -> None:
    loop = fp16(into, Net(), dtype=torch.bfloat16)
    with loop.watched():
        for x, y in batches(3):
            with loop.autocast():
                logits = loop.model(x)
            probabilities = (logits if faulty else logits.float()).sigmoid().float()
            F.binary_cross_entropy(probabilities, F.one_hot(y, 8).float()).backward()
            loop.step()


class Experts(nn.Module):
    def __init__(self, *, faulty: bool, top: int) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 8)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))
        self.faulty, self.top = faulty, top

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.faulty):
            scores = self.gate(x if self.faulty else x.float()).softmax(-1)
        if self.top == 1:
            weights, chosen = (part.unsqueeze(-1) for part in scores.max(-1))
        else:
            weights, chosen = scores.topk(self.top, dim=-1)
        out = torch.stack([expert(x) for expert in self.experts], 1)
        picked = out.gather(1, chosen.unsqueeze(-1).expand(-1, -1, WIDTH))
        return (picked * weights.unsqueeze(-1)).sum(1)


@case("half-router", "middle")
def router_of_two(into: Path, faulty: bool) -> None:
    fp16(into, Net(Experts(faulty=faulty, top=2)), dtype=torch.bfloat16, steps=3).run()


@case("half-router", "middle")
def router_of_one(into: Path, faulty: bool) -> None:
    fp16(into, Net(Experts(faulty=faulty, top=1)), dtype=torch.bfloat16, steps=3).run()


class RootMeanSquare(nn.Module):
    def __init__(self, *, faulty: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.dtype = torch.bfloat16 if faulty else torch.float32

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(self.dtype)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.weight * wide.to(x.dtype)


@case("half-statistics", "middle")
def own_rms_norm(into: Path, faulty: bool) -> None:
    fp16(into, Net(RootMeanSquare(faulty=faulty)), dtype=torch.bfloat16, steps=3).run()


class NormDivided(RootMeanSquare):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(self.dtype)
        wide = wide / (wide.norm(dim=-1, keepdim=True) * WIDTH**-0.5 + 1e-5)
        return self.weight * wide.to(x.dtype)


@case("half-statistics", "middle")
def rms_norm_by_the_norm_of_rows(into: Path, faulty: bool) -> None:
    fp16(into, Net(NormDivided(faulty=faulty)), dtype=torch.bfloat16, steps=3).run()


class Standardised(RootMeanSquare):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(self.dtype)
        centred = wide - wide.mean(-1, keepdim=True)
        out: torch.Tensor = centred / (wide.var(-1, keepdim=True) + 1e-5).sqrt()
        return out.to(x.dtype)


@case("half-statistics", "middle")
def own_layer_norm(into: Path, faulty: bool) -> None:
    fp16(into, Net(Standardised(faulty=faulty)), dtype=torch.bfloat16, steps=3).run()


class Normalised(nn.Module):
    def __init__(self, *, faulty: bool) -> None:
        super().__init__()
        self.bn = nn.BatchNorm1d(WIDTH)
        if faulty:
            self.bn.bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.bn(x.to(self.bn.weight.dtype))
        return out


@case("half-statistics", "middle.bn")
def running_statistics(into: Path, faulty: bool) -> None:
    fp16(into, Net(Normalised(faulty=faulty)), dtype=torch.bfloat16, steps=5).run()


class Summing(nn.Module):
    def __init__(self, *, faulty: bool, spelling: str) -> None:
        super().__init__()
        self.wide = None if faulty else torch.float32
        self.spelling = spelling

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half = x.bfloat16()
        if self.spelling == "sum":
            total = half.expand(512, *half.shape).sum(dtype=self.wide) / 1e6
        elif self.spelling == "cumsum":
            total = half.flatten().cumsum(0, dtype=self.wide)[-1] / 1e6
        else:
            bins = torch.zeros(1, WIDTH, dtype=self.wide or torch.bfloat16)
            index = torch.zeros(320, dtype=torch.long)
            total = bins.index_add(0, index, half[:1].expand(320, -1).to(bins.dtype)).mean() / 1e6
        return x + total.to(x.dtype)


@case("half-sum", "middle")
def long_sum(into: Path, faulty: bool) -> None:
    fp16(into, Net(Summing(faulty=faulty, spelling="sum")), dtype=torch.bfloat16, steps=3).run()


@case("half-sum", "middle")
def cumulative_sum(into: Path, faulty: bool) -> None:
    fp16(into, Net(Summing(faulty=faulty, spelling="cumsum")), dtype=torch.bfloat16, steps=3).run()


@case("half-sum", "middle")
def sum_by_index(into: Path, faulty: bool) -> None:
    fp16(into, Net(Summing(faulty=faulty, spelling="index_add")), dtype=torch.bfloat16, steps=3).run()


class Rotary(nn.Module):
    """Angles from positions: computed in each forward, or from timesteps."""

    def __init__(self, *, faulty: bool, spelling: str) -> None:
        super().__init__()
        self.register_buffer("inverse", 10_000.0 ** -(torch.arange(0, WIDTH, 2) / WIDTH), persistent=False)
        self.dtype = torch.bfloat16 if faulty else torch.float32
        self.spelling = spelling

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.spelling == "timesteps":
            positions = torch.linspace(0, 999, len(x)).long().to(self.dtype)
            angles = torch.outer(positions.float(), self.inverse)
        else:
            positions = torch.arange(500, 500 + len(x)).float()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.dtype == torch.bfloat16):
                angles = positions[:, None] @ self.inverse[None, :]  # a product, which autocast casts
        return x + torch.cat([angles.cos(), angles.sin()], -1).to(x.dtype)


@case("rounded-positions", "middle")
def rotary_angles_under_autocast(into: Path, faulty: bool) -> None:
    fp16(into, Net(Rotary(faulty=faulty, spelling="rotary")), dtype=torch.bfloat16, steps=3).run()


@case("rounded-positions", "middle")
def timesteps(into: Path, faulty: bool) -> None:
    fp16(into, Net(Rotary(faulty=faulty, spelling="timesteps")), dtype=torch.bfloat16, steps=3).run()


class Table(nn.Module):
    def __init__(self, *, faulty: bool) -> None:
        super().__init__()
        positions = torch.arange(512, dtype=torch.bfloat16 if faulty else torch.float32)
        angles = torch.outer(positions.float(), 10_000.0 ** -(torch.arange(0, WIDTH, 2) / WIDTH))
        self.register_buffer("table", torch.cat([angles.cos(), angles.sin()], -1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table[-len(x) :].to(x.dtype)


@case("rounded-positions", "middle.table")
def table_of_rounded_positions(into: Path, faulty: bool) -> None:
    fp16(into, Net(Table(faulty=faulty)), dtype=torch.bfloat16, steps=3).run()


@case("half-learning-rate", "AdamW")
def rate_in_bf16(into: Path, faulty: bool) -> None:
    torch.manual_seed(0)
    model = Net()
    rate = torch.tensor(1e-3, dtype=torch.bfloat16 if faulty else torch.float32)
    loop = Loop(into, model, torch.bfloat16, optimizer=torch.optim.AdamW(model.parameters(), lr=rate, foreach=False))
    with loop.watched():
        for x, y in batches(25):
            loop.loss(x, y).backward()
            loop.step()
            rate.mul_(0.999)
