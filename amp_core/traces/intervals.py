"""Arithmetic of time: what several spans cover together, and what two such sets have in common.

>>> busy = union(np.array([0.0, 2.0, 9.0]), np.array([3.0, 5.0, 10.0]))
>>> total(busy), total(gaps(busy, 0.0, 12.0))
(6.0, 6.0)
"""

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Intervals = tuple[Floats, Floats]
"""Starts and ends of intervals, in order and apart from each other."""

NONE: Intervals = (np.zeros(0), np.zeros(0))


def union(starts: Floats, ends: Floats) -> Intervals:
    """The time that at least one of the spans covers."""
    if not len(starts):
        return NONE
    order = np.argsort(starts, kind="stable")
    starts, reach = starts[order], np.maximum.accumulate(ends[order])
    first = np.concatenate([[True], starts[1:] > reach[:-1]])
    last = np.concatenate([first[1:], [True]])
    return starts[first], reach[last]


def clip(spans: Intervals, low: float, high: float) -> Intervals:
    """What of the intervals lies between two times."""
    starts, ends = np.maximum(spans[0], low), np.minimum(spans[1], high)
    keep = starts < ends
    return starts[keep], ends[keep]


def gaps(spans: Intervals, low: float, high: float) -> Intervals:
    """What of the time from `low` to `high` no interval covers."""
    starts, ends = clip(spans, low, high)
    begins, stops = np.concatenate([[low], ends]), np.concatenate([starts, [high]])
    keep = begins < stops
    return begins[keep], stops[keep]


def together(one: Intervals, other: Intervals) -> Intervals:
    """The time that at least one of them covers."""
    return union(np.concatenate([one[0], other[0]]), np.concatenate([one[1], other[1]]))


def both(one: Intervals, other: Intervals) -> Intervals:
    """The time that both cover."""
    edges = np.concatenate([one[0], other[0], one[1], other[1]])
    change = np.repeat([1, -1], len(edges) // 2)
    order = np.lexsort((change, edges))  # where one ends as the other begins there is nothing between
    edges, depth = edges[order], np.cumsum(change[order])
    inside = np.flatnonzero((depth[:-1] == 2) & (edges[:-1] < edges[1:])) if len(edges) else order
    return edges[inside], edges[inside + 1]


def common(one: Intervals, other: Intervals) -> float:
    """How long both cover."""
    return total(both(one, other))


def total(spans: Intervals) -> float:
    """How long the intervals last together."""
    return float((spans[1] - spans[0]).sum())
