"""Trainings of several processes: `python -m tests.distributed.worker` forks the ranks of each training that a line of
its input asks for, `[FOLDER, PORT, SIZE, [HOW, …]]`, and prints their exit codes. They share one import of torch.

`HOW` names how the model is shared and which fault occurs, e.g. `ddp`, `fsdp-clip`, `ddp-no_sync`, `ddp-unwatched`; it
is also the name of the run in `FOLDER`. Each process writes its own observations beside the run, `ddp.r1.json`, for the
tests to compare with the run.
"""

import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # imported by each optimizer: once before the fork, not by each rank
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from amp_core.record import watch

BF16 = torch.bfloat16
STEPS = 12
SPOILED = 6
"""The step at which rank 1 alone has a loss that overflows."""


class Block(nn.Module):
    """A user-defined class, whose name FSDP changes."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(24, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.fc(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(24, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def shared(how: str) -> nn.Module:
    model = Net()
    if how.startswith("fsdp"):
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        return model
    return DistributedDataParallel(model)


def train(how: str, folder: Path) -> None:
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = shared(how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
    data = torch.Generator().manual_seed(rank)
    truth: dict[str, Any] = {"losses": [], "scales": []}
    group = dist.group.WORLD
    before = group._get_sequence_number_for_group()
    watching: Any = contextlib.nullcontext()
    if "unwatched" not in how:
        watching = watch(model, optimizer, scaler=scaler, into=folder / how, every=3)
    with watching:
        for step in range(STEPS):
            fail(how, rank, step)
            micro = 2 if "no_sync" in how else 1
            for i in range(micro):
                x, y = torch.randn(8, 24, generator=data), torch.randint(0, 5, (8,), generator=data)
                apart = "local" in how or i < micro - 1
                with model.no_sync() if apart else contextlib.nullcontext():
                    with torch.autocast("cpu", dtype=torch.float16):
                        loss = nn.functional.cross_entropy(model(x), y)
                    if step == SPOILED and rank == 1:
                        loss = loss * 1e38
                    scaler.scale(loss).backward()
            truth["losses"].append(loss.item())
            truth["scales"].append(scaler.get_scale())
            if "clip" in how:
                scaler.unscale_(optimizer)
                norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
                truth.setdefault("norms", []).append(float(norm))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    truth["collectives"] = group._get_sequence_number_for_group() - before
    (folder / f"{how}.r{rank}.json").write_text(json.dumps(truth))


def train_in_bf16(how: str, folder: Path) -> None:
    """BF16 without a scaler; the name says what is wrong: the reduction, the output, or the dtype of rank 1."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model: Any = Net()
    sharded, wide = "fsdp" in how, "ranks" in how and rank == 1
    if sharded:
        reduced = BF16 if "reduce" in how else torch.float32
        for block in model.blocks:
            fully_shard(block, mp_policy=MixedPrecisionPolicy(BF16, reduced))
        output = BF16 if "output" in how else torch.float32
        fully_shard(model, mp_policy=MixedPrecisionPolicy(BF16, reduced, output))
    else:
        model = DistributedDataParallel(model)
        if "reduce" in how:
            model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.Generator().manual_seed(rank)
    with watch(model, optimizer, into=folder / how, every=3):
        for _ in range(STEPS):
            x, y = torch.randn(8, 24, generator=data), torch.randint(0, 5, (8,), generator=data)
            with torch.autocast("cpu", dtype=BF16, enabled=not sharded and not wide):
                out = model(x)
            nn.functional.cross_entropy(out if sharded else out.float(), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    (folder / f"{how}.r{rank}.json").write_text("{}")


def train_alike(how: str, folder: Path) -> None:
    """The same FP32 training under DDP and under FSDP2, whose policy may compute one block in BF16; `moved`: from
    weights that are one rounding away."""
    torch.manual_seed(0)
    model: Any = Net()
    if "moved" in how:
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.nextafter(p, p + 1))
    if "fsdp" in how:
        narrow = MixedPrecisionPolicy(BF16, torch.float32, output_dtype=torch.float32)
        for i, block in enumerate(model.blocks):
            fully_shard(block, mp_policy=narrow if i == 1 and "narrow" in how else MixedPrecisionPolicy())
        fully_shard(model)
    else:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.Generator().manual_seed(dist.get_rank())
    kinds = ("weight", "activation", "output_grad", "weight_grad")
    with watch(model, optimizer, into=folder / how, every=1, kinds=kinds, config={"seed": 0}):
        for _ in range(3):
            x, y = torch.randn(8, 24, generator=data), torch.randint(0, 5, (8,), generator=data)
            nn.functional.cross_entropy(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    (folder / f"{how}.r{dist.get_rank()}.json").write_text("{}")


def fail(how: str, rank: int, step: int) -> None:
    """Let rank 1 die at step 5, if `how` says so."""
    if rank == 1 and step == 5:
        if "raise" in how:
            raise ValueError("boom in the data")
        if "kill" in how:
            os.kill(os.getpid(), signal.SIGKILL)


def train_all(hows: list[str], folder: Path) -> None:
    """Train each of these as the rank of this process."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for how in hows:
        trains = {"bf16": train_in_bf16, "alike": train_alike}.get(how.partition("-")[0], train)
        trains(how, folder)
    dist.destroy_process_group()


def fork_ranks(size: int) -> int | None:
    """Fork so many processes. Returns the rank in each of them, and in this one None after all have ended."""
    ranks = []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            return rank
        ranks.append(child)
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in ranks]), flush=True)
    return None


def main() -> None:
    for line in sys.stdin:
        folder, port, size, hows = json.loads(line)
        rank = fork_ranks(size)
        if rank is not None:
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size)}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            train_all(hows, Path(folder))
            return


if __name__ == "__main__":
    main()
