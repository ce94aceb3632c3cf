"""`case` registers a function of the zoo; `Loop` is the loop that most cases vary."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from amp_core.record import Recorder, watch

ZOO: list["Case"] = []
WIDTH = 32


@dataclass(frozen=True)
class Case:
    """One fault and its twin. `write(folder, faulty)` makes the run; the finding must name `where`."""

    code: str
    where: str
    write: Callable[[Path, bool], None]
    name: str
    benign: bool = False
    """A code that only tells of something normal: the twin is a run without it."""


def case(code: str, where: str, *, benign: bool = False) -> Callable[[Callable[[Path, bool], None]], Any]:
    """Register a function of the zoo."""

    def register(write: Callable[[Path, bool], None]) -> Callable[[Path, bool], None]:
        ZOO.append(Case(code, where, write, write.__name__, benign))
        return write

    return register


class Net(nn.Module):
    """Two linear layers and a norm, with a place for something in between."""

    def __init__(self, middle: nn.Module | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.middle = middle if middle is not None else nn.Identity()
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.norm(self.middle(F.relu(self.first(x)))))
        return out


def batches(steps: int, rows: int = 16) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """A task that can be learned: the largest of a vector's eight components."""
    source = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = torch.randn(rows, WIDTH, generator=source)
        yield x, x[:, :8].argmax(1)


@dataclass
class Loop:
    """The parts that a variant may change; `run` is the loop of PyTorch's documentation."""

    into: Path
    model: nn.Module
    dtype: torch.dtype | None = torch.float16
    scaler: Any = "default"
    lr: float = 1e-3
    steps: int = 12
    options: dict[str, Any] | None = None
    optimizer: Any = None

    def __post_init__(self) -> None:
        if self.optimizer is None:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.lr)
        if self.scaler == "default":
            needs_scaler = self.dtype == torch.float16
            self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10) if needs_scaler else None

    @contextlib.contextmanager
    def watched(self) -> Iterator[Recorder]:
        """The recorder of this loop."""
        options = {"every": 3} | (self.options or {})
        with watch(self.model, self.optimizer, scaler=self.scaler, into=self.into, **options) as rec:
            yield rec

    def autocast(self, **more: Any) -> Any:
        """The loop's autocast region."""
        return torch.autocast("cpu", dtype=self.dtype or torch.bfloat16, enabled=self.dtype is not None, **more)

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Forward and loss under autocast."""
        with self.autocast():
            return F.cross_entropy(self.model(x), y)

    def step(self) -> None:
        """Step, through the scaler if there is one."""
        if self.scaler is not None:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        self.optimizer.zero_grad()

    def backward(self, loss: torch.Tensor) -> None:
        """Backward, scaled if there is a scaler."""
        (self.scaler.scale(loss) if self.scaler is not None else loss).backward()

    def run(self) -> None:
        """The whole training."""
        with self.watched() as rec:
            for x, y in batches(self.steps):
                loss = self.loss(x, y)
                self.backward(loss)
                rec.log(loss=loss)
                self.step()


def fp16(into: Path, model: nn.Module | None = None, **more: Any) -> Loop:
    """An FP16 loop over `model`, from seed 0."""
    torch.manual_seed(0)
    return Loop(into, model if model is not None else Net(), **more)
