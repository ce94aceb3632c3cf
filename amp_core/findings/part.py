"""A part of a step that no saving tells, as a sentence.

>>> Part("aten::index_put_ takes 34 % of the step, as it writes to scattered places.", 0.34, "aten::index_put_")
"""

from dataclasses import dataclass

from amp_core.analysis.performance.kernels import window_rows
from amp_core.store.run import Run

MIN_FIRST_FRAC = 0.3
"""Share of the step from which a part comes first if nothing tells that all of it could be saved."""


@dataclass(frozen=True)
class Part:
    """A part of a step."""

    sentence: str
    frac: float
    """Its share of the step."""
    where: str = ""
    """The operator that it is of; empty for several."""
    it: str = "it"
    """What the next sentence calls it."""
    least: float = MIN_FIRST_FRAC
    """From which share of the step it comes first, if it is larger than the largest saving."""
    is_saving: bool = False
    """Whether it is a saving too, beside which the largest one alone is told."""


def steps_or_windows(run: Run) -> float:
    """The steps of a trace, or its windows where it marks none: what times of all of it are divided by."""
    windows = window_rows(run)
    return float(windows["steps"].fillna(0.0).sum()) or float(len(windows))
