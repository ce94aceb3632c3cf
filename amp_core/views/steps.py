"""Views over the steps of a run: loss, loss scale, gradient norm, step times, memory, device."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from amp_core.analysis import (
    device_samples,
    downsample,
    loss_curves,
    memory_description,
    memory_trace,
    phase_times,
    safe_window,
    safe_window_over_time,
    scale_summary,
    scale_trace,
    skip_episodes,
    step_marks,
)
from amp_core.analysis.downsample import MAX_POINTS
from amp_core.phases import LABELS
from amp_core.schema import RunError
from amp_core.store.run import Run
from amp_core.views._view import Ask, View, figures

if TYPE_CHECKING:
    import plotly.graph_objects as go  # noqa: TID251 - for type annotations


@dataclass(frozen=True)
class Marked:
    """A table over steps, and the marks below its chart."""

    table: pd.DataFrame
    marks: pd.DataFrame
    """From `step_marks`."""
    what: str = ""
    """What the values describe, if that depends on the run."""


@dataclass(frozen=True)
class LossScale:
    """Data of the loss-scale chart."""

    trace: pd.DataFrame
    """From `scale_trace`, downsampled; empty in a run without a scaler."""
    episodes: pd.DataFrame
    """From `skip_episodes`."""
    window: pd.DataFrame | None
    """From `safe_window_over_time`; None if nothing bounds its lower end, or with `band=False`."""
    changes: pd.DataFrame
    """Phase changes from `step_marks`: the trace itself shows the skipped steps."""

    @property
    def interrupted(self) -> bool:
        """Whether at some step no single loss scale suited every gradient."""
        return self.window is not None and bool((self.window["lowest"] > self.window["highest"]).any())


def _changes(run: Run, ask: Ask) -> pd.DataFrame:
    marks: pd.DataFrame = ask(step_marks, run)
    return marks[marks["kind"] == "change"]


def _marked(figure: "go.Figure", marks: pd.DataFrame, dark: bool) -> Any:
    return figures().marks.with_marks(figure, marks, dark=dark)


def _loss(run: Run, ask: Ask, points: int = MAX_POINTS) -> Marked:
    return Marked(ask(loss_curves, [run], "step", max_points=points), ask(step_marks, run))


def _loss_scale(run: Run, ask: Ask, points: int = MAX_POINTS, band: bool = True) -> LossScale:
    """Without `band` the safe window is omitted: it reads all sampled steps, so its cost grows with them."""
    trace = ask(_scale_points, run, "loss_scale", points)
    if not ask(scale_summary, run).has_scaler:
        return LossScale(trace.iloc[:0], ask(skip_episodes, run), None, _changes(run, ask))
    return LossScale(
        trace,
        ask(skip_episodes, run),
        _certain_window(run, ask) if band else None,
        _changes(run, ask),
    )


def _scale_points(run: Run, column: str, points: int) -> pd.DataFrame:
    """What a chart of `column` shows of `scale_trace`: few rows, which a cache may keep."""
    return downsample(scale_trace(run), "step", column, points, keep="skipped")


def _certain_window(run: Run, ask: Ask) -> pd.DataFrame | None:
    """The window over time; None if nothing bounds its lower end. Gradients that underflowed bound it from below."""
    try:
        whole = ask(safe_window, run)
    except RunError:  # no gradients were recorded
        return None
    if whole.caveat is not None and whole.underflowed_at is None:
        return None
    window: pd.DataFrame = ask(safe_window_over_time, run)
    if whole.underflowed_at is None:
        return window
    return window.assign(lowest=window["lowest"].clip(lower=whole.lowest))


def _loss_scale_figure(frame: LossScale, dark: bool) -> Any:
    figure = figures().scale_figure(frame.trace, frame.episodes, dark, window=frame.window)
    return _marked(figure, frame.changes, dark)


def _no_loss_scale(frame: LossScale) -> str | None:
    scale = frame.trace["loss_scale"].to_numpy(dtype=np.float64)
    return None if (np.isfinite(scale) & (scale > 0)).any() else "No loss scale was recorded."


def _grad_norm(run: Run, ask: Ask, points: int = MAX_POINTS) -> Marked:
    trace = ask(_scale_points, run, "grad_norm", points)
    return Marked(trace, _changes(run, ask))  # crosses on the upper edge mark the skipped steps


def _no_grad_norm(frame: Marked) -> str | None:
    norm = frame.table["grad_norm"].to_numpy(dtype=np.float64)
    skipped = frame.table["skipped"].to_numpy(dtype=bool)
    there = np.where(np.isfinite(norm), norm > 0, skipped)
    return None if there.any() else "No gradient norm was recorded."


def _phases(run: Run, ask: Ask) -> Marked:
    return Marked(ask(phase_times, run), ask(step_marks, run))


def _no_phases(frame: Marked) -> str | None:
    known = (frame.table[[f"{name}_ms" for name in LABELS]] > 0).any(axis=None)
    return None if known else "No phases of steps were recorded."


def _memory(run: Run, ask: Ask, points: int = MAX_POINTS) -> Marked:
    return Marked(ask(_memory_points, run, points), ask(step_marks, run), memory_description(run))


def _memory_points(run: Run, points: int) -> pd.DataFrame:
    return downsample(memory_trace(run), "step", "allocated_bytes", points)


def _device(run: Run, ask: Ask) -> pd.DataFrame:
    return downsample(ask(device_samples, run), "time_s", "gpu_util_frac")


def _no_device(frame: pd.DataFrame) -> str | None:
    known = frame.filter(like="_frac").notna().any(axis=None)
    return None if known else "No device was sampled in this run."


LOSS = View(
    "loss",
    "Loss",
    ("steps", "events", "audits", "windows"),
    _loss,
    lambda frame, dark: _marked(figures().loss_figure(frame.table, dark=dark), frame.marks, dark),
    lambda frame: None if len(frame.table) else "No loss was recorded.",
)
LOSS_SCALE = View(
    "loss_scale",
    "Loss scale",
    ("steps", "events", "tensors", "audits", "windows"),
    _loss_scale,
    _loss_scale_figure,
    _no_loss_scale,
)
GRAD_NORM = View(
    "grad_norm",
    "Gradient norm",
    ("steps", "events", "audits", "windows"),
    _grad_norm,
    lambda frame, dark: _marked(figures().grad_norm_figure(frame.table, dark=dark), frame.marks, dark),
    _no_grad_norm,
)
PHASES = View(
    "phases",
    "Time of a step",
    ("steps", "events", "audits", "windows"),
    _phases,
    lambda frame, dark: _marked(figures().phase_figure(frame.table, dark=dark), frame.marks, dark),
    _no_phases,
)
MEMORY = View(
    "memory",
    "Memory",
    ("steps", "events", "audits", "windows"),
    _memory,
    lambda frame, dark: _marked(figures().memory_figure(frame.table, dark=dark, what=frame.what), frame.marks, dark),
    lambda frame: None if len(frame.table) else "No memory was recorded.",
)
DEVICE = View(
    "device",
    "Share of time on the device",
    ("device",),
    _device,
    lambda frame, dark: figures().device_figure(frame, dark=dark),
    _no_device,
)
