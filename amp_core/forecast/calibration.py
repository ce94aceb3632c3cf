"""What a measured run says of the forecast of another: `ampscope forecast --calibrate RUN`.

>>> found = calibrate(measured, its_traces, traces)
>>> found.ratio, found.overlap, found.factor
(1.21, 0.91, 1.1)

A forecast is partly wrong by its operators: one whose kernels are slower than assumed is so in every model that has it,
and says nothing of others. Over pairs of published steps that one source measured on one GPU
(`tests/benchmarks/published_steps.py`), correcting by half of the other's deviation takes the error from 9.1 to 8.6 %
where both spend 90 % or more of their time in the same operators, and from 9.9 to 10.5 % where it is between 50 and
80 %. So a run corrects a similar step, and by half of its deviation, as its own circumstances are the other half. What
lies beyond the range of the GPU is the card's (its limit on power, say) and corrects every forecast.
"""

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd

from amp_core.forecast.efficiency import efficiency_of
from amp_core.forecast.roofline import Work, operator_us
from amp_core.forecast.step_time import measured_step
from amp_core.forecast.traced_work import StepTrace, traces_of_run
from amp_core.hardware.data_sheets import Rates, dense_rates
from amp_core.store.run import Run

MIN_OVERLAP = 0.9
"""Share of the time in the same operators from which on a run is evidence for another step."""
SHARED_FRAC = 0.5
"""Share of a run's deviation, within the range of the GPU, that a similar step has too."""


@dataclass(frozen=True)
class Calibration:
    """What a measured run on a listed GPU says of another step's forecast."""

    gpu: str
    ratio: float
    """Measured over forecast time of the run."""
    overlap: float
    """Share (0–1) of the forecast's time on that GPU in operators that take as large a share of the run's."""

    spread: float
    """Half of the range that is stated for the GPU, as a share of the likely speed."""

    @property
    def factor(self) -> float:
        """By what the forecast is multiplied; 1 if the run says nothing of it."""
        return correction(self.ratio, self.overlap, self.spread)

    @property
    def note(self) -> str:
        """One sentence: what was corrected, or why nothing was."""
        found = f"the run given took {self.ratio:.2f} times its own forecast on {self.gpu}"
        common = f"{100 * self.overlap:.0f} % of the time of both steps is in the same operators"
        if self.overlap >= MIN_OVERLAP:
            return f"Calibrated: {found}, and {common}, so times are multiplied by {self.factor:.2f}."
        if self.factor == 1.0:
            return f"Not calibrated: {found}, but only {common}; give a run of a similar model."
        return (
            f"Calibrated for the card alone: {found}, which is beyond any model's error, so times are multiplied by "
            f"{self.factor:.2f}. Only {common}; a run of a similar model says more."
        )


def correction(ratio: float, overlap: float, spread: float) -> float:
    """By what a forecast is multiplied if a run with this `overlap` took `ratio` times its own forecast, on a GPU whose
    range is ± `spread`. A step that is not similar takes what lies beyond twice that range alone."""
    similar = overlap >= MIN_OVERLAP
    log, reach = math.log(ratio), math.log(1 + spread) * (1 if similar else 2)
    within = min(max(log, -reach), reach)
    return math.exp(log - within + (SHARED_FRAC * within if similar else 0.0))


def calibrate(
    run: Run, traces: tuple[StepTrace, StepTrace], run_traces: tuple[StepTrace, StepTrace] | None = None
) -> Calibration | None:
    """What `run`, whose step is `run_traces` (by default its own), says of the step of `traces`; None for a run on
    another device than a listed GPU, or without step times."""
    own = run_traces or traces_of_run(run)
    measured = measured_step(run, own)
    if measured is None:
        return None
    rates, narrow = dense_rates(measured.gpu), measured.recipe not in ("fp32", "tf32")
    assert rates is not None  # a measured step is on a listed GPU
    shared = overlap(own[narrow].work, traces[narrow].work, measured.gpu, rates, measured.recipe)
    return Calibration(measured.gpu, measured.ratio, shared, efficiency_of(measured.gpu).spread)


def overlap(one: pd.DataFrame, other: pd.DataFrame, gpu: str, rates: Rates, recipe: str) -> float:
    """Share (0–1) of the time of two steps that goes to the same operators, on a GPU in a recipe."""
    shares = []
    for work in (one, other):
        times = operator_us(Work.of(work), rates, recipe, efficiency_of(gpu).range().likely)
        # Attention and linear layers run the same kernels by several names: products are compared by their class.
        names = work["op"].where(work["kind"].ne("product") | work["op"].str.contains("conv"), "matrix product")
        by_op = pd.Series(times).groupby(names.to_numpy()).sum()
        shares.append(by_op / by_op.sum())
    a, b = shares[0].align(shares[1], fill_value=0.0)
    return float(np.minimum(a, b).sum())
