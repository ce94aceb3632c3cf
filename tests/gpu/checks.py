"""Checks, their rows, and the list of all checks in the order in which they run.

A check is a function of a `Place` that yields one row per question. Rows that it yielded before it failed are kept. The
`Place` has the device, whether to be quick, and the time limit in seconds.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

VERDICTS = ("pass", "FAIL", "error", "shown", "skipped")
"""`shown` is a number without a limit; for `skipped`, `measured` has the reason."""
PARTS = (1, 2, 3)


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
        """Seconds until the runner ends the check."""
        return self.seconds - (time.monotonic() - self.began)

    def settle(self) -> None:
        """Wait until the device has finished all work."""
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def free(self) -> None:
        """Free unused memory, so that the next measurement starts in the same state."""
        import gc

        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()

    def judged(self, good: bool) -> str:
        """`pass` or `FAIL` on a GPU at full length. Times of a CPU or of a few steps are only shown."""
        if not self.cuda or self.quick:
            return "shown"
        return "pass" if good else "FAIL"


@dataclass(frozen=True)
class Check:
    """A function that yields rows, and what the runner needs to know about it."""

    name: str
    run: Callable[[Place], Iterator[Row]]
    seconds: float
    """Seconds reserved for it; time that others of its part leave is added."""
    part: int
    """Which of `PARTS` commands runs it, so that none takes longer than nine minutes."""
    cuda_only: bool = False
    alone: bool = False
    """Whether it needs a fresh process."""


def all_checks() -> list[Check]:
    """All checks. Part 1 is what is to be known first, in the order of its worth: the kernels and recording are right,
    four recipes of one model recorded, speed and cost. Part 2 has the rest of what must be right, and other costs;
    part 3 larger models and frameworks."""
    from tests.gpu import devices, frameworks, graphs, kernel, nccl, parts, samples, speed, truth, watching

    return [
        Check("kernel-exact", kernel.exact, 40, 1),
        Check("kernel-channels", kernel.channels, 25, 1),
        Check("watch-identical", watching.identical, 60, 1),
        Check("samples", samples.samples, 150, 1),
        Check("speed-gpt2", speed.gpt2, 85, 1),
        Check("watch-cost", watching.cost, 70, 1),
        Check("kernel-bandwidth", kernel.bandwidth, 25, 1),
        Check("watch-waits", watching.waits, 40, 1, cuda_only=True),
        Check("devices", devices.devices, 30, 1, cuda_only=True),
        Check("kernel-many", kernel.many, 20, 2),
        Check("kernel-blocks", kernel.blocks, 20, 2),
        Check("watch-memory", watching.memory, 45, 2, cuda_only=True),
        Check("memory-parts", parts.memory_parts, 30, 2),
        Check("cuda-graphs", graphs.graphs, 20, 2, cuda_only=True),
        Check("reduce-overhead", graphs.reduced, 60, 2),
        Check("ranks", nccl.ranks, 40, 2),
        Check("prediction", truth.prediction, 50, 2),
        Check("tensor-cores", truth.tensor_cores, 90, 2, cuda_only=True),
        Check("engine-cost", watching.engine, 40, 2),
        Check("sampler-cost", watching.sampler, 45, 2, cuda_only=True),
        Check("window-cost", watching.closed_window, 60, 2, alone=True),
        Check("speed-bert", speed.bert, 110, 3),
        Check("samples-others", samples.others, 230, 3),
        Check("frameworks", frameworks.frameworks, 130, 3, alone=True),
    ]
