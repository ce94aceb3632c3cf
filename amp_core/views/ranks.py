"""Views of distributed training: how long each rank takes, and where ranks disagree."""

import numpy as np
import pandas as pd

from amp_core import phases
from amp_core.analysis import rank_scales, rank_table
from amp_core.views._view import View, figures


def _no_times(frame: pd.DataFrame) -> str | None:
    if len(frame) < 2:
        return "This run has one process."
    known = frame[list(phases.COLUMNS)].notna().any(axis=None)
    return None if known else "The times of the ranks were not recorded."


def _no_scales(frame: pd.DataFrame) -> str | None:
    scale = frame["loss_scale"].to_numpy(dtype=np.float64)
    there = (np.isfinite(scale) & (scale > 0)).any()
    return None if there else "No two ranks differ in loss scale or skipped steps."


RANKS = View(
    "ranks",
    "Where each rank's step goes",
    ("steps", "events"),
    lambda run, ask: ask(rank_table, run),
    lambda frame, dark: figures().rank_figure(frame, dark),
    _no_times,
)
RANK_SCALES = View(
    "rank_scales",
    "Where ranks disagree",
    ("steps",),
    lambda run, ask: ask(rank_scales, run),
    lambda frame, dark: figures().rank_scale_figure(frame, dark),
    _no_scales,
)
