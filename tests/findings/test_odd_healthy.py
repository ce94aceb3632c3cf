"""Healthy trainings that look odd have no warnings, and a divergence is not blamed on the precision."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from amp_core import load_run
from amp_core.findings import Finding, diagnose
from tests.findings.zoo.case import WIDTH, Loop, Net, batches

DTYPES = [None, torch.bfloat16, torch.float16]
ODD: list[Callable[[Loop], None]] = []


def odd(train: Callable[[Loop], None]) -> Callable[[Loop], None]:
    ODD.append(train)
    return train


def warnings_of(folder: Path) -> list[Finding]:
    return [f for f in diagnose(load_run(folder)) if f.severity != "info"]


@odd
def very_sparse_gradients(loop: Loop) -> None:
    """Each batch uses a few rows of a large embedding."""
    loop.model = nn.Sequential(nn.EmbeddingBag(20_000, WIDTH), nn.Linear(WIDTH, 8))
    loop.optimizer = torch.optim.AdamW(loop.model.parameters(), lr=1e-3)
    with loop.watched():
        for x, y in batches(12):
            loop.backward(loop.loss((x[:, :4].abs() * 5_000).long(), y))
            loop.step()


@odd
def frozen_layers(loop: Loop) -> None:
    loop.model.first.requires_grad_(requires_grad=False)
    loop.optimizer = torch.optim.AdamW([p for p in loop.model.parameters() if p.requires_grad], lr=1e-3)
    loop.run()


@odd
def freezing_in_mid_run(loop: Loop) -> None:
    with loop.watched():
        for i, (x, y) in enumerate(batches(24)):
            if i == 12:
                loop.model.first.requires_grad_(requires_grad=False)
            loop.backward(loop.loss(x, y))
            loop.step()


@odd
def warm_up_from_zero(loop: Loop) -> None:
    schedule = torch.optim.lr_scheduler.LambdaLR(loop.optimizer, lambda step: step / 10)
    with loop.watched():
        for x, y in batches(16):
            loop.backward(loop.loss(x, y))
            loop.step()
            schedule.step()


@odd
def sharpness_aware_minimisation(loop: Loop) -> None:
    """Two backward passes for each step, the second at perturbed weights; unscaled by hand in FP16."""
    with loop.watched():
        for x, y in batches(12):
            loop.backward(loop.loss(x, y))
            scale = loop.scaler.get_scale() if loop.scaler is not None else 1.0
            grads = [p.grad / scale for p in loop.model.parameters()]
            norm = torch.stack([g.norm() for g in grads]).norm() + 1e-12
            moves = [0.05 * g / norm for g in grads]
            loop.optimizer.zero_grad()
            with torch.no_grad():
                for p, move in zip(loop.model.parameters(), moves, strict=True):
                    p.add_(move)
            loop.backward(loop.loss(x, y))
            with torch.no_grad():
                for p, move in zip(loop.model.parameters(), moves, strict=True):
                    p.sub_(move)
            loop.step()


@odd
def whole_data_at_a_low_rate(loop: Loop) -> None:
    """Each step has the same batch, so all gradients have about the same norm; they are clipped once unscaled."""
    loop.optimizer = torch.optim.AdamW(loop.model.parameters(), lr=2e-5)
    (x, y), *_ = batches(1)
    with loop.watched():
        for _ in range(12):
            loop.backward(loop.loss(x, y))
            if loop.scaler is not None:
                loop.scaler.unscale_(loop.optimizer)
            nn.utils.clip_grad_norm_(loop.model.parameters(), 1.0)
            loop.step()


@odd
def gradient_penalty(loop: Loop) -> None:
    loop.model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 8))
    loop.optimizer = torch.optim.AdamW(loop.model.parameters(), lr=1e-3)
    with loop.watched():
        for x, y in batches(8):
            x.requires_grad_()
            loss = loop.loss(x, y)
            scaled = loop.scaler.scale(loss) if loop.scaler is not None else loss
            (grad,) = torch.autograd.grad(scaled, x, create_graph=True)
            grad = grad / (loop.scaler.get_scale() if loop.scaler is not None else 1.0)
            loop.backward(loss + 1e-3 * grad.square().sum())
            loop.step()


@odd
def two_losses_each_scaled(loop: Loop) -> None:
    with loop.watched():
        for x, y in batches(8):
            with loop.autocast():
                out = loop.model(x)
                first, second = F.cross_entropy(out, y), 1e-3 * out.float().square().mean()
            scaled = [loop.scaler.scale(term) if loop.scaler is not None else term for term in (first, second)]
            scaled[0].backward(retain_graph=True)
            (scaled[1] / 2).backward()
            loop.step()


@odd
def accumulation_of_uneven_length(loop: Loop) -> None:
    with loop.watched():
        for i, (x, y) in enumerate(batches(24)):
            loop.backward(loop.loss(x, y) / 4)
            if i in (1, 5, 6, 10, 13, 17, 23):
                loop.step()


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("train", ODD, ids=lambda f: f.__name__)
def test_an_odd_but_healthy_training_has_no_warnings(
    train: Callable[[Loop], None], dtype: torch.dtype | None, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    train(Loop(tmp_path / "run", Net(), dtype=dtype))
    assert not warnings_of(tmp_path / "run")


class Recurrence(nn.Module):
    """A linear recurrence whose state grows with each of its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, 8)
        nn.init.eye_(self.cell.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(24):
            x = self.cell(x)
        out: torch.Tensor = self.head(x)
        return out


def too_high_a_rate(loop: Loop) -> None:
    loop.model = nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, 8))
    loop.optimizer = torch.optim.SGD(loop.model.parameters(), lr=30.0)
    _regress(loop)


def exploding_recurrence(loop: Loop) -> None:
    loop.model = Recurrence()
    loop.optimizer = torch.optim.SGD(loop.model.parameters(), lr=0.05)
    _regress(loop)


def broken_batch(loop: Loop) -> None:
    with loop.watched():
        for i, (x, y) in enumerate(batches(12)):
            if i == 6:
                x[0, 0] = math.inf
            loop.backward(loop.loss(x, y))
            loop.step()


def _regress(loop: Loop) -> None:
    with loop.watched():
        for x, _ in batches(40):
            with loop.autocast():
                out = loop.model(x)
            loop.backward(F.mse_loss(out.float(), x[:, :8]))
            loop.step()


OF_PRECISION = ("activation-overflow", "bf16-model-in-fp16", "half-model", "gradient-underflow", "half-accumulation")


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("train", [too_high_a_rate, exploding_recurrence, broken_batch], ids=lambda f: f.__name__)
def test_a_divergence_is_not_blamed_on_the_precision(
    train: Callable[[Loop], None], dtype: torch.dtype | None, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    train(Loop(tmp_path / "run", Net(), dtype=dtype))
    for finding in warnings_of(tmp_path / "run"):
        assert finding.code not in OF_PRECISION, finding
        assert finding.code not in ("loss-nonfinite", "scale-collapse") or finding.where in (
            "learning rate",
            "input data",
        ), finding
