"""Launches and dispatched operators that recording adds to a step on a GPU.

All of the product's code runs but the kernels themselves, which `tests/record/stats/cuda` runs on the host: here their
launches are only counted, and results stay zero.
"""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from amp_core import load_run
from amp_core.record import watch
from amp_core.record.backends.cuda import Cuda
from amp_core.record.observers.signals import nonfinite_outputs, state
from amp_core.record.stats.cuda import program
from amp_core.record.stats.cuda.table import Table
from tests.fake_cuda import tensors

KERNELS = Cuda.kernels
MODULES, TENSORS, EVERY, STEPS = 76, 304, 6, 8
MAX_SAMPLED, MAX_OTHERS, MAX_FIRST, MAX_OPERATORS = 12, 8, 40, 150
"""Limits: launches of a sampled step, of another one, and of the first, with copies and fills, however many parameters
there are; dispatched operators. Once, each softmax that the model calls itself adds six, for its masked rows."""


class Scaled(nn.Linear):
    """A module with four parameters."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.factor, self.offset = nn.Parameter(torch.ones(8)), nn.Parameter(torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.factor + self.offset


class Mixed(nn.Module):
    """Convolutions and linear layers, normalization, and a head without autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()),
            *(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(128, 8), nn.LayerNorm(8)),
        )
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = self.body(x.view(-1, 1, 4, 8))
        with torch.autocast("cuda", enabled=False):
            return self.head(features.float())


def layers(modules: int) -> nn.Module:
    return nn.Sequential(*(Scaled() for _ in range(modules)))


class Operators(TorchDispatchMode):
    """Counts the operators of this thread."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[op._schema.name] += 1
        return op(*args, **(kwargs or {}))


def steps(
    make: Callable[[], nn.Module], number: int, into: Path | None = None
) -> list[tuple[Counter[str], Counter[str]]]:
    """Launches and operators of each step."""
    torch.manual_seed(0)
    model = make().to("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda", init_scale=128.0)
    data = torch.randn(4, 32 if isinstance(model, Mixed) else 8).to("cuda")
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


@pytest.fixture(autouse=True)
def _counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(device: torch.device, form: str, name: str, table: Table, results: torch.Tensor) -> None:
        tensors.launches[f"kernel {name}"] += 1

    monkeypatch.setattr(Cuda, "kernels", staticmethod(KERNELS))
    monkeypatch.setattr(program, "launch", launch)
    for checked in (nonfinite_outputs, state):  # as often as steps are sampled, as at the default settings
        monkeypatch.setattr(checked, "EVERY", EVERY)


def added(make: Callable[[], nn.Module], into: Path) -> list[tuple[Counter[str], Counter[str]]]:
    """Launches and operators that watching adds to each step."""
    (first, bare), watched = steps(make, 2), steps(make, STEPS, into)
    alone = [first, *[bare] * (STEPS - 1)]
    return [(launches - one[0], operators - one[1]) for (launches, operators), one in zip(watched, alone, strict=True)]


def assert_few_launches(counted: list[tuple[Counter[str], Counter[str]]]) -> None:
    assert "kernel largest" in counted[1][0] and "kernel largest" not in counted[-1][0]
    assert {"kernel largest", "kernel measure"} <= counted[EVERY][0].keys()
    for step, (launches, _) in enumerate(counted):
        limit = MAX_SAMPLED if step % EVERY == 0 else MAX_OTHERS
        assert launches.total() <= (limit if step else MAX_FIRST), (step, launches)


def test_a_step_has_few_launches_and_operators_more_than_unwatched(tmp_path: Path) -> None:
    counted = added(lambda: layers(MODULES), tmp_path / "run")
    assert_few_launches(counted)
    for _, operators in (counted[EVERY], counted[-1]):
        # The fake tensors are a subclass, whose gradients torch detaches.
        assert operators.total() - TENSORS <= MAX_OPERATORS, operators
    run = load_run(tmp_path / "run")
    sampled = len(range(0, STEPS, EVERY))
    kinds = {"weight_grad": sampled * TENSORS, "output_grad": sampled * MODULES}
    assert run.tensors()["kind"].value_counts().to_dict() == kinds


@pytest.mark.parametrize("make", [Mixed, lambda: layers(3)], ids=["mixed", "small"])
def test_no_layer_or_dtype_has_launches_of_its_own(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    counted = added(make, tmp_path / "run")
    assert_few_launches(counted)
    assert counted[EVERY][0]["kernel channels"] == 1
    assert ("kernel largest" in counted[EVERY // 2][0]) == (make is Mixed)  # of running statistics
