"""A race between recipes: who leaves it early, and who leads.

    race = Race(names, folders)
    interleave(members, block, on_progress, race.keep)      # asked after each round
    race.out                                         # {2: "skipped its last 20 steps"}
    ranked([[fp32], [bf16], [fp16]])                 # places, fastest first

A recipe leaves where its numbers are broken beyond repair, and where it is surely slower than the fastest. Among those
that cannot be told apart the simplest, the one named first, goes first: what gains nothing should not be added.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from amp_core.analysis.comparison import ratios
from amp_core.analysis.steps import attempts, scaler_enabled
from amp_core.schema import RunError
from amp_core.store.run import Run, load_run
from amp_core.text import formatting
from amp_core.train.turns.interleave import default_block
from amp_core.train.turns.member import Member
from amp_core.tune.evidence import measured
from amp_core.tune.options import Candidate
from amp_core.tune.state import FIRST_STEP_ONLY, Search

LAST = 20
"""Steps in a row without an update after which a scaler will not find a scale any more: it has been divided by 2^20."""
MAX_SKIPPED = 0.5
"""Share of skipped steps from which on a recipe does not train."""
CLEARLY_SLOWER_RATIO = 1.5
FAR_BLOCKS = 3
"""A recipe that needs `FAR` times as long as the fastest in each of its last `FAR_BLOCKS` blocks leaves at once; one
nearer needs as many blocks as any claim on speed (`ratios.MIN_BLOCKS`)."""
RACE_STEPS = (60, 200)
"""Least and most steps of a race. With fewer, its blocks are too few for a claim on speed (`ratios.MIN_BLOCKS`)."""
RACE_SHARE = 0.3
"""Of what is left of the budget, what the race of precisions is planned to take."""


@dataclass(frozen=True)
class Raced:
    """How a race ended."""

    order: list[Candidate]
    """Those that can be used, fastest first."""
    runs: dict[str, Run]
    """Of all that began, by name."""


def race(search: Search, stage: str, candidates: Sequence[Candidate], share: float) -> Raced:
    """Let them race in turns, and keep a row of each. The first is the yardstick.

    Raises `RunError` where the yardstick itself fails.
    """
    names, budget = [c.name for c in candidates], search.budget
    steps = budget.steps(names, share, *RACE_STEPS)
    search.on_progress(f"{', '.join(names)} race for up to {steps} steps")
    folders = [search.into / stage / name for name in names]
    configs = [
        dataclasses.replace(c.config, steps=steps, every=FIRST_STEP_ONLY, profile=None, evaluate=False)
        for c in candidates
    ]
    watcher = Race(names, folders, over=lambda: budget.left <= 0)
    members = [(n, Member(c, f)) for n, c, f in zip(names, configs, folders, strict=True)]
    codes = search.train(members, default_block(steps), watcher.keep)
    runs = watcher.judge()  # once more: the last round's end is seen too, and who failed has written why
    for place, code in enumerate(codes):
        if place not in runs:
            watcher.out.setdefault(place, f"failed before its first step (exit code {code})")
    yardstick = runs.get(0)
    if yardstick is None or 0 in watcher.out:
        raise RunError(f"{names[0]} itself fails: {watcher.out.get(0)}; mend that first")
    for place, run in runs.items():
        budget.took(names[place], run)
    for place, candidate in enumerate(candidates):
        own = [runs[place]] if place in runs else []
        out = watcher.out.get(place, "")
        search.add(measured(candidate, stage, names[0], [yardstick], own, search.into, out=out))
    usable = [place for place in runs if not broken(watcher.out.get(place, ""))]
    order = ranked([[runs[place]] for place in usable])
    return Raced([candidates[usable[i]] for i in order], {names[place]: run for place, run in runs.items()})


class Race:
    """Watches the runs of a race while they are made. The first is the yardstick: it stays as long as another does."""

    def __init__(self, names: Sequence[str], folders: Sequence[Path], over: Callable[[], bool]) -> None:
        self._names, self._folders, self.over = names, folders, over
        self.out: dict[int, str] = {}
        """Who left, and why."""

    def keep(self, done: int) -> set[int]:  # noqa: ARG002
        """The places that go on; none once it is told of all how fast they are beside the fastest."""
        if self.over():
            return set()
        runs = self.judge()
        going = {i for i in runs if i not in self.out}  # one without a run failed before its first step
        if 0 in self.out or len(going) < 2:  # nothing to hold the others against, or no others
            return set()
        return set() if _settled([runs[i] for i in sorted(going)]) else going

    def judge(self) -> dict[int, Run]:
        """See who is to leave; the runs so far."""
        runs = {i: run for i in range(len(self._folders)) if (run := self.run(i)) is not None}
        for place, run in runs.items():
            if place not in self.out and (why := trouble(run)):
                self.out[place] = why
        going = [i for i in runs if i not in self.out]
        order = ranked([[runs[i]] for i in going])
        if order:
            lead = going[order[0]]
            for place in going:
                if place not in (0, lead) and (why := slower(runs[lead], runs[place], self._names[lead])):
                    self.out[place] = why
        return runs

    def unbroken(self, done: int) -> set[int]:  # noqa: ARG002
        """Who goes on in a training that is not about speed: all whose numbers are not broken."""
        if self.over():
            return set()
        return {i for i in range(len(self._folders)) if (run := self.run(i)) is not None and not trouble(run)}

    def run(self, place: int) -> Run | None:
        """The run of a member; None where it never began."""
        try:
            return load_run(self._folders[place])
        except RunError:
            return None


def trouble(run: Run) -> str:
    """Why this run does not train; empty where it does, so far."""
    frame = attempts(run)
    if run.status == "failed":
        return f"failed: {run.end_reason or 'no reason given'}"
    broken = (frame["has_loss"] & ~np.isfinite(frame["loss"])).to_numpy()
    skipped = frame["skipped"].to_numpy(dtype=bool)
    if not scaler_enabled(run):
        return f"the loss is not finite from step {int(broken.argmax())} on" if broken.any() else ""
    stuck = broken | skipped
    if len(stuck) >= LAST and stuck[-LAST:].all():
        what = "the loss is not finite" if broken[-LAST:].any() else "the scaler skipped every step"
        return f"{what} in its last {LAST} steps"
    if len(skipped) >= 2 * LAST and skipped.mean() > MAX_SKIPPED:
        return f"the scaler skipped {formatting.percent(float(skipped.mean()))} of its steps"
    return ""


def slower(lead: Run, run: Run, name: str) -> str:
    """Why `run` is surely slower than `lead`, called `name`; empty where that is not sure."""
    ratio = ratios.speed_ratio([(lead, run)])
    if ratio.enough and _clearly_slower(ratio):
        return f"slower than {name}: {_times(ratio.value)} its speed"
    block = ratios.took_turns(lead, run)
    if block is None:
        return ""
    times = [_series(one) for one in (lead, run)]
    blocks = ratios.paired_blocks(times[0], times[1], block)[-FAR_BLOCKS:]
    if len(blocks) == FAR_BLOCKS and (blocks < 1 / CLEARLY_SLOWER_RATIO).all():
        return f"slower than {name}: {_times(float(np.median(blocks)))} its speed"
    return ""


def ranked(runs: Sequence[Sequence[Run]]) -> list[int]:
    """Places of recipes, each with its runs in the order of seeds: fastest first, of equally fast ones the first named.

    Runs that were never timed come last.
    """
    against_first = [
        ratios.speed_ratio(list(zip(runs[0], one, strict=False))).value if runs[0] else math.nan for one in runs
    ]
    if runs:
        against_first[0] = 1.0
    left = [i for i in range(len(runs)) if math.isfinite(against_first[i])]
    order = []
    while left:
        top = max(left, key=lambda i: against_first[i])
        alike = [i for i in left if i == top or not _surely_slower(runs[top], runs[i], yardstick=i == 0)]
        order.append(min(alike))
        left.remove(order[-1])
    return order + [i for i in range(len(runs)) if i not in order]


def _settled(runs: Sequence[Run]) -> bool:
    """Whether more steps would not change who leads, nor what is known of the others' speed beside it."""
    lead = runs[ranked([[run] for run in runs])[0]]
    for run in runs:
        ratio = ratios.speed_ratio([(lead, run)])
        decided = _clearly_slower(ratio) or ratio.speed_verdict == "no difference seen"
        if run is not lead and not (ratio.enough and decided):
            return False
    return True


def _surely_slower(lead: Sequence[Run], other: Sequence[Run], *, yardstick: bool) -> bool:
    ratio = ratios.speed_ratio(list(zip(lead, other, strict=False)))
    return ratio.speed_verdict == "slower" if yardstick else _clearly_slower(ratio)


def _clearly_slower(ratio: ratios.Ratio) -> bool:
    """Whether all of the interval lies beyond the margin: it is asked after each round, and of each pair, so that an
    interval which leaves out 1 now and then is to be expected of recipes that are equally fast."""
    return ratio.speed_verdict == "slower" and ratio.high < 1 / (1 + ratios.SAME_SPEED_FRAC)


def broken(out: str) -> bool:
    """Whether a recipe left for another reason than being slow: a slow one may still be the fastest that trains."""
    return bool(out) and not out.startswith("slower")


def _series(run: Run) -> "pd.Series[float]":
    times = ratios.timed(run)
    return pd.Series(times.step_ms, index=times.step)


def _times(ratio: float) -> str:
    return f"{formatting.number(ratio)} ×"
