"""Data-parallel training in several processes: what the training engine does differently then.

    >>> with joined(config) as team:
    ...     model = team.shared(model, device)           # DDP if there are others
    ...     for batch in team.part(batches): ...         # every process takes its own
    ...         if reason := team.agreed(stop()): break  # all end at the same step

torchrun starts the processes (`ampscope train --nproc 4` starts torchrun, see `torchrun`). Each writes its own part of
the run folder. With one process all of this does nothing.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist

from amp_core.record.backends import backend_named
from amp_core.record.backends.cpu import Cpu
from amp_core.record.ranks import place
from amp_core.schema import RunError
from amp_core.settings.training import TrainConfig


@dataclass(frozen=True)
class Team:
    """This process's rank among those that train together."""

    rank: int = 0
    size: int = 1

    def shared(self, model: torch.nn.Module, device: torch.device) -> torch.nn.Module:
        """`model` with gradients averaged over all processes in backward."""
        if self.size == 1:
            return model
        return torch.nn.parallel.DistributedDataParallel(model, None if device.type == "cpu" else [device.index])

    def part(self, batches: Iterable[Any]) -> Iterable[Any]:
        """Every `size`-th batch, another for each process."""
        return batches if self.size == 1 else islice(batches, self.rank, None, self.size)

    def agreed(self, reason: str | None) -> str | None:
        """The reason to stop if any process has one: a process that stopped alone would leave the others waiting."""
        if self.size == 1:
            return reason
        stop = torch.tensor(float(reason is not None))
        dist.all_reduce(stop, dist.ReduceOp.MAX)
        return reason or ("another process was asked to stop" if stop else None)


@contextmanager
def joined(config: TrainConfig) -> Iterator[Team]:
    """Join the process group if torchrun started this process, and destroy it at the end.

    On GPUs each process uses the device of its local rank. Raises `RunError` if there are fewer devices, and for
    `nproc` above 1 without torchrun.
    """
    rank, size = place()
    if size == 1:
        if config.nproc > 1:
            how = "start them with ampscope train --nproc, or with torchrun"
            raise RunError(f"nproc={config.nproc} needs several processes, but there is only this one; {how}")
        yield Team()
        return
    collectives = "gloo"
    backend = backend_named(config.device)
    if backend is not Cpu and backend.available():
        local = int(os.environ.get("LOCAL_RANK", rank))
        if local >= backend.count():
            raise RunError(
                f"nproc={config.nproc} needs a GPU per process, but this machine has {backend.count()}; start fewer, "
                "or choose device cpu"
            )
        backend.select(local)
        collectives = f"cpu:gloo,{backend.type}:{backend.collectives}"
    dist.init_process_group(collectives)
    torch.manual_seed(config.seed)
    try:
        yield Team(rank, size)
    finally:
        dist.destroy_process_group()
