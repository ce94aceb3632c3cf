"""Rows of evidence: measurements of one recipe relative to another, as `Tried` and as text.

>>> row = measured_row(candidate, "race", "fp32", [run_fp32], [run_bf16], folder)
>>> in_words(row)
'  bf16: 2.48 × (2.37–2.55)'
"""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from amp_core.analysis import compare
from amp_core.analysis.comparison.answer import in_one_line
from amp_core.analysis.comparison.ratios import SAME_SPEED_FRAC, Ratio, speed_ratio
from amp_core.store.run import Run
from amp_core.text import formatting
from amp_core.tune.options import Candidate
from amp_core.tune.result import Tried

CONFIDENCE = 0.998
"""Of the intervals of speed. Each is tested some ten times, and each test sees most of the data of the one before: a
recipe that is no faster then passes as faster in less than one of 200 searches (`tests/tune/test_simulated.py`)."""


def speed(pairs: Sequence[tuple[Run, Run]]) -> Ratio:
    """Speed of the second run of each pair over the first, as a search tests it."""
    return speed_ratio(pairs, CONFIDENCE)


def may_be_faster(ratio: Ratio) -> bool:
    """Whether a recipe of this speed may be faster by a difference that counts."""
    if ratio.emulated or not math.isfinite(ratio.value):
        return False
    return not ratio.enough or not ratio.high <= 1 + 2 * SAME_SPEED_FRAC


def unmeasured_row(
    candidate: Candidate, stage: str, against: str, runs: Sequence[Run], into: Path, out: str = ""
) -> Tried:
    """A row that lists the runs, relative to the search's folder `into`, without measurements."""
    folders = tuple(Path(str(run.path)).relative_to(into).as_posix() for run in runs)
    steps = min((len(run.steps) for run in runs), default=0)
    row = Tried(candidate.name, stage, against, folders, steps, out=out, note=candidate.note)
    if candidate.name != against or not runs:
        return row
    one: dict[str, Any] = dict.fromkeys(("speed_ratio", "speed_ratio_low", "speed_ratio_high", "memory_ratio"), 1.0)
    return dataclasses.replace(row, speed_verdict="reference", **one)


def measured_row(
    candidate: Candidate,
    stage: str,
    against: str,
    first: Sequence[Run],
    runs: Sequence[Run],
    into: Path,
    *,
    pairs: Sequence[tuple[Run, Run]] = (),
    out: str = "",
) -> Tried:
    """The row of `runs` against the runs `first` of another recipe.

    Speed is taken from `pairs` of interleaved runs, else from all pairs in order. In the stage `confirm` parity is
    tested too, as one of repeated tests, since more seeds may follow.
    """
    row = unmeasured_row(candidate, stage, against, runs, into, out)
    if not runs or not first or candidate.name == against:
        return row
    ratio = speed(list(pairs) or list(zip(first, runs, strict=False)))
    measured_speed: dict[str, Any] = {
        "speed_ratio": ratio.value,
        "speed_ratio_low": ratio.low,
        "speed_ratio_high": ratio.high,
        "speed_verdict": ratio.speed_verdict,
    }
    recipe = compare([*first, *runs], repeatedly=True).recipes.iloc[1]
    measured_values = {str(name): value for name, value in recipe.items()} | measured_speed
    row = dataclasses.replace(row, **measured_speed, memory_ratio=float(measured_values["memory_ratio"]))
    if stage != "confirm":
        return row
    answer = in_one_line(measured_values).partition(": ")[2]
    numbers: dict[str, Any] = {
        name: float(measured_values[name]) for name in ("loss_change_frac", "loss_change_high", "noise_frac")
    }
    return dataclasses.replace(row, parity=str(measured_values["parity"]), answer=answer, **numbers)


def in_words(row: Tried) -> str:
    """One line of text for a row."""
    if row.speed_verdict == "reference":
        return f"  {row.name}: the baseline"
    parts = [formatting.ratio(row.speed_ratio, row.speed_ratio_low, row.speed_ratio_high)]
    if row.parity:
        parts.append(row.parity)
    if row.out and row.out != row.parity:
        parts.append(f"eliminated: {row.out}")
    return f"  {row.name}: {'; '.join(parts)}"
