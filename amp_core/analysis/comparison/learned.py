"""Whether runs learned the same: ends of their loss curves over what they share, and the verdict in words.

    ends = final(attempts(run), extent)
    learning("fp32", [run_a, run_b, run_c], "bf16", [...])

`parity.py` has the rules; here they are given numbers and words.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd

from amp_core.analysis.comparison.parity import FEW_SEEDS, Judged, judge

GROSS = 0.05
"""A final loss worse by more than this share, and by more than its own noise, is worse whatever the seed."""
TASK = ("workload", "size", "data")
"""Settings that must agree before losses can be held against each other."""


@dataclass(frozen=True)
class Learned:
    """One run: its attempts, its seed, its task and its loss on held-out data (NaN where there is none)."""

    frame: pd.DataFrame
    seed: int
    task: tuple[str, ...]
    eval_loss: float


@dataclass(frozen=True)
class Final:
    """The end of a loss curve over the common part: mean and step-to-step noise of its last tenth."""

    mean: float
    noise: float
    broken_at: int | None
    """First step whose recorded loss was not finite."""


@dataclass(frozen=True)
class Extent:
    """How far runs are compared: their first so many steps or, where batches differ in size, samples."""

    count: float
    by: Literal["steps", "samples"]

    def of(self, frame: pd.DataFrame) -> pd.DataFrame:
        """The part of a run within it."""
        if self.by == "steps":
            return frame.iloc[: int(self.count)]
        return frame[frame["samples"].cumsum() <= self.count]

    def __str__(self) -> str:
        return f"{int(self.count):,} common {self.by}"


def common(frames: Sequence[pd.DataFrame]) -> Extent:
    """What all of the runs did."""
    by_samples = all(len(f) and f["samples"].notna().all() for f in frames)
    if by_samples and len({float(f["samples"].median()) for f in frames}) > 1:
        return Extent(min(float(f["samples"].sum()) for f in frames), "samples")
    return Extent(min(len(f) for f in frames), "steps")


def final(frame: pd.DataFrame) -> Final:
    """The end of a curve; NaN with fewer than two losses, or one that is not finite, in its last tenth."""
    frame = frame[frame["has_loss"]]
    loss = frame["loss"].to_numpy()
    broken = frame["step"].to_numpy()[~np.isfinite(loss)]
    at = int(broken[0]) if len(broken) else None
    tail = loss[-max(5, len(loss) // 10) :]
    if len(tail) < 2 or not np.isfinite(tail).all():
        return Final(np.nan, np.nan, at)
    # Differences of neighbours, not deviations from the mean: a falling curve is not noise.
    return Final(float(np.mean(tail)), float(np.std(np.diff(tail)) / np.sqrt(2)), at)


def learning(
    name: str, first: Sequence[Learned], this: Sequence[Learned], *, repeatedly: bool = False
) -> tuple[str, Judged | None]:
    """The verdict on the recipe of `this` against that of `first`, called `name`, and the numbers of the final loss.

    `repeatedly` as in `judge`.
    """
    unlike = [k for k, a, b in zip(TASK, first[0].task, this[0].task, strict=True) if a != b]
    if unlike:
        return f"not comparable: {unlike[0]} is not the same as in {name}", None
    extent = common([run.frame for run in (*first, *this)])
    before = {run.seed: final(extent.of(run.frame)) for run in first}
    after = {run.seed: final(extent.of(run.frame)) for run in this}
    broken = [end.broken_at for end in after.values() if end.broken_at is not None]
    if broken and all(end.broken_at is None for end in before.values()):
        return f"worse: the loss is not finite from step {min(broken)} on, that of {name} is", None
    if not all(np.isfinite(end.mean) for end in (*before.values(), *after.values())):
        return "cannot tell: too few steps with a finite loss", None
    found = judge(_means(before), _means(after), repeatedly=repeatedly)
    said = f"final loss {_change(found.deviation, found.reference)} against {name}, over {extent}"
    if _identical(first, this, extent):
        return f"within noise: the loss is the same at each step, bit for bit ({said})", found
    step_noise = max(end.noise for end in (*before.values(), *after.values()))
    if len(before) < FEW_SEEDS:
        if found.deviation > max(GROSS * abs(found.reference), 2 * step_noise):
            return f"worse: {said}, more than the step-to-step noise of ±{step_noise:.2g}", found
        return f"cannot tell: run more seeds ({said})", found
    held_out = _held_out(first, this, repeatedly)
    verdicts = [one.verdict for one in (found, held_out) if one is not None]
    details = [_detail(said, found, name)]
    if held_out is not None:
        details.append(f"held-out loss {_change(held_out.deviation, held_out.reference)}: {held_out.verdict}")
    verdict = _together(verdicts)
    return f"{verdict}{': run more seeds' if verdict == 'cannot tell' else ''} ({'; '.join(details)})", found


def _means(ends: Mapping[int, Final]) -> dict[int, float]:
    return {seed: end.mean for seed, end in ends.items()}


def _together(verdicts: Sequence[str]) -> str:
    """One verdict of several metrics: one that is worse decides, and one of which nothing is known spoils the rest."""
    for verdict in ("worse", "cannot tell", "better"):
        if verdict in verdicts:
            return verdict
    return "within noise"


def _held_out(first: Sequence[Learned], this: Sequence[Learned], repeatedly: bool) -> Judged | None:
    """The held-out loss judged; None unless all runs have it and are of one length: more training lowers it."""
    runs = (*first, *this)
    if len({len(run.frame) for run in runs}) > 1 or not all(np.isfinite(run.eval_loss) for run in runs):
        return None
    before, after = ({run.seed: run.eval_loss for run in one} for one in (first, this))
    return judge(before, after, repeatedly=repeatedly)


def _identical(first: Sequence[Learned], this: Sequence[Learned], extent: Extent) -> bool:
    """Whether each of `this` has its seed's partner, or the only reference, to the last bit at every step."""
    for run in this:
        partner = next((one for one in first if one.seed == run.seed), first[0] if len(first) == 1 else None)
        if partner is None:
            return False
        ours, theirs = (extent.of(one.frame)["loss"].to_numpy() for one in (run, partner))
        if len(ours) < 2 or not np.array_equal(ours, theirs):
            return False
    return True


def _detail(said: str, found: Judged, name: str) -> str:
    share = 100 / abs(found.reference) if found.reference else np.nan
    spread = f"±{found.noise * share:.2g} %"
    interval = ""
    if np.isfinite(found.low) and np.isfinite(share):
        interval = f", 95 % interval {found.low * share:+.2g} to {found.high * share:+.2g} %"
    return f"{said}{interval}; from seed to seed {name} itself differs by {spread}"


def _change(deviation: float, reference: float) -> str:
    share = deviation / abs(reference) if reference else np.nan
    percent = 100 * share if abs(share) >= 5e-4 else 0.0  # no "-0.0"
    return f"{percent:+.1f} %"
