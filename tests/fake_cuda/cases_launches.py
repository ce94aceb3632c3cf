"""Launches and dispatched operators that recording adds to a step on a GPU.

All of the product's code runs but the kernels themselves, which `tests/record/stats/cuda` runs on the host: here their
launches are only counted, and results stay zero.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from amp_core import load_run
from amp_core.record import watch
from amp_core.record.backends.cuda import Cuda
from amp_core.record.observers.signals import nonfinite_outputs
from amp_core.record.stats.cuda import program
from amp_core.record.stats.cuda.table import Table
from tests.fake_cuda import tensors

KERNELS = Cuda.kernels
MODULES, TENSORS, EVERY, STEPS = 76, 304, 3, 6
MAX_SAMPLED, MAX_OTHERS, MAX_OPERATORS = 12, 8, 150
"""Limits: launches of a sampled step and of another one, with copies and fills; dispatched operators."""


class Scaled(nn.Linear):
    """A module with four parameters."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.factor, self.offset = nn.Parameter(torch.ones(8)), nn.Parameter(torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.factor + self.offset


class Operators(TorchDispatchMode):
    """Counts the operators of this thread."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[op._schema.name] += 1
        return op(*args, **(kwargs or {}))


def steps(number: int, into: Path | None = None) -> list[tuple[Counter[str], Counter[str]]]:
    """Launches and operators of each step."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Scaled() for _ in range(MODULES))).to("cuda")
    assert len(list(model.parameters())) == TENSORS
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda", init_scale=128.0)
    data = torch.randn(4, 8).to("cuda")
    recorder = watch(model, optimizer, scaler=scaler, into=into, every=EVERY) if into else None
    counted = []
    for _ in range(number):
        tensors.launches.clear()
        with Operators() as operators:
            with torch.autocast("cuda", dtype=torch.float16):
                loss = model(data).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        counted.append((Counter(tensors.launches), operators.count))
    if recorder is not None:
        recorder.close()
    return counted


def test_a_step_has_few_launches_and_operators_more_than_unwatched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launch(device: torch.device, form: str, name: str, table: Table, results: torch.Tensor) -> None:
        tensors.launches[f"kernel {name}"] += 1

    monkeypatch.setattr(Cuda, "kernels", staticmethod(KERNELS))
    monkeypatch.setattr(program, "launch", launch)
    monkeypatch.setattr(nonfinite_outputs, "EVERY", EVERY)  # as at the default settings
    (_, bare), watched = steps(2), steps(STEPS, tmp_path / "run")
    added = [(launches - bare[0], operators - bare[1]) for launches, operators in watched]
    assert "kernel largest" in added[1][0] and "kernel largest" not in added[-1][0]
    assert {"kernel largest", "kernel measure"} <= added[EVERY][0].keys()
    for step, (launches, _) in enumerate(added[1:], start=1):
        assert launches.total() <= (MAX_SAMPLED if step % EVERY == 0 else MAX_OTHERS), (step, launches)
    for _, operators in (added[EVERY], added[-1]):
        # The fake tensors are a subclass, whose gradients torch detaches.
        assert operators.total() - TENSORS <= MAX_OPERATORS, operators
    run = load_run(tmp_path / "run")
    sampled = len(range(0, STEPS, EVERY))
    kinds = {"weight_grad": sampled * TENSORS, "output_grad": sampled * MODULES}
    assert run.tensors()["kind"].value_counts().to_dict() == kinds
