"""Whether ranks wait for each other because of watching: `python -m tests.benchmarks.ranks [--processes 4] …`.

Several gloo processes on this machine train the same DDP model twice, bare and watched, by turns of a few steps; every
process takes its own times. Whoever waited for another because of watching would make all of them slower, and so would
a collective: the process group's own count of them stands in the table. At the end the merged tables are held against
what must be in them.
"""

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from amp_core import load_run
from amp_core.record import watch
from tests.benchmarks.measuring import machine, ratio, say, table


class Loop:
    """A DDP training loop that can be run some steps at a time."""

    def __init__(self, width: int, into: Path | None) -> None:
        torch.manual_seed(0)
        layers = [m for _ in range(4) for m in (nn.Linear(width, width), nn.GELU())]
        self.model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers, nn.Linear(width, 16)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.x, self.y = torch.randn(32, width), torch.randint(0, 16, (32,))
        self.recorder = watch(self.model, self.optimizer, into=into, every=10) if into is not None else None
        self.collectives = 0

    def run(self, steps: int) -> tuple[float, float]:
        """Seconds that so many steps took, and seconds of a processor that this process used in them."""
        dist.barrier()
        before = self._count()
        start, used = time.perf_counter(), time.process_time()
        for _ in range(steps):
            loss = nn.functional.cross_entropy(self.model(self.x), self.y)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        took = time.perf_counter() - start, time.process_time() - used
        self.collectives += self._count() - before
        return took

    def _count(self) -> int:
        return int(dist.group.WORLD._get_sequence_number_for_group())


def worker(folder: Path, turns: int, steps: int, width: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    loops = {"bare": Loop(width, None), "bare, once more": Loop(width, None), "watched": Loop(width, folder / "run")}
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in loops}
    for turn in range(turns + 1):
        names = list(loops)[turn % 3 :] + list(loops)[: turn % 3]
        for name in names:
            took = loops[name].run(steps)
            if turn:  # the first warms up
                seconds[name].append(took)
    recorder = loops["watched"].recorder
    assert recorder is not None
    recorder.close()
    mine = {name: np.array(times) for name, times in seconds.items()}
    counts = np.array([loop.collectives for loop in loops.values()])
    np.savez(folder / f"{dist.get_rank()}.npz", counts=counts, **mine)
    dist.destroy_process_group()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--processes", type=int, default=4)
    options.add_argument("--turns", type=int, default=24)
    options.add_argument("--steps", type=int, default=20, help="steps in a turn; a multiple of 10")
    options.add_argument("--width", type=int, default=192, help="of the model, whose step takes about its square")
    options.add_argument("--worker", default=None, help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.worker:
        worker(Path(given.worker), given.turns, given.steps, given.width)
        return
    with tempfile.TemporaryDirectory() as folder:
        start(given, Path(folder))
        show(given, Path(folder))


def start(given: argparse.Namespace, folder: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    places = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(given.processes)}
    places |= {"OMP_NUM_THREADS": "1"} | ({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {})
    command = [sys.executable, "-m", "tests.benchmarks.ranks", "--worker", str(folder)]
    command += ["--turns", str(given.turns), "--steps", str(given.steps), "--width", str(given.width)]
    say(f"{given.processes} processes")
    workers = [
        subprocess.Popen(command, env=os.environ | places | {"RANK": str(rank)}) for rank in range(given.processes)
    ]
    for one in workers:
        if one.wait():
            raise SystemExit("a process failed")


def show(given: argparse.Namespace, folder: Path) -> None:
    steps = (given.turns + 1) * given.steps
    rows = []
    counted = {}
    for rank in range(given.processes):
        times = np.load(folder / f"{rank}.npz")
        bare, counted[rank] = times["bare"], times["counts"]
        for name in ("bare", "bare, once more", "watched"):
            took = times[name]
            wall, cpu = (f"{np.median(took[:, i]) / given.steps * 1e3:.2f} ms" for i in (0, 1))
            rows.append([str(rank), name, wall, ratio(took[:, 0], bare[:, 0]), cpu, ratio(took[:, 1], bare[:, 1])])
    print(f"{given.processes} gloo ranks, DDP, {steps} steps each, {given.turns} turns of {given.steps}\n")
    print(table(["rank", "loop", "a step", "÷ bare", "of a processor", "÷ bare"], rows))
    run = load_run(folder / "run")
    run.validate(full=True)
    whole = run.steps.groupby("rank")["step"].apply(lambda s: sorted(s) == list(range(steps)))
    tensors = run.tensors(kind="weight_grad").groupby(["rank", "step"]).size()
    sampled = given.processes * len(range(0, steps, 10))
    print(f"\nsteps complete on each of {len(whole)} ranks: {bool(whole.all() and len(whole) == given.processes)}")
    print(f"samples complete: {bool(len(tensors) == sampled and tensors.nunique() == 1)} ({len(tensors)} of {sampled})")
    alike = all((c[0] == c).all() for c in counted.values())
    print(f"collectives of the bare and the watched loop alike on every rank: {alike} ({counted[0][0]})")
    print(f"\n{machine()}")


if __name__ == "__main__":
    main()
