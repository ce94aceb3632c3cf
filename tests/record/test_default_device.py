"""A program's default device is where its own tensors are made, not those of watching."""

from pathlib import Path

import pytest
import torch
from torch import nn

from amp_core import load_run
from amp_core.record import watch


def test_watching_on_a_cpu_makes_its_own_tensors_there(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(40, 64), nn.GELU(), nn.Linear(64, 3)), torch.randn(16, 40)
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    with torch.device("meta"), watch(model, optimizer, into=tmp_path / "run", every=2, level="full", blocks=True):
        for _ in range(4):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    run = load_run(tmp_path / "run")
    assert run.steps.loss.tolist() == pytest.approx(losses) and (run.steps.grad_norm > 0).all()
    assert len(run.tensors()) and len(run.blocks) and not (run.events.kind == "warning").any()
