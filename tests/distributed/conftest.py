"""Trainings of two real processes over gloo, each started once for several tests."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from amp_core import Run, load_run

FSDP2_ON_CPU = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 7)
ROOT = Path(__file__).parents[2]


@dataclass
class Trained:
    """The results of a training: its run, the observations of each process, and their exit codes."""

    folder: Path
    truth: dict[int, dict[str, Any]]
    codes: list[int]

    @property
    def run(self) -> Run:
        return load_run(self.folder)


GROUPS = {
    2: (
        ("ddp", "ddp-unwatched", "fsdp-clip", "fsdp-clip-unwatched", "ddp-no_sync", "ddp-local"),
        ("ddp-kill",),
        (
            "bf16-ddp",
            "bf16-ddp-reduce",
            "bf16-ddp-ranks",
            "bf16-fsdp",
            "bf16-fsdp-reduce",
            "bf16-fsdp-output",
            "alike-ddp",
            "alike-ddp-moved",
            "alike-fsdp",
            "alike-fsdp-narrow",
        ),
    ),
    4: (("ddp", "ddp-raise"),),
}
"""By number of processes, what is trained one after another in the same ones: starting them takes longest."""


def start(hows: tuple[str, ...], folder: Path, size: int) -> dict[str, Trained]:
    """Train in `size` processes like those of torchrun, which starts them more slowly."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    places = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1"}
    if sys.platform == "linux":
        places["GLOO_SOCKET_IFNAME"] = "lo"
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.distributed.worker", str(folder), *hows],
            cwd=ROOT,
            env=os.environ | places | {"RANK": str(rank)},
            stderr=subprocess.DEVNULL,
        )
        for rank in range(size)
    ]
    try:
        codes = [worker.wait(timeout=900) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    done = {}
    for how in hows:
        files = {rank: folder / f"{how}.r{rank}.json" for rank in range(size)}
        truth = {rank: json.loads(f.read_text()) for rank, f in files.items() if f.exists()}
        done[how] = Trained(folder / how, truth, codes)
    return done


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Trained]:
    """`trained("ddp")` trains once, together with the variants that share its processes, and caches the results."""
    if not (dist.is_available() and dist.is_gloo_available()):
        pytest.skip("this torch has no gloo")
    known: dict[tuple[str, int], Trained] = {}

    def train_once(how: str, size: int = 2) -> Trained:
        if "fsdp" in how and not FSDP2_ON_CPU:
            pytest.skip("FSDP2 of torch 2.6 does not run on a CPU")
        if (how, size) not in known:
            group = next(group for group in GROUPS[size] if how in group)
            group = tuple(name for name in group if FSDP2_ON_CPU or "fsdp" not in name)
            done = start(group, tmp_path_factory.mktemp("ranks"), size)
            known.update({(name, size): one for name, one in done.items()})
        return known[how, size]

    return train_once
