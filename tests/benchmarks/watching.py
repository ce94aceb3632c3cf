"""The cost of watching a training loop: `python -m tests.benchmarks.watching [--size tiny] [--precision fp32] …`.

The same `text-gpt` loop, unwatched and watched in several ways, with the same seed and in one process. The variants
take turns of a few steps each. For comparison: TensorBoard's `add_histogram` of every parameter's gradient, and
`wandb.watch` (offline), at the same intervals. A second unwatched loop shows the noise.
"""

import argparse
import functools
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from amp_core.record import watch
from amp_core.schema import KINDS
from amp_core.settings.training import TrainConfig
from amp_core.train.engine.training import endless, make_optimizer
from amp_core.train.workloads import build
from tests.benchmarks.measuring import by_turns, machine, ratio, say, table

CPU = torch.device("cpu")
AUTOCAST = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class Loop:
    """A training loop that can run a few steps at a time; other trackers hook into `after_backward` and
    `after_step`."""

    def __init__(self, size: str, precision: str) -> None:
        config = TrainConfig(workload="text-gpt", size=size, precision=precision, seed=0).resolved()
        self.workload = build(config)
        self.model = self.workload.model
        self.optimizer = make_optimizer(config, self.model)
        self.batches = endless(self.workload, CPU, None)
        self.dtype = AUTOCAST[precision]
        self.scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16")
        self.after_backward: Callable[[int], None] = lambda step: None
        self.after_step: Callable[[int, torch.Tensor], None] = lambda step, loss: None
        self.close: Callable[[], None] = lambda: None
        self.step = 0

    def run(self, steps: int) -> None:
        for _ in range(steps):
            batch = next(self.batches)
            with torch.autocast("cpu", dtype=self.dtype or torch.bfloat16, enabled=self.dtype is not None):
                loss = self.workload.loss_fn(self.model, batch)
            self.scaler.scale(loss).backward()
            self.after_backward(self.step)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad(set_to_none=True)
            self.after_step(self.step, loss)
            self.step += 1


def ampscope(loop: Loop, folder: Path, every: int, kinds: tuple[str, ...]) -> None:
    scaler = loop.scaler if loop.scaler.is_enabled() else None
    recorder = watch(loop.model, loop.optimizer, scaler=scaler, into=folder, every=every, kinds=kinds)
    loop.after_step = lambda step, loss: recorder.log(loss=loss)
    loop.close = recorder.close


def tensorboard(loop: Loop, folder: Path, every: int) -> None:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder))

    def histograms(step: int) -> None:
        if step % every == 0:
            for name, parameter in loop.model.named_parameters():
                writer.add_histogram(name, parameter.grad, step)

    loop.after_backward = histograms
    loop.after_step = lambda step, loss: writer.add_scalar("loss", loss.item(), step)
    loop.close = writer.close


def wandb_watch(loop: Loop, folder: Path, every: int) -> None:
    os.environ.setdefault("WANDB_SILENT", "true")
    import wandb

    if wandb.run is None:  # its hooks log to the one run of the process, which the loops share
        wandb.init(mode="offline", dir=str(folder.parent), project="benchmark")
        loop.close = wandb.finish
    wandb.watch(loop.model, log="gradients", log_freq=every, idx=every)
    loop.after_step = lambda step, loss: wandb.log({"loss": loss.item()})


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--size", default="tiny")
    options.add_argument("--precision", default="fp32", choices=AUTOCAST)
    options.add_argument("--turns", type=int, default=30)
    options.add_argument("--steps", type=int, default=20, help="steps in a turn; a multiple of 10")
    options.add_argument("--only", default="", help="leave out the other systems: --only ampscope")
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run(given, Path(folder))


def run(given: argparse.Namespace, folder: Path) -> None:
    ways: list[tuple[str, Callable[[Loop, Path], None]]] = [
        ("bare", lambda loop, into: None),
        ("bare, once more", lambda loop, into: None),
        ("AMPscope, weight gradients, every step", lambda loop, into: ampscope(loop, into, 1, ("weight_grad",))),
        ("AMPscope, all kinds, every 10th step", lambda loop, into: ampscope(loop, into, 10, KINDS)),
        ("TensorBoard add_histogram, every step", lambda loop, into: tensorboard(loop, into, 1)),
        ("TensorBoard add_histogram, every 10th step", lambda loop, into: tensorboard(loop, into, 10)),
        ("wandb.watch, every step", lambda loop, into: wandb_watch(loop, into, 1)),
        ("wandb.watch, every 10th step", lambda loop, into: wandb_watch(loop, into, 10)),
    ]
    loops: dict[str, Loop] = {}
    missing = []
    for number, (name, install) in enumerate(ways):
        if given.only and not name.lower().startswith(("bare", given.only)):
            continue
        loop = Loop(given.size, given.precision)
        try:
            install(loop, folder / str(number))
        except Exception as error:  # a system that is not installed or cannot run here is named under the table
            missing.append(f"{name}: not measured ({type(error).__name__}: {error})")
            continue
        loops[name] = loop
    try:
        say(f"{len(loops)} loops, warming up")
        for loop in loops.values():
            loop.run(20)
        turns = {name: functools.partial(loop.run, given.steps) for name, loop in loops.items()}
        seconds = by_turns(turns, given.turns)
    finally:
        for loop in loops.values():
            loop.close()
    bare = seconds["bare"]
    rows = []
    for name, took in seconds.items():
        step, more = (np.median(x) / given.steps * 1e3 for x in (took, took - bare))
        rows.append([name, f"{step:.2f} ms", f"{more:+.3f} ms", ratio(took, bare)])
    print(f"text-gpt {given.size}, {given.precision}, {given.turns} turns of {given.steps} steps\n")
    print(table(["loop", "a step", "more than bare", "÷ bare"], rows))
    print(f"\n{machine()}")
    for line in missing:
        print(line)


if __name__ == "__main__":
    main()
