"""The true cost of watching, and the cost that it reports: `python -m tests.benchmarks.overhead [--tensors 40,500] …`.

The same loop, unwatched and watched, with the same seed and in turns of a few steps. Each runs in its own process,
because the patches of watching would slow down an unwatched loop in the same process too. All parameters are tensors of
64 × 64, so the loop itself costs little per tensor: the worst case for watching.

Three ways of watching: `all`, with the default interval of every 10th step; `unsampled`, in which no timed step is
sampled; and `budget`, with `budget=0.03`. For each the table has

- the median over the turns of watched ÷ bare, by the wall clock and by the processor time of the process;
- the same ratio as reported by the run: the sum of `step_ms` ÷ the sum of `step_ms` less `watch_ms`, of the timed
  steps;
- the true difference per step, median over the turns, by the wall clock and by processor time, and `watch_ms` ÷ each:
  1 if the report is correct.

On a busy machine only processor time means something. With `chrt -f 20` Linux stops a process for 50 ms of each second
that it computes, which the wall clock counts and processor time does not.
"""

import argparse
import contextlib
import itertools
import multiprocessing
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from amp_core import load_run
from amp_core.record import Recorder, watch
from tests.benchmarks.measuring import REST_S, machine, ratio, say, table

WIDTH = 64
WAYS: dict[str, dict[str, Any]] = {
    "all": {"every": 10},
    "unsampled": {"every": 10**6},
    "budget": {"every": 10, "budget": 0.03},
}
WARM_UP = 40
"""Steps before anything is timed: the first are looked at more closely, and a budget has to learn."""


class Block(nn.Module):
    """A transformer block whose six weights all have the same size."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.output, self.up, self.down = (
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(6)
        )
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        x = x + self.output(
            nn.functional.scaled_dot_product_attention(self.query(h), self.key(h), self.value(h), is_causal=True)
        )
        more: torch.Tensor = self.down(nn.functional.gelu(self.up(self.norm(x))))
        return x + more


def built(kind: str, tensors: int) -> nn.Module:
    """A model with at least `tensors` tensors of 64 × 64, and no others."""
    if kind == "gpt":
        return nn.Sequential(*[Block() for _ in range(-(-tensors // 6))])
    model = nn.Sequential(
        *itertools.chain.from_iterable((nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU()) for _ in range(tensors))
    )
    for weight in model.parameters():  # so that neither activations nor gradients vanish
        nn.init.orthogonal_(weight, gain=2**0.5)
    return model


class Loop:
    """A training loop that can run a few steps at a time."""

    def __init__(self, given: argparse.Namespace, tensors: int) -> None:
        torch.manual_seed(0)
        self.model = built(given.model, tensors)
        self.fp16 = given.precision == "fp16"
        self.clip = given.clip
        kind = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[given.optimizer]
        self.optimizer = kind(self.model.parameters(), lr=1e-4, foreach=True)
        self.scaler = torch.amp.GradScaler("cpu", enabled=self.fp16)
        self.x = torch.randn(given.batch, 16, WIDTH)
        self.recorder: Recorder | None = None

    def watched(self, into: Path, **options: Any) -> "Loop":
        """This loop, watched from now on."""
        self.recorder = watch(
            self.model, self.optimizer, scaler=self.scaler if self.fp16 else None, into=into, **options
        )
        return self

    def run(self, steps: int) -> tuple[float, float]:
        """The wall seconds and the processor seconds of `steps` steps."""
        start, used = time.perf_counter(), time.process_time()
        for _ in range(steps):
            with torch.autocast("cpu", dtype=torch.float16, enabled=self.fp16):
                loss = self.model(self.x).float().square().mean()
            self.scaler.scale(loss).backward()
            if self.clip:
                self.scaler.unscale_(self.optimizer)
                nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
        return time.perf_counter() - start, time.process_time() - used


def _serve(given: argparse.Namespace, tensors: int, folder: Path | None, way: str, pipe: Connection) -> None:
    """A process with one loop: runs the number of steps received through `pipe`, until it receives None."""
    loop = Loop(given, tensors)
    if folder is not None:
        loop.watched(folder, **WAYS[way])
    recorder = loop.recorder
    while True:
        with recorder.paused() if recorder is not None else contextlib.nullcontext():
            steps = pipe.recv()
            if steps is not None:
                time.sleep(REST_S)  # torch's threads keep spinning for some milliseconds
        if steps is None:
            break
        pipe.send(loop.run(steps))
    if recorder is not None:
        recorder.close()
    pipe.send(None)


def compared(given: argparse.Namespace, tensors: int, way: str, folder: Path) -> list[str]:
    """A row of the table."""
    steps, warm = given.steps, min(WARM_UP, 2 * given.steps)
    took = np.zeros((2, 2, given.turns))  # unwatched and watched, wall and processor, turn by turn
    processes = multiprocessing.get_context("spawn")
    pipes = []
    for into in (None, folder):
        mine, theirs = processes.Pipe()
        processes.Process(target=_serve, args=(given, tensors, into, way, theirs), daemon=True).start()
        pipes.append(mine)
    for pipe in pipes:
        pipe.send(warm)
        pipe.recv()
    for turn in range(given.turns):
        for which in (turn % 2, 1 - turn % 2):
            pipes[which].send(steps)
            took[which, :, turn] = pipes[which].recv()
    for pipe in pipes:
        pipe.send(None)
        pipe.recv()
    rows = load_run(folder).steps.set_index("step").loc[warm:]
    claimed = rows["step_ms"].sum() / (rows["step_ms"].sum() - rows["watch_ms"].sum())
    real, real_processor = np.median(took[1] - took[0], axis=1) / steps * 1e3
    recorded_ms = rows["watch_ms"].mean()
    return [
        f"{tensors}",
        way,
        f"{np.median(took[0, 0]) / steps * 1e3:.2f} ms",
        ratio(took[1, 0], took[0, 0]),
        f"{np.median(took[1, 1] / took[0, 1]):.3f}",
        f"{claimed:.3f}",
        f"{recorded_ms:.3f} ms",
        f"{real:+.3f} ms",
        f"{recorded_ms / real:.2f}",
        f"{real_processor:+.3f} ms",
        f"{recorded_ms / real_processor:.2f}",
    ]


HEADS = (
    "tensors",
    "steps",
    "bare step",
    "÷ bare",
    "÷ bare, processor",
    "claimed",
    "watch_ms",
    "really",
    "of it",
    "really, processor",
    "of it, processor",
)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--tensors", default="40,500,5000", help="numbers of tensors, with commas between")
    options.add_argument("--model", choices=("mlp", "gpt"), default="mlp")
    options.add_argument("--optimizer", choices=("sgd", "adamw"), default="sgd")
    options.add_argument("--precision", choices=("fp32", "fp16"), default="fp32", help="fp16: autocast and a scaler")
    options.add_argument("--clip", action="store_true", help="clip gradients by their norm")
    options.add_argument("--ways", default="all,unsampled,budget")
    options.add_argument("--batch", type=int, default=4, help="sequences of 16 in a step")
    options.add_argument("--turns", type=int, default=15)
    options.add_argument("--steps", type=int, default=20, help="steps in a turn; a multiple of 10")
    given = options.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for tensors in map(int, given.tensors.split(",")):
            for way in given.ways.split(","):
                say(f"{tensors} tensors, {way}")
                rows.append(compared(given, tensors, way, Path(folder) / f"{tensors}-{way}"))
    what = f"{given.model}, {given.optimizer}, {given.precision}{', clipped' if given.clip else ''}"
    print(f"{what}, batch of {given.batch} × 16, {given.turns} turns of {given.steps} steps\n")
    print(table(HEADS, rows))
    print(f"\n{machine()}")


if __name__ == "__main__":
    main()
