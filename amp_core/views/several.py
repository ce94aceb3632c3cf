"""Views of several runs side by side; the first is the baseline run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from amp_core.analysis import (
    compare_step_cost,
    gradient_agreement,
    loss_curves,
    loss_difference,
    memory_breakdown,
    memory_parts,
    noise_band,
    step_marks,
    unique_labels,
)
from amp_core.analysis.comparison.learned import TASK
from amp_core.analysis.downsample import MAX_POINTS
from amp_core.analysis.steps import recipe
from amp_core.store.run import Run
from amp_core.views._view import Ask, View, figures


@dataclass(frozen=True)
class Losses:
    """Data of the loss curves of several runs."""

    curves: pd.DataFrame
    band: pd.DataFrame
    """From `noise_band`: the spread of the baseline over seeds."""
    delta: pd.DataFrame
    """From `loss_difference`; empty if the runs train different tasks."""
    marks: tuple[tuple[str, pd.DataFrame], ...]
    """Label and `step_marks` of each run."""
    runs: pd.DataFrame
    """Label and precision of each run, for its colour."""
    x: str


def _losses(runs: Sequence[Run], ask: Ask, x: str = "step", points: int = MAX_POINTS) -> Losses:
    labels = unique_labels(runs)
    marks = tuple((name, ask(step_marks, run)) for name, run in zip(labels, runs, strict=True))
    curves, band = ask(loss_curves, runs, x, max_points=points), ask(noise_band, runs, x)
    one_task = len({tuple(str(run.head.config.get(key)) for key in TASK) for run in runs}) == 1
    delta = loss_difference(curves if one_task else curves.iloc[:0], band)
    about = pd.DataFrame({"run": labels, "precision": [recipe(run) for run in runs]})
    return Losses(curves, band, delta, marks, about, x)


def _losses_figure(frame: Losses, dark: bool, log: bool = False) -> Any:
    hues: Mapping[str, str] = figures().run_colours(frame.runs, dark)
    figure = figures().loss_figure(frame.curves, dark=dark, log=log, band=frame.band, delta=frame.delta, hues=hues)
    rows = [(name, marks, hues[name]) for name, marks in frame.marks]
    return figures().marks.with_rows(figure, rows, frame.x, dark)


def _memory_comparison(runs: Sequence[Run], ask: Ask) -> pd.DataFrame:
    breakdowns = [ask(memory_breakdown, run) for run in runs]
    known = [
        (name, one) for name, one in zip(unique_labels(runs), breakdowns, strict=True) if one.total_bytes is not None
    ]
    return memory_parts([one for _, one in known], [name for name, _ in known])


LOSSES = View(
    "losses",
    "Loss",
    ("steps", "events", "audits", "windows"),
    _losses,
    _losses_figure,
    lambda frame: None if len(frame.curves) else "No loss was recorded.",
)
MEMORY_COMPARISON = View(
    "memory_comparison",
    "Memory at the peak",
    ("memory",),
    _memory_comparison,
    lambda frame, dark, title="Memory at the peak": figures().memory_parts_figure(frame, dark, title),
    lambda frame: None if (frame["bytes"] > 0).any() else "No step's memory was recorded in these runs.",
)
STEP_COSTS = View(
    "step_costs",
    "Time of a step",
    ("steps", "windows", "kernels"),
    lambda runs, ask: ask(compare_step_cost, runs),
    lambda frame, dark: figures().step_cost_figure(frame, dark, f"Time of a {frame['per'].iloc[0]}"),
    lambda frame: None if (frame["us"] > 0).any() else "None of these runs has timed steps.",
)
AGREEMENT = View(
    "agreement",
    "Gradients against their FP32 replay",
    ("audits",),
    lambda runs, ask: ask(gradient_agreement, runs),
    lambda frame, dark, hues=None: figures().agreement_figure(frame, dark, hues=hues),
    lambda frame: None if len(frame) else "None of these runs was audited.",
)
