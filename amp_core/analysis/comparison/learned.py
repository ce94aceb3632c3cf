"""Parity of learning: ends of loss curves over their common part, and the result in words.

    ends = final(attempts(run), extent)
    learning("fp32", [run_a, run_b, run_c], "bf16", [...])

`parity.py` has the statistics; this module supplies the numbers and the words.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd

from amp_core.analysis.comparison.parity import MIN_SEEDS, ParityTest, judge

GROSS_CHANGE_FRAC = 0.05
"""A final loss that is worse by more than this share, and by more than its own noise, is worse whatever the seed."""
APART_FRAC = 1.0
"""So is one that is worse by more than this share, if the losses of its last tenth lie above all of the other's,
however they scatter."""
TASK = ("workload", "size", "data")
"""Settings that must agree for losses to be comparable."""


@dataclass(frozen=True)
class Learned:
    """One run: its attempts, its seed, its task and its loss on held-out data (NaN if there is none)."""

    frame: pd.DataFrame
    seed: int
    task: tuple[str, ...]
    eval_loss: float


@dataclass(frozen=True)
class Final:
    """The end of a loss curve over the common part: mean, step-to-step noise and range of its last tenth."""

    mean: float
    noise: float
    broken_at: int | None
    """First step whose recorded loss was not finite."""
    low: float = np.nan
    high: float = np.nan
    """The lowest and the highest loss of the last tenth."""


@dataclass(frozen=True)
class Extent:
    """The common part of runs: a number of first steps or, where batch sizes differ, samples."""

    count: float
    by: Literal["steps", "samples"]

    def cut(self, frame: pd.DataFrame) -> pd.DataFrame:
        """The rows of a run within the common part."""
        if self.by == "steps":
            return frame.iloc[: int(self.count)]
        return frame[frame["samples"].cumsum() <= self.count]

    def __str__(self) -> str:
        return f"{int(self.count):,} common {self.by}"


def common(frames: Sequence[pd.DataFrame]) -> Extent:
    """The part that all of the runs have."""
    by_samples = all(len(f) and f["samples"].notna().all() for f in frames)
    if by_samples and len({float(f["samples"].median()) for f in frames}) > 1:
        return Extent(min(float(f["samples"].sum()) for f in frames), "samples")
    return Extent(min(len(f) for f in frames), "steps")


def final(frame: pd.DataFrame) -> Final:
    """The end of a curve; NaN with fewer than two losses, or one that is not finite, in its last tenth."""
    frame = frame[frame["has_loss"]]
    loss = frame["loss"].to_numpy()
    broken = frame["step"].to_numpy()[~np.isfinite(loss)]
    broken_at = int(broken[0]) if len(broken) else None
    tail = loss[-max(5, len(loss) // 10) :]
    if len(tail) < 2 or not np.isfinite(tail).all():
        return Final(np.nan, np.nan, broken_at)
    # Differences of neighbours, not deviations from the mean: a falling curve is not noise.
    noise = float(np.std(np.diff(tail)) / np.sqrt(2))
    return Final(float(np.mean(tail)), noise, broken_at, float(tail.min()), float(tail.max()))


def learning(
    name: str, first: Sequence[Learned], this: Sequence[Learned], *, repeatedly: bool = False
) -> tuple[str, ParityTest | None]:
    """The parity of the recipe of `this` with that of `first`, called `name`, and the test of the final loss.

    `repeatedly` as in `judge`.
    """
    unlike = [k for k, a, b in zip(TASK, first[0].task, this[0].task, strict=True) if a != b]
    if unlike:
        return f"not comparable: {unlike[0]} differs from {name}", None
    extent = common([run.frame for run in (*first, *this)])
    baseline = {run.seed: final(extent.cut(run.frame)) for run in first}
    recipe = {run.seed: final(extent.cut(run.frame)) for run in this}
    broken = [end.broken_at for end in recipe.values() if end.broken_at is not None]
    if broken and all(end.broken_at is None for end in baseline.values()):
        return f"worse: the loss is not finite from step {min(broken)} on, while that of {name} is", None
    if not all(np.isfinite(end.mean) for end in (*baseline.values(), *recipe.values())):
        return "cannot tell: too few steps with a finite loss", None
    test = judge(_means(baseline), _means(recipe), repeatedly=repeatedly)
    change = f"final loss {_change(test.deviation, test.baseline)} against {name}, over {extent}"
    if _identical(first, this, extent):
        return f"within noise: the loss is bitwise identical at every step ({change})", test
    step_noise = max(end.noise for end in (*baseline.values(), *recipe.values()))
    if len(baseline) < MIN_SEEDS:
        if test.deviation > max(GROSS_CHANGE_FRAC * abs(test.baseline), 2 * step_noise):
            return f"worse: {change}, more than the step-to-step noise of ±{step_noise:.2g}", test
        lowest, highest = min(end.low for end in recipe.values()), max(end.high for end in baseline.values())
        if lowest > highest and test.deviation > APART_FRAC * abs(test.baseline):
            return f"worse: {change}, and each of the last losses is above all of {name}", test
        return f"cannot tell: run more seeds ({change})", test
    held_out = _held_out(first, this, repeatedly)
    parities = [one.parity for one in (test, held_out) if one is not None]
    details = [_detail(change, test, name)]
    if held_out is not None:
        details.append(f"held-out loss {_change(held_out.deviation, held_out.baseline)}: {held_out.parity}")
    parity = _combined(parities)
    return f"{parity}{': run more seeds' if parity == 'cannot tell' else ''} ({'; '.join(details)})", test


def _means(ends: Mapping[int, Final]) -> dict[int, float]:
    return {seed: end.mean for seed, end in ends.items()}


def _combined(parities: Sequence[str]) -> str:
    """The parity over several metrics: any that is worse decides, then any that cannot be decided."""
    for parity in ("worse", "cannot tell", "better"):
        if parity in parities:
            return parity
    return "within noise"


def _held_out(first: Sequence[Learned], this: Sequence[Learned], repeatedly: bool) -> ParityTest | None:
    """The test of the held-out loss; None unless all runs have it and the same length, since more training lowers
    it."""
    runs = (*first, *this)
    if len({len(run.frame) for run in runs}) > 1 or not all(np.isfinite(run.eval_loss) for run in runs):
        return None
    before, after = ({run.seed: run.eval_loss for run in one} for one in (first, this))
    return judge(before, after, repeatedly=repeatedly)


def _identical(first: Sequence[Learned], this: Sequence[Learned], extent: Extent) -> bool:
    """Whether the losses of each run equal those of its seed's partner, or of the only baseline run, bit for bit."""
    for run in this:
        partner = next((one for one in first if one.seed == run.seed), first[0] if len(first) == 1 else None)
        if partner is None:
            return False
        ours, theirs = (extent.cut(one.frame)["loss"].to_numpy() for one in (run, partner))
        if len(ours) < 2 or not np.array_equal(ours, theirs):
            return False
    return True


def _detail(change: str, test: ParityTest, name: str) -> str:
    share = 100 / abs(test.baseline) if test.baseline else np.nan
    spread = f"±{test.noise * share:.2g} %"
    interval = ""
    if np.isfinite(test.low) and np.isfinite(share):
        interval = f", 95 % interval {test.low * share:+.2g} to {test.high * share:+.2g} %"
    return f"{change}{interval}; seed-to-seed noise of {name} {spread}"


def _change(deviation: float, reference: float) -> str:
    share = deviation / abs(reference) if reference else np.nan
    percent = 100 * share if abs(share) >= 5e-4 else 0.0  # no "-0.0"
    return f"{percent:+.1f} %"
