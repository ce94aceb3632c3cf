"""Fewer points for a chart that keep its extremes.

downsample(curves, "step", "loss", max_points=4000)     # keeps each spike
downsample(trace, "step", "loss_scale", keep="skipped")  # and each skipped step
sparkline(trace["loss_scale"])                   # a few dozen values for a metric card
"""

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
    # Sorted by bucket, then value: the ends of each bucket's block are its lowest and highest. NaN sorts last.
    order = np.lexsort((values, bucket))
    finite = order[np.isfinite(values[order])]
    chosen = [np.array([0, len(frame) - 1]), *_ends(finite, bucket)]
    chosen.append(_ends(order[~np.isfinite(values[order])], bucket)[0])
    if keep is not None:
        marked = np.flatnonzero(frame[keep].to_numpy(dtype=bool))
        chosen.append(marked[:: max(1, -(-len(marked) // max_points))])
    return frame.iloc[np.unique(np.concatenate(chosen))].reset_index(drop=True)


def sparkline(values: "pd.Series[float]", max_points: int = 50, weights: "pd.Series[int] | None" = None) -> list[float]:
    """Means of at most `max_points` segments of `values`, without those that have no finite value: for a metric card.

    `weights` (`stands_for` of a long run) are the steps that each value represents: segments have equal steps.
    """
    known = values.to_numpy(dtype=np.float64)
    there = np.isfinite(known)
    known = known[there]
    if weights is not None and len(known) and (steps := weights.to_numpy(dtype=np.float64)[there]).max() > 1:
        middle = np.cumsum(steps) - steps / 2
        segment = (middle / steps.sum() * max_points).astype(np.int64)
        sums, counts = np.bincount(segment, known * steps), np.bincount(segment, steps)
        return [float(mean) for mean in sums[counts > 0] / counts[counts > 0]]
    parts = np.array_split(known, min(max_points, len(known))) if len(known) else []
    return [float(p.mean()) for p in parts]


def _ends(rows: np.ndarray, bucket: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first and the last of `rows`, which are grouped by bucket, in each bucket."""
    if not len(rows):
        return rows, rows
    change = np.flatnonzero(np.diff(bucket[rows])) + 1
    return rows[np.append(0, change)], rows[np.append(change - 1, len(rows) - 1)]
