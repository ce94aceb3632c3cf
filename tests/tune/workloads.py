"""Three small workloads whose right recipe is known, and a trainer with controlled speeds.

`healthy` trains in any precision; `tiny_gradients` needs a loss scale in FP16; `large_activations` overflows FP16 and
not BF16. Losses come from real trainings; `Stopwatch` replaces the step times of a small, busy CPU by those of a
device, with random noise from a seed.
"""

import atexit
import dataclasses
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import nn
from torch.nn import functional as F

from amp_core.settings.training import TrainConfig
from amp_core.train import train
from amp_core.train.turns.interleave import Member

HERE = Path(__file__)
_TRAINED: dict[str, tuple[Path, int]] = {}
"""The run and the exit code of each training so far, by its settings."""
STEPS = "steps/00000.parquet"


def _batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The same data for every seed, in an order that depends on the seed."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(40, 16, 12, generator=g)
    y = (x @ torch.randn(12, 5, generator=g) + 0.5 * torch.randn(40, 16, 5, generator=g)).argmax(-1)
    return [(x[i], y[i]) for i in torch.randperm(40)]


def _loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def healthy():
    """An ordinary classifier."""
    return nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 5)), _batches(), _loss


def tiny_gradients():
    """The loss, and so each gradient, is so small that FP16 rounds nearly all gradients to zero unless they are scaled.

    Adam divides by their magnitude, so the remaining gradients determine the updates.
    """
    model, batches, loss = healthy()
    return model, batches, lambda m, batch: loss(m, batch) * 2.0**-21


class Loud(nn.Module):
    """Has a layer whose output is far beyond 65504, the largest number of FP16; the norm after it rescales it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 32)
        self.loud = nn.Linear(32, 32)
        with torch.no_grad():
            self.loud.weight.mul_(1e6)
        self.norm = nn.LayerNorm(32)
        self.middle = nn.Linear(32, 32)
        self.last = nn.Linear(32, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.loud(self.first(x)))
        return self.last(F.relu(self.middle(x)))


def large_activations():
    """The activations overflow FP16 at any loss scale, but not BF16 or FP32."""
    return Loud(), _batches(), _loss


class Stopwatch:
    """Trains in this process, one recipe after the other, and records the given times: milliseconds per step by recipe.

    `speeds` maps a precision, `fp16-islands`, or an option with a plus before it (a factor) to its time. Trainings that
    can be ended early end once the clock reaches `until_s`. `load` is the standard deviation of the logarithm of the
    factor by which other work slows each step, and `start_s` what each training takes beside its steps.
    """

    def __init__(
        self, speeds: Mapping[str, float], until_s: float = 1e9, load: float = 0.02, start_s: float = 1.0
    ) -> None:
        self.speeds = speeds
        self.load, self.start_s = load, start_s
        self.until_s = until_s
        self.trained: list[str] = []
        self.now = 0.0

    def clock(self) -> float:
        """Seconds, in the time of the device."""
        return self.now

    def __call__(
        self,
        members: Sequence[Member],
        block_steps: int,
        reported: Callable[[int], None],
        keep: Callable[[int], Collection[int]] | None = None,
    ) -> list[int]:
        about = {"id": f"{len(self.trained)}", "block_steps": block_steps}
        codes = []
        round_s = sum(self.step_ms(member.config) for member in members) / 1e3
        steps = members[0].config.steps
        if keep is not None:
            steps = min(steps, 1 + int(max(0.0, self.until_s - self.now) / round_s))
        for member in members:
            # Uses the given time of a compiled step, without compiling for a minute.
            config = dataclasses.replace(member.config, compile=False, steps=steps)
            codes.append(_train_once(config, member.level, member.folder, {"comparison": about}))
            self.trained.append(member.folder.name)
            self._set_times(member)
        reported(members[0].config.steps)
        if keep is not None:
            keep(members[0].config.steps)
        return codes

    def step_ms(self, config: TrainConfig) -> float:
        """The time of a step."""
        name = config.precision + ("-islands" if config.islands else "")
        ms = self.speeds[name]
        for option in ("fused", "channels_last", "pad_to", "compile"):
            if getattr(config, option):
                ms *= self.speeds.get(f"+{option}", 1.0)
        return ms

    def _set_times(self, member: Member) -> None:
        if not (member.folder / STEPS).exists():
            return
        random = np.random.default_rng([len(self.trained), member.config.seed])
        steps = pq.read_metadata(member.folder / STEPS).num_rows
        ms = self.step_ms(member.config) * random.lognormal(0.0, self.load, steps)
        set_times(member.folder, ms)
        self.now += float(ms.sum()) / 1e3 + self.start_s


def _train_once(config: TrainConfig, level: str, into: Path, also: dict[str, Any]) -> int:
    """The exit code of a training, whose run is written into a folder. Each configuration trains once per process: its
    losses are the same each time; `also` belongs to the head's settings."""
    key = json.dumps([config.to_dict(), level], sort_keys=True, default=str)
    if key not in _TRAINED:
        folder = Path(tempfile.mkdtemp()) / "run"
        atexit.register(shutil.rmtree, folder.parent, ignore_errors=True)
        try:
            train(config, folder, level=level)
            _TRAINED[key] = folder, 0
        except RuntimeError:
            _TRAINED[key] = folder, 1
    folder, code = _TRAINED[key]
    if folder.exists():
        shutil.copytree(folder, into)
        head = json.loads((into / "run.json").read_text())
        head["config"] |= also
        (into / "run.json").write_text(json.dumps(head))
    return code


def set_times(folder: Path, step_ms: np.ndarray) -> None:
    """Replace the step times of a sealed run."""
    table = pq.read_table(folder / STEPS)
    place = table.schema.get_field_index("step_ms")
    pq.write_table(table.set_column(place, table.schema.field(place), pa.array(step_ms)), folder / STEPS)


def config(name: str, **more) -> TrainConfig:
    """The settings of one of these workloads."""
    settings = {"workload": f"{HERE}:{name}", "device": "cpu", "steps": 60, "lr": 5e-3, "precision": "fp32"}
    return dataclasses.replace(TrainConfig(**settings), **more)


def _waiting(task, wait_ms: Mapping[str, float]):
    """The same with a loss that waits, for the real command: the CPU's own times are too unstable."""
    model, batches, loss = task
    kinds = {torch.float16: "fp16", torch.bfloat16: "bf16"}

    def waiting(m: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        name = kinds[torch.get_autocast_dtype("cpu")] if torch.is_autocast_enabled("cpu") else "fp32"
        islands = any("forward" in vars(part) for part in m.modules()) and not torch.compiler.is_compiling()
        time.sleep(wait_ms[f"{name}-islands" if islands else name] / 1e3)
        return loss(m, batch)

    return model, batches, waiting


WAITS = {
    "healthy": ({"fp32": 40.0, "bf16": 15.0, "fp16": 15.0, "fp16-islands": 15.0}, "bf16"),
    "tiny_gradients": ({"fp32": 40.0, "bf16": 60.0, "fp16": 15.0, "fp16-islands": 20.0}, "fp16"),
    "large_activations": ({"fp32": 40.0, "bf16": 25.0, "fp16": 15.0, "fp16-islands": 35.0}, "bf16"),
}
"""For `python -m tests.tune`: how long a step of each waits, and which precision is right then."""


def waiting_healthy():
    """`healthy` on a device where both 16-bit formats are fast: the simpler one is right."""
    return _waiting(healthy(), WAITS["healthy"][0])


def waiting_tiny_gradients():
    """`tiny_gradients` on a device that emulates BF16: FP16 with a scale is right."""
    return _waiting(tiny_gradients(), WAITS["tiny_gradients"][0])


def waiting_large_activations():
    """`large_activations` on a device where FP16 is fastest but overflows: BF16 is right."""
    return _waiting(large_activations(), WAITS["large_activations"][0])
