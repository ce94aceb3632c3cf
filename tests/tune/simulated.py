"""Searches on a simulated busy machine, where the right recipe is planted.

    result = simulated_search(folder, CASES["bf16"], load="bursts", seed=3)
    outcome(CASES["bf16"], result)              # "right", "undecided" or "wrong"

Every decision is that of the real search. Its trainings are made up: losses with the spread of seeds, and step times on
a machine whose speed drifts and which other work slows in bursts, in the order in which `interleave` takes turns.
`python -m tests.tune.simulated 200` counts the outcomes of 200 searches: two seconds of processor time each.
"""

import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np

from amp_core.train import train
from amp_core.train.turns.interleave import Member, order_of, turns_of
from amp_core.tune.race import INTERIM_BLOCKS
from amp_core.tune.result import Tuned
from amp_core.tune.search import tune
from tests.synthetic import write_rows
from tests.tune.workloads import config, set_times

TICK_S = 0.005
LOADS = ("quiet", "drift", "bursts", "drift and bursts")
CROWD = "crowd"
"""A dozen busy processes on two cores: each step is delayed by chance, by as much as it takes."""


@dataclass(frozen=True)
class Case:
    """A workload: milliseconds per step and what goes wrong by recipe, and the recipes that are right."""

    step_ms: Mapping[str, float]
    right: Collection[str]
    bias: Mapping[str, float] = field(default_factory=dict)
    """By how many standard deviations over seeds a recipe's loss is too high."""
    broken: Collection[str] = ()
    """Recipes with losses that are not finite."""


CASES = {
    "equal 16 bits": Case({"fp32": 40, "bf16": 15, "fp16": 15}, {"bf16"}),
    "slightly faster rival": Case({"fp32": 40, "bf16": 16.2, "fp16": 15}, {"fp16"}),
    "modest gain": Case({"fp32": 40, "bf16": 30, "fp16": 30}, {"bf16"}),
    "fp16 only": Case({"fp32": 40, "bf16": 60, "fp16": 15}, {"fp16"}),
    "fp16 breaks": Case({"fp32": 40, "bf16": 25, "fp16": 15}, {"bf16"}, broken={"fp16"}),
    "fp16 learns worse": Case({"fp32": 40, "bf16": 25, "fp16": 15}, {"bf16"}, bias={"fp16": 5}),
    "slower": Case({"fp32": 20, "bf16": 30, "fp16": 400}, {"fp32"}),
    "no gain": Case({"fp32": 40, "bf16": 40, "fp16": 60}, {"fp32"}),
    "gain without parity": Case({"fp32": 40, "bf16": 20, "fp16": 30}, {"fp32"}, bias={"bf16": 5, "fp16": 5}),
    "long steps": Case({"fp32": 400, "bf16": 250, "fp16": 300}, {"bf16"}),
    "short steps": Case({"fp32": 4, "bf16": 3, "fp16": 2}, {"fp16"}),
}


def simulated_search(folder: Path, case: Case, load: str, seed: int, budget_s: float = 600.0) -> Tuned:
    """The result of one search in `folder`."""
    machine = _Machine(case, load, seed, budget_s)
    settings = config("healthy", steps=100, seed=seed)
    return tune(settings, folder, budget_s, on_progress=lambda _: None, trainer=machine, clock=lambda: machine.now)


def outcome(case: Case, result: Tuned) -> str:
    """`right`, `wrong`, or `undecided` where the search itself says so."""
    if not result.confirmed:
        return "undecided"
    return "right" if str(result.config["precision"]) in case.right else "wrong"


class _Machine:
    """A trainer, see `amp_core.tune.state.Trainer`."""

    def __init__(self, case: Case, load: str, seed: int, budget_s: float) -> None:
        self._case, self._until = case, budget_s
        self._random = np.random.default_rng([seed, (*LOADS, CROWD).index(load)])
        self._rough = 0.5 if load == CROWD else 0.08
        self._slowdown = _slowdown(self._random, load, 2 * budget_s)
        self._process = {name: float(self._random.uniform(0.99, 1.01)) for name in case.step_ms}
        self._trainings = 0
        self._written: dict[Path, tuple[int, int]] = {}  # training and steps
        self.now = 0.0

    def __call__(
        self,
        members: Sequence[Member],
        block_steps: int,
        reported: Callable[[int], None],
        keep: Callable[[int], Collection[int]] | None = None,
    ) -> list[int]:
        self._trainings += 1
        self.now += 3.0 * len(members)
        first = members[0].config
        turns = turns_of(first, block_steps)
        times: list[list[float]] = [[] for _ in members]
        going, done = set(range(len(members))), 0
        for at, order in enumerate(order_of(len(members), len(turns), first.seed), start=1):
            for place in order:
                if place in going:
                    times[place] += [self._step(members[place].config.precision) for _ in range(turns[at - 1])]
            done += turns[at - 1]
            over = self.now > self._until or at == len(turns)
            if keep is not None and (at in INTERIM_BLOCKS or over):
                for place in going:
                    self._write(members[place], times[place], block_steps)
                going &= {*keep(done)}
            if not going:
                break
        for member, ms in zip(members, times, strict=True):
            self._write(member, ms, block_steps)
        return [0] * len(members)

    def _step(self, name: str) -> float:
        now = self._slowdown[int(self.now / TICK_S) % len(self._slowdown)]
        rough = np.exp(self._rough * self._random.standard_normal()) * (4 if self._random.random() < 0.01 else 1)
        ms = float(self._case.step_ms[name] * self._process[name] * now * rough)
        self.now += ms / 1e3
        return ms

    def _write(self, member: Member, ms: Sequence[float], block_steps: int) -> None:
        name, seed, steps = member.config.precision, member.config.seed, np.arange(len(ms))
        of_seed, own = np.random.default_rng(seed), np.random.default_rng([seed, sum(map(ord, name))])
        end = 2.0 + 0.02 * of_seed.standard_normal() + 0.02 * self._case.bias.get(name, 0.0)
        end += 0.003 * own.standard_normal() if name != "fp32" else 0.0
        loss = end + 0.05 * of_seed.standard_normal(10_000)[: len(ms)]
        loss = np.full(len(ms), np.nan) if name in self._case.broken else loss
        columns = {"step": steps, "loss": loss, "step_ms": np.array(ms), "samples": np.full(len(ms), 16)}
        turns = {"id": f"{self._trainings}", "block_steps": block_steps}
        if self._written.get(member.folder) == (self._trainings, len(ms)) and member.folder.exists():
            return  # of a training that ended earlier
        self._written[member.folder] = self._trainings, len(ms)
        shutil.rmtree(member.folder, ignore_errors=True)
        if member.level == "full":  # the probe run: its tensors are real
            shutil.copytree(_probe(), member.folder)
            set_times(member.folder, np.array(ms))
        else:
            write_rows(member.folder, steps=columns, config=member.config.to_dict() | {"comparison": turns})


def _slowdown(random: np.random.Generator, load: str, seconds: float) -> np.ndarray:
    """How many times as long a step takes, every `TICK_S`."""
    ticks = int(seconds / TICK_S)
    slowdown = np.ones(ticks)
    if "drift" in load:
        waves = np.sin(2 * np.pi * np.arange(ticks) * TICK_S / random.uniform(30, 200) + random.uniform(0, 6))
        slowdown *= 1 + 0.3 * waves
    at, busy = 0, bool(random.random() < 0.5)
    while "bursts" in load and at < ticks:
        length = 1 + int(random.exponential(random.choice([0.2, 1.0, 5.0])) / TICK_S)
        slowdown[at : at + length] *= random.choice([1.5, 2.0, 3.0]) if busy else 1.0
        at, busy = at + length, not busy
    return slowdown


@cache
def _probe() -> Path:
    folder = Path(tempfile.mkdtemp()) / "probe"
    train(config("healthy", steps=30, every=5, evaluate=False), folder, level="full")
    return folder


def outcomes(folder: Path, searches: int) -> Counter[str]:
    """How many of so many searches, over all cases and loads in turn, were right, wrong and undecided."""
    names, counts = [*CASES], Counter[str]()
    for seed in range(searches):
        case, load = CASES[names[seed % len(names)]], LOADS[seed // len(names) % len(LOADS)]
        counts[outcome(case, simulated_search(folder / f"{seed}", case, load, seed))] += 1
    return counts


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        print(dict(outcomes(Path(temporary), int(sys.argv[1]))))
