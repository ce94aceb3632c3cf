"""A race between recipes: which ones leave early, and which one leads.

    race = Race(names, folders)
    interleave(members, block, on_progress, race.keep)      # called after each round
    race.out                                         # {2: "skipped its last 20 steps"}
    ranked([[fp32], [bf16], [fp16]])                 # places, fastest first

A recipe leaves if it does not train (non-finite losses, persistently skipped steps) or is surely slower than the
fastest. Among recipes of indistinguishable speed, the simplest ranks first, which is the one named first.
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Sequence
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
from amp_core.tune.evidence import may_be_faster, measured_row, speed
from amp_core.tune.options import Candidate
from amp_core.tune.state import FIRST_STEP_ONLY, Search

STUCK_STEPS = 20
"""Consecutive steps without an update after which a scaler does not recover: the loss scale was divided by 2^20."""
MAX_SKIPPED_FRAC = 0.5
"""A recipe that skips a larger share of its steps does not train."""
FAR_SLOWER_RATIO = 4.0
FAR_SLOWER_BLOCKS = 3
"""A recipe that takes `FAR_SLOWER_RATIO` times as long as the fastest in each of its last `FAR_SLOWER_BLOCKS` blocks
leaves at once: other work does not slow one recipe that much three times, and not the other."""
MIN_RACE_BLOCKS = 5
"""Fewest pairs of blocks by whose interval a recipe leaves. Of fewer, a burst of other work may hit each."""
INTERIM_BLOCKS = (7, 10, 14, 20, 28, 40, 56, 80, 112, 160, 200, 300, 450, 600)
"""Rounds after which speeds are tested. Each test may err, so there are few (Armitage, McPherson and Rowe, "Repeated
significance tests on accumulating data", 1969), at `evidence.CONFIDENCE`."""
RACE_STEPS = (60, 2000)
"""Least and most steps of a race. Fewer give too few blocks for a statement on speed (`ratios.MIN_BLOCKS`). It ends as
soon as the speeds are decided; a busy machine needs many blocks for that."""
RACE_FRAC = 0.3
"""Share of the remaining budget planned for the race of precisions."""


@dataclass(frozen=True)
class RaceResult:
    """The result of a race."""

    order: list[Candidate]
    """The usable recipes, fastest first."""
    runs: dict[str, Run]
    """The runs of all recipes that started, by name."""


def race(
    search: Search,
    stage: str,
    candidates: Sequence[Candidate],
    share: float,
    most: int | None = None,
    *,
    even: bool = False,
) -> RaceResult:
    """Train the candidates interleaved for at most `most` steps, and add a row for each. The first is the baseline;
    `even`: it too is slower than another only where the whole interval lies beyond the margin.

    Raises `RunError` if the baseline fails.
    """
    names, budget = [c.name for c in candidates], search.budget
    steps = budget.steps(names, share, RACE_STEPS[0], most or RACE_STEPS[1])
    search.on_progress(f"{', '.join(names)} race for up to {steps} steps")
    folders = [search.into / stage / name for name in names]
    configs = [
        dataclasses.replace(c.config, steps=steps, every=FIRST_STEP_ONLY, profile=None, evaluate=False)
        for c in candidates
    ]
    block = default_block(steps)
    watcher = Race(names, folders, over=lambda: budget.left <= 0, block_steps=block, even=even)
    members = [(n, Member(c, f)) for n, c, f in zip(names, configs, folders, strict=True)]
    codes = search.train(members, block, watcher.keep)
    runs = watcher.judge()  # judge again after the last round
    for place, code in enumerate(codes):
        if place not in runs:
            watcher.out.setdefault(place, f"failed before its first step (exit code {code})")
    baseline = runs.get(0)
    if baseline is None or 0 in watcher.out:
        raise RunError(f"{names[0]} itself fails: {watcher.out.get(0)}; fix that first")
    for place, run in runs.items():
        budget.took(names[place], run)
    for place, candidate in enumerate(candidates):
        own = [runs[place]] if place in runs else []
        out = watcher.out.get(place, "")
        search.add(measured_row(candidate, stage, names[0], [baseline], own, search.into, out=out))
    usable = [place for place in runs if not broken(watcher.out.get(place, ""))]
    left = {at for at, place in enumerate(usable) if place in watcher.out}
    order = ranked([[runs[place]] for place in usable], left, even=even)
    return RaceResult([candidates[usable[i]] for i in order], {names[place]: run for place, run in runs.items()})


class Race:
    """Judges the runs of a race while they train. The first is the baseline: it stays as long as any other does."""

    def __init__(
        self,
        names: Sequence[str],
        folders: Sequence[Path],
        over: Callable[[], bool],
        block_steps: int = 1,
        *,
        even: bool = False,
    ) -> None:
        self._names, self._folders, self.over = names, folders, over
        self._block_steps, self._even = block_steps, even
        self._rounds = 0
        self.out: dict[int, str] = {}
        """By index, why a recipe left."""

    def keep(self, done: int) -> set[int]:
        """Indices of the recipes that continue; none once every speed relative to the fastest is decided."""
        if self.over():
            return set()
        before, self._rounds = self._rounds, done // self._block_steps
        due = any(before < rounds <= self._rounds for rounds in INTERIM_BLOCKS)
        runs = self.judge(speeds=due)
        going = {i for i in runs if i not in self.out}  # one without a run failed before its first step
        if 0 in self.out or len(going) < 2:  # no baseline, or nothing to compare with it
            return set()
        return set() if due and _order_decided([runs[i] for i in sorted(going)], even=self._even) else going

    def judge(self, *, speeds: bool = True) -> dict[int, Run]:
        """Update `out`, and return the runs so far by index. `speeds`: slow recipes leave too."""
        runs = {i: run for i in range(len(self._folders)) if (run := self.run(i)) is not None}
        for place, run in runs.items():
            if place not in self.out and (why := failure_reason(run)):
                self.out[place] = why
        going = [i for i in runs if i not in self.out]
        order = ranked([[runs[i]] for i in going], even=self._even)
        if order:
            lead = going[order[0]]
            for place in going:
                why = slower_reason(runs[lead], runs[place], self._names[lead], tested=speeds)
                if place not in (0, lead) and why:
                    self.out[place] = why
        return runs

    def unbroken(self, done: int) -> set[int]:  # noqa: ARG002
        """Indices of the recipes that continue where speed does not matter: all that train."""
        if self.over():
            return set()
        return {i for i in range(len(self._folders)) if (run := self.run(i)) is not None and not failure_reason(run)}

    def run(self, place: int) -> Run | None:
        """The run of a recipe; None if it never started."""
        try:
            return load_run(self._folders[place])
        except RunError:
            return None


def failure_reason(run: Run) -> str:
    """Why this run does not train; empty if it does so far."""
    frame = attempts(run)
    if run.status == "failed":
        return f"failed: {run.end_reason or 'no reason given'}"
    broken = (frame["has_loss"] & ~np.isfinite(frame["loss"])).to_numpy()
    skipped = frame["skipped"].to_numpy(dtype=bool)
    if not scaler_enabled(run):
        return f"the loss is not finite from step {int(broken.argmax())} on" if broken.any() else ""
    stuck = broken | skipped
    if len(stuck) >= STUCK_STEPS and stuck[-STUCK_STEPS:].all():
        what = "the loss is not finite" if broken[-STUCK_STEPS:].any() else "the scaler skipped every step"
        return f"{what} in its last {STUCK_STEPS} steps"
    if len(skipped) >= 2 * STUCK_STEPS and skipped.mean() > MAX_SKIPPED_FRAC:
        return f"the scaler skipped {formatting.percent(float(skipped.mean()))} of its steps"
    return ""


def slower_reason(lead: Run, run: Run, name: str, *, tested: bool = True) -> str:
    """Why `run` is surely slower than `lead`, called `name`; empty if it is not. Without `tested`, only one that is far
    slower is."""
    block = ratios.took_turns(lead, run)
    if block is not None:
        times = [_series(one) for one in (lead, run)]
        blocks = ratios.paired_blocks(times[0], times[1], block)[-FAR_SLOWER_BLOCKS:]
        if len(blocks) == FAR_SLOWER_BLOCKS and (blocks < 1 / FAR_SLOWER_RATIO).all():
            return f"slower than {name}: {_times(float(np.median(blocks)))} its speed"
    ratio = speed([(lead, run)]) if tested else ratios.UNKNOWN
    return f"slower than {name}: {_times(ratio.value)} its speed" if _clearly_slower(ratio) else ""


def ranked(runs: Sequence[Sequence[Run]], slow: Collection[int] = (), *, even: bool = False) -> list[int]:
    """Indices of recipes, fastest first; among equally fast ones, the first named. Untimed recipes come last.

    `runs` holds the runs of each recipe in the order of seeds. Those in `slow` left the race as slower: they equal no
    faster one, however few their blocks. The first is the baseline, unless `even`.
    """
    against_first = [speed(list(zip(runs[0], one, strict=False))).value if runs[0] else math.nan for one in runs]
    if runs:
        against_first[0] = 1.0
    left = [i for i in range(len(runs)) if math.isfinite(against_first[i])]
    order = []
    while left:
        top = max(left, key=lambda i: against_first[i])
        alike = [
            i
            for i in left
            if i == top or (i not in slow and not _surely_slower(runs[top], runs[i], baseline=i == 0 and not even))
        ]
        order.append(min(alike))
        left.remove(order[-1])
    return order + [i for i in range(len(runs)) if i not in order]


def _order_decided(runs: Sequence[Run], *, even: bool = False) -> bool:
    """Whether no other can be faster than the leader, so that more steps change nothing."""
    lead = runs[ranked([[run] for run in runs], even=even)[0]]
    return not any(may_be_faster(speed([(lead, run)])) for run in runs if run is not lead)


def _surely_slower(lead: Sequence[Run], other: Sequence[Run], *, baseline: bool) -> bool:
    ratio = speed(list(zip(lead, other, strict=False)))
    return ratio.speed_verdict == "slower" if baseline else _clearly_slower(ratio)


def _clearly_slower(ratio: ratios.Ratio) -> bool:
    """Whether the whole interval lies beyond the margin."""
    return ratio.blocks >= MIN_RACE_BLOCKS and ratio.high < 1 / (1 + ratios.SAME_SPEED_FRAC)


def broken(out: str) -> bool:
    """Whether a recipe left for another reason than being slow: a slow one may still be the fastest that trains."""
    return bool(out) and not out.startswith("slower")


def _series(run: Run) -> "pd.Series[float]":
    times = ratios.timed(run)
    return pd.Series(times.step_ms, index=times.step)


def _times(ratio: float) -> str:
    return f"{formatting.number(ratio)} ×"
