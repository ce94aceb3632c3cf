"""The overview of a run: the values of its metric cards.

>>> view = overview(run)
>>> view.steps_done, view.steps_planned, view.loss_last
(120, 200, 2.31)
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from amp_core.analysis.comparison.learned import final
from amp_core.analysis.numerics.loss_scale import ScaleSummary, scale_summary
from amp_core.analysis.performance.memory import MemorySummary, memory_summary
from amp_core.analysis.performance.step_time import SpeedSummary, speed_summary
from amp_core.analysis.ranks import end_in_words
from amp_core.analysis.steps import attempts, recipe, warmup_steps, whole_number
from amp_core.store.run import Run

_PACE_STEPS = 50  # recent steps that the time to the end is estimated from
_MIN_PACE_STEPS = 5


@dataclass(frozen=True)
class Overview:
    """What a run is, its progress and its state. None where not recorded."""

    name: str
    status: str
    """running, finished, stopped, failed or lost."""
    end_reason: str | None
    live: bool
    recipe: str | None
    """Precision recipe, e.g. `fp16`."""
    workload: str | None
    device: str | None
    steps_done: int
    """Optimizer steps attempted."""
    steps_planned: int | None
    progress_frac: float | None
    """Done over planned, at most 1."""
    loss_first: float | None
    loss_last: float | None
    """First and last recorded loss; NaN or infinite where the loss was."""
    loss_final: float | None
    """Mean of the last tenth of the losses, as in a comparison; NaN where one of them is not finite."""
    loss_lowest: float | None
    """Lowest finite loss."""
    scale: ScaleSummary
    speed: SpeedSummary
    memory: MemorySummary
    duration_s: float | None
    """From the run's creation to its last row; of an imported run, to its last step: its events are of the import."""
    eta_s: float | None
    """Estimated seconds to the end at the pace of the last steps; None unless live with a planned number of steps."""
    results: Mapping[str, Any]
    """Final metrics, e.g. `eval_loss`."""


def overview(run: Run) -> Overview:
    """The overview of a run, live or ended."""
    frame = attempts(run)
    done = len(frame)
    config = run.head.config
    losses = run.table("steps").column("loss").drop_null().to_numpy()
    finite = losses[np.isfinite(losses)]
    planned = whole_number(config.get("steps"))
    device = config.get("device", run.head.environment.get("device"))
    workload = config.get("workload")
    live = run.is_live
    return Overview(
        name=run.name,
        status=run.status,
        end_reason=end_in_words(run),
        live=live,
        recipe=recipe(run),
        workload=workload if isinstance(workload, str) else None,
        device=device if isinstance(device, str) else None,
        steps_done=done,
        steps_planned=planned,
        progress_frac=min(1.0, done / planned) if planned else None,
        loss_first=float(losses[0]) if len(losses) else None,
        loss_last=float(losses[-1]) if len(losses) else None,
        loss_final=_final_loss(frame, losses),
        loss_lowest=float(finite.min()) if len(finite) else None,
        scale=scale_summary(run),
        speed=speed_summary(run),
        memory=memory_summary(run),
        duration_s=_duration(run, frame),
        eta_s=_eta(frame, planned - done) if live and planned else None,
        results=run.head.results,
    )


def _final_loss(frame: pd.DataFrame, losses: "np.ndarray[tuple[int], np.dtype[np.float64]]") -> float | None:
    """The smoothed loss at the end, or the only one."""
    if len(losses) < 2:
        return float(losses[-1]) if len(losses) else None
    return final(frame).mean


def _duration(run: Run, frame: pd.DataFrame) -> float | None:
    parts = [frame["time_s"].astype(float)]
    if run.head.config.get("source") != "import":
        parts.append(run.events["time_s"].astype(float))
    times = pd.concat(parts).dropna()
    return float(times.max()) if len(times) else None


def _eta(frame: pd.DataFrame, steps_left: int) -> float | None:
    """Seconds at the pace of the last steps. The first steps compile and fill caches, so they do not count."""
    timed = frame.loc[frame["time_s"].notna(), ["step", "time_s"]].iloc[warmup_steps(len(frame)) :].tail(_PACE_STEPS)
    steps, times = timed["step"].to_numpy(float), timed["time_s"].to_numpy(float)
    if len(times) < _MIN_PACE_STEPS or times[-1] <= times[0] or steps[-1] <= steps[0]:
        return None
    return float(max(0, steps_left) * (times[-1] - times[0]) / (steps[-1] - steps[0]))
