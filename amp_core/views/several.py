"""Views of several runs side by side; the first is the baseline run."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pandas as pd

from amp_core.analysis import (
    compare_step_cost,
    gradient_agreement,
    loss_curves,
    memory_breakdown,
    memory_parts,
    noise_band,
    step_marks,
    unique_labels,
)
from amp_core.analysis.downsample import MAX_POINTS
from amp_core.store.run import Run
from amp_core.views._view import Ask, View

if TYPE_CHECKING:
    import plotly.graph_objects as go  # noqa: TID251 - for type annotations


@dataclass(frozen=True)
class Losses:
    """Data of the loss curves of several runs."""

    curves: pd.DataFrame
    band: pd.DataFrame
    """From `noise_band`: the spread of the baseline over seeds."""
    marks: tuple[tuple[str, pd.DataFrame], ...]
    """Label and `step_marks` of each run."""
    x: str


def _losses(runs: Sequence[Run], ask: Ask, x: str = "step", points: int = MAX_POINTS) -> Losses:
    marks = tuple((name, ask(step_marks, run)) for name, run in zip(unique_labels(runs), runs, strict=True))
    return Losses(ask(loss_curves, runs, x, max_points=points), ask(noise_band, runs, x), marks, x)


def _losses_figure(frame: Losses, dark: bool, log: bool = False) -> "go.Figure":
    from amp_core.figures import loss_figure, recipe_colour
    from amp_core.figures.marks import with_rows

    figure = loss_figure(frame.curves, dark=dark, log=log, band=frame.band)
    recipes = dict(zip(frame.curves["run"], frame.curves["precision"], strict=True))
    rows = [(name, marks, recipe_colour(recipes.get(name), dark)) for name, marks in frame.marks]
    return with_rows(figure, rows, frame.x, dark)


def _memory_comparison(runs: Sequence[Run], ask: Ask) -> pd.DataFrame:
    breakdowns = [ask(memory_breakdown, run) for run in runs]
    known = [
        (name, one) for name, one in zip(unique_labels(runs), breakdowns, strict=True) if one.total_bytes is not None
    ]
    return memory_parts([one for _, one in known], [name for name, _ in known])


def _memory_comparison_figure(frame: pd.DataFrame, dark: bool, title: str = "Memory at the peak") -> "go.Figure":
    from amp_core.figures import memory_parts_figure

    return memory_parts_figure(frame, dark, title)


def _step_costs_figure(frame: pd.DataFrame, dark: bool) -> "go.Figure":
    from amp_core.figures import step_cost_figure

    return step_cost_figure(frame, dark, f"Time of a {frame['per'].iloc[0]}")


def _agreement_figure(frame: pd.DataFrame, dark: bool) -> "go.Figure":
    from amp_core.figures import agreement_figure

    return agreement_figure(frame, dark)


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
    _memory_comparison_figure,
    lambda frame: None if (frame["bytes"] > 0).any() else "No step's memory was recorded in these runs.",
)
STEP_COSTS = View(
    "step_costs",
    "Time of a step",
    ("steps", "windows", "kernels"),
    lambda runs, ask: ask(compare_step_cost, runs),
    _step_costs_figure,
    lambda frame: None if (frame["us"] > 0).any() else "None of these runs has timed steps.",
)
AGREEMENT = View(
    "agreement",
    "Gradients against their FP32 replay",
    ("audits",),
    lambda runs, ask: ask(gradient_agreement, runs),
    _agreement_figure,
    lambda frame: None if len(frame) else "None of these runs was audited.",
)
