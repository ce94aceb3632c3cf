"""Findings on sound trainings, of which there should be none: `python -m tests.benchmarks.healthy`.

Every workload is trained with ten seeds, in one process in FP32, BF16 and FP16, and on two gloo ranks with DDP and with
FSDP2 in BF16. The table has a row per workload and setting: how many of its trainings have a warning or an error, and
which.
"""

import argparse
import socket
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from amp_core import diagnose, load_run, watch
from amp_core.train import WORKLOADS, TrainConfig, train
from amp_core.train.workloads import build
from tests.benchmarks.measuring import machine, say, table

ALONE = ("fp32", "bf16", "fp16")
RANKS = 2


def alone(config: TrainConfig, into: Path) -> None:
    """Train in this process."""
    train(config, into)


def on_ranks(config: TrainConfig, into: Path, wrap: Callable[[torch.nn.Module], torch.nn.Module]) -> None:
    """Train in `RANKS` processes; the model is wrapped in each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(_rank, (config, into, wrap, port), nprocs=RANKS)


def ddp(model: torch.nn.Module) -> torch.nn.Module:
    """The model with gradients that are averaged over ranks."""
    return torch.nn.parallel.DistributedDataParallel(model)


def fsdp2(model: torch.nn.Module) -> torch.nn.Module:
    """The model with sharded parameters, computed in BF16 and reduced in FP32; a CPU has no BatchNorm with weights in
    BF16 and statistics in FP32."""
    mesh = init_device_mesh("cpu", (RANKS,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    for module in model.modules():
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def _rank(rank: int, config: TrainConfig, into: Path, wrap: Callable[[torch.nn.Module], torch.nn.Module], port: int):
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    workload = build(config.resolved())
    model = wrap(workload.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.resolved().lr)
    batches = iter(workload.batches)
    for _ in range(rank * config.steps):  # each rank has batches of its own
        next(batches)
    with watch(model, optimizer, into=into):
        for _ in range(config.steps):
            with torch.autocast("cpu", torch.bfloat16, enabled=wrap is ddp):
                loss = workload.loss_fn(model, next(batches))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    distributed.destroy_process_group()


SETTINGS: dict[str, tuple[str, Callable[[TrainConfig, Path], None]]] = {
    **{name: (name, alone) for name in ALONE},
    "bf16, DDP": ("bf16", lambda config, into: on_ranks(config, into, ddp)),
    "bf16, FSDP2": ("bf16", lambda config, into: on_ranks(config, into, fsdp2)),
}
"""By name: the precision, and how to train."""


def row(workload: str, setting: str, seeds: int, steps: int) -> list[Any]:
    """The trainings of one workload in one setting."""
    precision, run = SETTINGS[setting]
    found: Counter[str] = Counter()
    bad = 0
    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as folder:
            into = Path(folder, "run")
            run(TrainConfig(workload=workload, precision=precision, steps=steps, seed=seed), into)
            codes = [f.code for f in diagnose(load_run(into)) if f.severity != "info"]
        found.update(codes)
        bad += bool(codes)
    say(f"{workload}, {setting}: {bad} of {seeds}; {dict(found)}")
    return [workload, setting, seeds, bad, ", ".join(f"{code} ({count})" for code, count in found.items())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--workload", action="append", choices=list(WORKLOADS))
    parser.add_argument("--setting", action="append", choices=list(SETTINGS))
    options = parser.parse_args()
    rows = [
        row(workload, setting, options.seeds, options.steps)
        for workload in options.workload or WORKLOADS
        for setting in options.setting or SETTINGS
    ]
    print(table(["workload", "setting", "trainings", "with a finding", "which"], rows))
    print(f"\n{machine().removesuffix('; median (quartiles).')}, {options.steps} steps each.")


if __name__ == "__main__":
    main()
