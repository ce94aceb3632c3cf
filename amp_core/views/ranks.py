"""Views of distributed training: how long each rank takes, and where ranks disagree."""

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from amp_core import phases
from amp_core.analysis import rank_scales, rank_table
from amp_core.views._view import View

if TYPE_CHECKING:
    import plotly.graph_objects as go  # noqa: TID251 - for type annotations


def _times_figure(frame: pd.DataFrame, dark: bool) -> "go.Figure":
    from amp_core.figures import rank_figure

    return rank_figure(frame, dark=dark)


def _no_times(frame: pd.DataFrame) -> str | None:
    if len(frame) < 2:
        return "This run has one process."
    known = frame[list(phases.COLUMNS)].notna().any(axis=None)
    return None if known else "The times of the ranks were not recorded."


def _scales_figure(frame: pd.DataFrame, dark: bool) -> "go.Figure":
    from amp_core.figures import rank_scale_figure

    return rank_scale_figure(frame, dark)


def _no_scales(frame: pd.DataFrame) -> str | None:
    scale = frame["loss_scale"].to_numpy(dtype=np.float64)
    there = (np.isfinite(scale) & (scale > 0)).any()
    return None if there else "No two ranks differ in loss scale or skipped steps."


RANKS = View(
    "ranks",
    "Where each rank's step goes",
    ("steps", "events"),
    lambda run, ask: ask(rank_table, run),
    _times_figure,
    _no_times,
)
RANK_SCALES = View(
    "rank_scales",
    "Where ranks disagree",
    ("steps",),
    lambda run, ask: ask(rank_scales, run),
    _scales_figure,
    _no_scales,
)
