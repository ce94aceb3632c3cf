"""Fewer points for a chart that keep its extremes.

downsample(curves, "step", "loss", max_points=4000)     # keeps each spike
downsample(trace, "step", "loss_scale", keep="skipped")  # and each skipped step
sparkline(trace["loss_scale"])                   # a few dozen values for a metric card
"""

from typing import Any

import numpy as np
import pandas as pd

MAX_POINTS = 2000
"""Points that a chart of about 1,000 pixels can show: a lowest and a highest one per pixel."""


def downsample(
    frame: pd.DataFrame,
    x: str,
    y: str,
    max_points: int = MAX_POINTS,
    *,
    by: str | None = None,
    keep: str | None = None,
) -> pd.DataFrame:
    """`frame` with about `max_points` rows at most: per interval of `x` the rows with the lowest and the highest `y`.

    Whole rows are kept, so other columns stay valid. First and last rows stay; so do the rows where the Boolean column
    `keep` is true, up to `max_points` of them, and one row of each interval in which `y` is not finite. With `by`, each
    group (say, each run) is downsampled separately. `frame` must be ordered by `x` within each group.
    """
    if by is not None:
        groups = [group for _, group in frame.groupby(by, sort=False)]
        if not groups:
            return frame
        return pd.concat([downsample(g, x, y, max_points, keep=keep) for g in groups], ignore_index=True)
    if len(frame) <= max_points:
        return frame.reset_index(drop=True)
    places = frame[x].to_numpy(dtype=np.float64)
    values = frame[y].to_numpy(dtype=np.float64)
    buckets = max(1, max_points // 2)
    span = places[-1] - places[0]
    share = (places - places[0]) / span if np.isfinite(span) and span > 0 else np.linspace(0, 1, len(places))
    bucket = np.minimum((share * buckets).astype(np.int64), buckets - 1)
    finite = np.isfinite(values)
    chosen = [np.array([0, len(frame) - 1]), _firsts(~finite, bucket)]
    starts = np.flatnonzero(np.diff(bucket, prepend=-1))
    rows = np.diff(starts, append=len(frame))
    for ufunc, never in ((np.minimum, np.inf), (np.maximum, -np.inf)):
        extreme = ufunc.reduceat(np.where(finite, values, never), starts)
        chosen.append(_firsts(finite & (values == np.repeat(extreme, rows)), bucket))
    if keep is not None:
        marked = np.flatnonzero(frame[keep].to_numpy(dtype=bool))
        chosen.append(marked[:: max(1, -(-len(marked) // max_points))])
    return frame.iloc[np.unique(np.concatenate(chosen))].reset_index(drop=True)


def sparkline(values: "pd.Series[float]", max_points: int = 50) -> list[float]:
    """Means of at most `max_points` equal segments of the finite `values`: for a metric card."""
    known = values.to_numpy(dtype=np.float64)
    known = known[np.isfinite(known)]
    parts = np.array_split(known, min(max_points, len(known))) if len(known) else []
    return [float(p.mean()) for p in parts]


def merged_steps(steps: "pd.Series[Any]", max_steps: int) -> dict[str, np.ndarray]:
    """Columns `step` and `until`: the first and the last step of the cell to which each of `steps` belongs. With more
    than `max_steps` different ones, neighbouring ones share a cell."""
    known, place = np.unique(steps.to_numpy(dtype=np.int64), return_inverse=True)
    per_cell = max(1, -(-len(known) // max_steps))
    first = place // per_cell * per_cell
    return {"step": known[first], "until": known[np.minimum(first + per_cell, len(known)) - 1]}


def _firsts(rows: np.ndarray, bucket: np.ndarray) -> np.ndarray:
    """Of the rows that the mask `rows` marks, the first of each bucket."""
    places = np.flatnonzero(rows)
    return places[np.diff(bucket[places], prepend=-1) > 0]
