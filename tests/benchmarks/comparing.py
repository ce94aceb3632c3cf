"""How often a comparison of real trainings is right: `python -m tests.benchmarks.comparing [--repeats 20]`.

Three comparisons, each repeated `--repeats` times: a recipe with itself (right: no difference in speed, and the same
loss), with itself plus 5 % more work in each step (right: slower), and with itself plus losses that are higher by three
standard deviations between seeds (right: worse). Work, steps and losses are real, and recorded by `watch`; only the
bias is simulated. All trainings of a comparison take turns as in `ampscope compare`, but in one process: starting two
for each comparison would take longer than the trainings. Some three minutes on a quiet machine. On a busy one blocks of
steps differ by more than 5 %, and the first two answers are "cannot tell"; with `--busy` steps are timed by the
processor time of this process, which other processes hardly affect.
"""

import argparse
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from amp_core import Run, load_run, watch
from amp_core.analysis import compare
from amp_core.record.step_phases import HostClock
from amp_core.train.turns.interleave import default_block, order_of
from tests.benchmarks.measuring import machine, say, table

SLOWER = 0.05
BIAS = 3.0
"""Standard deviations of the final loss from seed to seed."""
SEEDS = 4
STEPS, SHORT = 300, 60
"""Of trainings whose speed, and whose learning, is compared."""
STEP_MS = 4.0
MATRIX = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))


def work(products: int) -> None:
    """Compute `products` products of small matrices, a few microseconds each."""
    for _ in range(products):
        MATRIX @ MATRIX


def training(folder: Path, turns: str, seed: int, steps: int, products: int = 0, bias: float = 0.0) -> Iterator[None]:
    """Train a small classifier, one block of steps per value of the generator."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    order = torch.randperm(40).tolist()
    g = torch.Generator().manual_seed(0)
    x = torch.randn(40, 16, 12, generator=g)
    y = (x @ torch.randn(12, 5, generator=g) + 0.5 * torch.randn(40, 16, 5, generator=g)).argmax(-1)
    block = default_block(steps)
    config = {"precision": "fp32", "seed": seed, "workload": "comparing", "variant": folder.name.partition("-")[0]}
    config |= {"comparison": {"id": turns, "block_steps": block}}
    with watch(model, optimizer, into=folder, every=10**6, config=config) as rec:
        for step in range(steps):
            if step % block == 0:
                with rec.paused():
                    yield
            at = order[step % len(order)]
            loss = F.cross_entropy(model(x[at]), y[at])
            work(products)
            loss.backward()
            rec.log(loss=loss.detach() + bias, samples=len(x[at]))
            optimizer.step()
            optimizer.zero_grad()


def by_turns(folder: Path, variants: dict[str, dict[str, float]], steps: int, seed: int) -> list[Run]:
    """Train variants of a recipe in turns, under one seed."""
    turns = uuid.uuid4().hex
    folders = [folder / f"{name}-seed{seed}" for name in variants]
    going = [
        training(own, turns, seed, steps, **settings) for own, settings in zip(folders, variants.values(), strict=True)
    ]
    for one in going:
        next(one)
    for order in order_of(len(going), -(-steps // default_block(steps)), seed):
        for place in order:
            next(going[place], None)
    return [load_run(own) for own in folders]


def products_of_a_step(now: Callable[[], float]) -> tuple[int, int]:
    """The number of products that make a step take about `STEP_MS`, and the number that takes the fraction `SLOWER` of
    it."""
    work(200)
    times = []
    for _ in range(20):
        begin = now()
        work(100)
        times.append((now() - begin) / 100)
    one_ms = 1e3 * float(np.median(times))
    products = round(STEP_MS / one_ms)
    with tempfile.TemporaryDirectory() as folder:
        step_ms = float(
            by_turns(Path(folder), {"first": {"products": products}}, STEPS, 0)[0].steps["step_ms"].median()
        )
    return products, round(SLOWER * step_ms / one_ms)


def spread() -> float:
    """Standard deviation of the final loss between seeds."""
    with tempfile.TemporaryDirectory() as folder:
        ends = [by_turns(Path(folder), {"first": {}}, SHORT, seed)[0].steps["loss"].tail(6).mean() for seed in range(8)]
    return float(np.std(ends, ddof=1))


def main(repeats: int, now: Callable[[], float]) -> int:
    """Run all comparisons and print the table; returns 1 if fewer than 19 of 20 results are right."""
    torch.set_num_threads(1)
    products, more = products_of_a_step(now)
    bias = BIAS * spread()

    def beside(repeat: int, extra: int) -> str:
        variants = {"first": {"products": products}, "second": {"products": products + extra}}
        with tempfile.TemporaryDirectory() as folder:
            row = compare(by_turns(Path(folder), variants, STEPS, repeat)).table.iloc[1]
        same = str(row["parity"]).startswith("within noise: the loss is bitwise identical at every step")
        return str(row["speed_verdict"]) if same else "the losses differ"

    def biased(repeat: int) -> str:
        variants = {"first": {}, "second": {"bias": bias}}
        with tempfile.TemporaryDirectory() as folder:
            seeds = range(100 + SEEDS * repeat, 100 + SEEDS * (repeat + 1))
            runs = [by_turns(Path(folder), variants, SHORT, seed) for seed in seeds]
            result = compare([run for place in (0, 1) for run in (pair[place] for pair in runs)]).recipes.iloc[1]
        return str(result["parity"]).partition(" (")[0]

    questions: list[tuple[str, str, Callable[[int], str]]] = [
        ("itself", "no difference seen", lambda repeat: beside(repeat, 0)),
        (f"{SLOWER:.0%} more work", "slower", lambda repeat: beside(repeat, more)),
        (f"loss higher by {BIAS:g} deviations", "worse", biased),
    ]
    rows, wrong = [], False
    for name, right, ask in questions:
        began = time.process_time()
        answers: Counter[str] = Counter()
        for repeat in range(repeats):
            answers[ask(repeat)] += 1
            say(f"{name}: {repeat + 1} of {repeats}, {answers[right]} right")
        wrong = wrong or answers[right] < 0.95 * repeats
        counted = ", ".join(f"{count} × {answer}" for answer, count in answers.most_common())
        rows.append([name, right, f"{answers[right]} of {repeats}", counted, f"{time.process_time() - began:.0f} s"])
    print(table(["Beside", "Right answer", "Right", "All answers", "Processor"], rows))
    print(f"\n{machine()}")
    return int(wrong)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=20, metavar="N")
    parser.add_argument("--busy", action="store_true", help="time steps by the processor time of this process")
    given = parser.parse_args()
    clock = time.process_time if given.busy else time.perf_counter
    with mock.patch.object(HostClock.__init__, "__defaults__", (clock,)):
        sys.exit(main(given.repeats, clock))
