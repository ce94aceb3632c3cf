"""Trainings of two real processes over gloo, each started once for several tests."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
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


class Ranks:
    """A process that imports torch once, and forks the ranks of one training after another."""

    def __init__(self) -> None:
        places = {"OMP_NUM_THREADS": "1"} | ({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {})
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.distributed.worker"],
            cwd=ROOT, env=os.environ | places, text=True, start_new_session=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def train(self, hows: tuple[str, ...], folder: Path, size: int) -> list[int]:
        """Train in `size` processes like those of torchrun, which imports torch in each. Returns their exit codes."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._process.stdin.write(json.dumps([str(folder), port, size, hows]) + "\n")
        self._process.stdin.flush()
        codes: list[int] = json.loads(self._process.stdout.readline())
        return codes

    def close(self) -> None:
        """End the process, and ranks that hang."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


def start(ranks: Ranks, hows: tuple[str, ...], folder: Path, size: int) -> dict[str, Trained]:
    """Train so in `size` processes, in all of these ways one after another."""
    codes = ranks.train(hows, folder, size)
    done = {}
    for how in hows:
        files = {rank: folder / f"{how}.r{rank}.json" for rank in range(size)}
        truth = {rank: json.loads(f.read_text()) for rank, f in files.items() if f.exists()}
        done[how] = Trained(folder / how, truth, codes)
    return done


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    ranks = Ranks()
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Callable[..., Trained]:
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
            done = start(request.getfixturevalue("ranks"), group, tmp_path_factory.mktemp("ranks"), size)
            known.update({(name, size): one for name, one in done.items()})
        return known[how, size]

    return train_once
