"""What a check is, what it says, and the list of all of them in the order in which they run.

A check is a function of a `Place` that yields rows, one for each thing it was asked; what it yielded before it failed
stands. It is told on what device, whether quickly, and how many seconds it may take.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

VERDICTS = ("pass", "FAIL", "error", "shown", "skipped")
"""`shown` is a number that nothing was asked of; `skipped` says why in `measured`."""


@dataclass
class Row:
    """One line of the table."""

    check: str
    asked: str
    measured: str
    verdict: str
    numbers: dict[str, Any] = field(default_factory=dict)
    """The same as numbers, for the JSON."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Place:
    """Where and how a check runs."""

    device: torch.device
    quick: bool
    out: Path
    seconds: float
    began: float = field(default_factory=time.monotonic)

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def left_s(self) -> float:
        """Seconds until the check is ended from outside."""
        return self.seconds - (time.monotonic() - self.began)

    def settle(self) -> None:
        """Wait until the device has done what it was given."""
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def free(self) -> None:
        """Give memory back that nothing uses any more, so that the next measurement begins where this one did."""
        import gc

        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()

    def judged(self, good: bool) -> str:
        """`pass` or `FAIL` on a GPU at full length. A processor's times, and those of a few steps, are only shown."""
        if not self.cuda or self.quick:
            return "shown"
        return "pass" if good else "FAIL"


@dataclass(frozen=True)
class Check:
    """A function that yields rows, and what the runner has to know of it."""

    name: str
    run: Callable[[Place], Iterator[Row]]
    seconds: float
    """What is set aside for it; what others leave over is added."""
    cuda_only: bool = False
    alone: bool = False
    """Whether it needs a process in which nothing ran before."""


def all_checks() -> list[Check]:
    """Every check: what must be right, the sample runs, what 16 bits buy, and what watching costs."""
    from tests.gpu import devices, frameworks, graphs, kernel, nccl, parts, samples, speed, truth, watching

    return [
        Check("kernel-exact", kernel.exact, 20),
        Check("kernel-channels", kernel.channels, 15),
        Check("kernel-many", kernel.many, 10),
        Check("kernel-bandwidth", kernel.bandwidth, 20),
        Check("devices", devices.devices, 15, cuda_only=True),
        Check("watch-identical", watching.identical, 30),
        Check("watch-waits", watching.waits, 20, cuda_only=True),
        Check("watch-memory", watching.memory, 25, cuda_only=True),
        Check("memory-parts", parts.memory_parts, 15),
        Check("cuda-graphs", graphs.graphs, 10, cuda_only=True),
        Check("reduce-overhead", graphs.reduced, 15),
        Check("ranks", nccl.ranks, 15),
        Check("prediction", truth.prediction, 25),
        Check("samples", samples.samples, 60),
        Check("tensor-cores", truth.tensor_cores, 40, cuda_only=True),
        Check("speed-gpt2", speed.gpt2, 40),
        Check("speed-bert", speed.bert, 45),
        Check("watch-cost", watching.cost, 30),
        Check("engine-cost", watching.engine, 20),
        Check("sampler-cost", watching.sampler, 20, cuda_only=True),
        Check("frameworks", frameworks.frameworks, 20, alone=True),
        Check("window-cost", watching.closed_window, 25, alone=True),
    ]
