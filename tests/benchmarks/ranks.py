"""Whether ranks wait for each other because of watching: `python -m tests.benchmarks.ranks [--processes 4] …`.

Several gloo processes on this machine train the same DDP model in turns of a few steps: unwatched, watched on every
rank, and watched on rank 0 only. Each measures its step times, its processor time, and the time from passing on its
gradients until those of all ranks have arrived. A rank that waited for another because of watching would slow down all
of them, and so would a collective: below the table are the process group's count of collectives and the cost that
watching reports. At the end the merged tables are checked for completeness.

A part of the step sleeps (`--sleep`), like a processor that waits for a GPU, so that more ranks than cores do not
compete for the cores; `--sleep 0` disables it.
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

LOOPS = ("bare", "bare, once more", "watched", "watched on rank 0 alone")


class Sleep(nn.Module):
    """A module that takes time without using the processor."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return x


class Loop:
    """A DDP training loop that can run a few steps at a time."""

    def __init__(self, width: int, sleep_s: float, into: Path | None) -> None:
        torch.manual_seed(0)
        layers = [m for _ in range(4) for m in (nn.Linear(width, width), nn.GELU())]
        model = nn.Sequential(*layers, Sleep(sleep_s), nn.Linear(width, 16))
        self.model = nn.parallel.DistributedDataParallel(model)
        self.model.register_comm_hook(None, self._reduced)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.x, self.y = torch.randn(32, width), torch.randint(0, 16, (32,))
        self.recorder = watch(self.model, self.optimizer, into=into, every=10) if into is not None else None
        self.collectives = 0
        self._together_s = 0.0

    def run(self, steps: int) -> tuple[float, float, float]:
        """Wall seconds and processor seconds of `steps` steps, and the seconds from passing on gradients until those of
        all ranks have arrived."""
        dist.barrier()
        before = self._count()
        self._together_s = 0.0
        start, used = time.perf_counter(), time.process_time()
        for _ in range(steps):
            loss = nn.functional.cross_entropy(self.model(self.x), self.y)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        took = time.perf_counter() - start, time.process_time() - used, self._together_s
        self.collectives += self._count() - before
        return took

    def _reduced(self, state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """DDP's own reduction, timed."""
        start = time.perf_counter()
        mean = bucket.buffer().div_(dist.get_world_size())

        def done(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            self._together_s += time.perf_counter() - start
            return future.value()[0]

        return dist.all_reduce(mean, async_op=True).get_future().then(done)

    def _count(self) -> int:
        return int(dist.group.WORLD._get_sequence_number_for_group())


def worker(folder: Path, turns: int, steps: int, width: int, sleep_s: float) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    alone = folder / "alone" if dist.get_rank() == 0 else None
    loops = dict(zip(LOOPS, (Loop(width, sleep_s, into) for into in (None, None, folder / "run", alone)), strict=True))
    seconds: dict[str, list[tuple[float, float, float]]] = {name: [] for name in loops}
    for turn in range(turns + 1):
        names = [LOOPS[(turn + k) % len(LOOPS)] for k in range(len(LOOPS))]
        for name in names:
            took = loops[name].run(steps)
            if turn:  # the first turn is the warm-up
                seconds[name].append(took)
    for loop in loops.values():
        if loop.recorder is not None:
            loop.recorder.close()
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
    options.add_argument("--sleep", type=float, default=30.0, help="milliseconds of a step that need no processor")
    options.add_argument("--worker", default=None, help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.worker:
        worker(Path(given.worker), given.turns, given.steps, given.width, given.sleep / 1e3)
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
    command += ["--sleep", str(given.sleep)]
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
        for name in LOOPS:
            took = times[name]
            wall, cpu, together = (f"{np.median(took[:, i]) / given.steps * 1e3:.2f} ms" for i in range(3))
            over = ratio(took[:, 0], bare[:, 0])
            more = np.median(took[:, 1] - bare[:, 1]) / given.steps * 1e3
            rows.append([str(rank), name, wall, over, cpu, f"{more:+.2f} ms", together])
    heads = ["rank", "loop", "a step", "÷ bare", "of a processor", "more than bare", "gradients under way"]
    print(f"{given.processes} gloo ranks, DDP, {steps} steps each, {given.turns} turns of {given.steps}\n")
    print(table(heads, rows))
    run = load_run(folder / "run")
    run.validate(full=True)
    whole = run.steps.groupby("rank")["step"].apply(lambda s: sorted(s) == list(range(steps)))
    tensors = run.tensors(kind="weight_grad").groupby(["rank", "step"]).size()
    sampled = given.processes * len(range(0, steps, 10))
    print(f"\nsteps complete on each of {len(whole)} ranks: {bool(whole.all() and len(whole) == given.processes)}")
    print(f"samples complete: {bool(len(tensors) == sampled and tensors.nunique() == 1)} ({len(tensors)} of {sampled})")
    watching = run.steps.groupby("rank")["watch_ms"].mean()
    listed = ", ".join(f"{ms:.2f}" for ms in watching)
    print(f"watching took, by its own account, {listed} ms a step on each rank; one after another {watching.sum():.2f}")
    alike = all((c[0] == c).all() for c in counted.values())
    print(f"collectives of the bare and the watched loop alike on every rank: {alike} ({counted[0][0]})")
    print(f"\n{machine()}")


if __name__ == "__main__":
    main()
