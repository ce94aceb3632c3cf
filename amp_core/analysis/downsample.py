"""Fewer points for a chart without losing what stands out.

thin(curves, "step", "loss", most=4000)          # each spike survives
thin(trace, "step", "loss_scale", keep="skipped")   # and each skipped step
sparkline(trace["loss_scale"])                   # a few dozen values for a metric card
"""

import numpy as np
import pandas as pd

MOST = 2000
"""Points that a chart some 1,000 pixels wide can show, with a lowest and a highest one per pixel."""


def thin(
    frame: pd.DataFrame,
    x: str,
    y: str,
    most: int = MOST,
    *,
    by: str | None = None,
    keep: str | None = None,
) -> pd.DataFrame:
    """`frame` with at most about `most` rows: per stretch of `x` the rows with the lowest and the highest `y`.

    Whole rows are kept, so other columns stay true. First and last rows stay; so do the rows where the Boolean column
    `keep` is true, as far as `most` of them, and one row of each stretch in which `y` is not finite. With `by`, each
    of its groups (say, each run) is thinned for itself. `frame` must be ordered by `x` within each group.
    """
    if by is not None:
        groups = [group for _, group in frame.groupby(by, sort=False)]
        if not groups:
            return frame
        return pd.concat([thin(g, x, y, most, keep=keep) for g in groups], ignore_index=True)
    if len(frame) <= most:
        return frame.reset_index(drop=True)
    places = frame[x].to_numpy(dtype=np.float64)
    values = frame[y].to_numpy(dtype=np.float64)
    buckets = max(1, most // 2)
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
        chosen.append(marked[:: max(1, -(-len(marked) // most))])
    return frame.iloc[np.unique(np.concatenate(chosen))].reset_index(drop=True)


def sparkline(values: "pd.Series[float]", most: int = 50, weights: "pd.Series[int] | None" = None) -> list[float]:
    """Means of at most `most` stretches of `values`, without those that hold no finite one: for a metric card.

    With `weights` (`stands_for` of a long run), of so many steps each value tells: stretches are of equal steps.
    """
    known = values.to_numpy(dtype=np.float64)
    there = np.isfinite(known)
    known = known[there]
    if weights is not None and len(known) and (told := weights.to_numpy(dtype=np.float64)[there]).max() > 1:
        middle = np.cumsum(told) - told / 2
        stretch = (middle / told.sum() * most).astype(np.int64)
        sums, counts = np.bincount(stretch, known * told), np.bincount(stretch, told)
        return [float(mean) for mean in sums[counts > 0] / counts[counts > 0]]
    parts = np.array_split(known, min(most, len(known))) if len(known) else []
    return [float(p.mean()) for p in parts]


def _ends(rows: np.ndarray, bucket: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of `rows`, which stand bucket by bucket, the first and the last of each bucket."""
    if not len(rows):
        return rows, rows
    change = np.flatnonzero(np.diff(bucket[rows])) + 1
    return rows[np.append(0, change)], rows[np.append(change - 1, len(rows) - 1)]
