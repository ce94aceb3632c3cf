"""Interval arithmetic: unions, intersections and gaps of spans of time.

>>> busy = union(np.array([0.0, 2.0, 9.0]), np.array([3.0, 5.0, 10.0]))
>>> total(busy), total(gaps(busy, 0.0, 12.0))
(6.0, 6.0)
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Intervals = tuple[Floats, Floats]
"""Starts and ends of intervals, in order and disjoint."""

NONE: Intervals = (np.zeros(0), np.zeros(0))


def union(starts: Floats, ends: Floats) -> Intervals:
    """The times that at least one of the spans covers."""
    if not len(starts):
        return NONE
    order = np.argsort(starts, kind="stable")
    starts, reach = starts[order], ends[order]
    del order  # ten megabytes in a trace of a gigabyte
    np.maximum.accumulate(reach, out=reach)
    first = np.concatenate([[True], starts[1:] > reach[:-1]])
    last = np.concatenate([first[1:], [True]])
    return starts[first], reach[last]


def clip(spans: Intervals, low: float, high: float) -> Intervals:
    """The parts of the intervals between two times."""
    starts, ends = np.maximum(spans[0], low), np.minimum(spans[1], high)
    keep = starts < ends
    return starts[keep], ends[keep]


def gaps(spans: Intervals, low: float, high: float) -> Intervals:
    """The times from `low` to `high` that no interval covers."""
    starts, ends = clip(spans, low, high)
    begins, stops = np.concatenate([[low], ends]), np.concatenate([starts, [high]])
    keep = begins < stops
    return begins[keep], stops[keep]


def merged(one: Intervals, other: Intervals) -> Intervals:
    """The times that at least one of them covers."""
    return union(np.concatenate([one[0], other[0]]), np.concatenate([one[1], other[1]]))


def intersection(one: Intervals, other: Intervals) -> Intervals:
    """The times that both cover."""
    return _joined([_intersection(part, beside) for part, beside in _parts(one, other)])


def without(one: Intervals, other: Intervals) -> Intervals:
    """The parts of `one` that `other` does not cover."""
    if not len(other[0]):
        return one
    return _joined(
        [
            _intersection(part, gaps(beside, float(part[0][0]), float(part[1][-1])))
            for part, beside in _parts(one, other)
        ]
    )


_CHUNK = 2**14
"""Intervals that are handled at a time: sorting their ends takes ten times the memory of these."""


def _parts(one: Intervals, other: Intervals) -> Iterator[tuple[Intervals, Intervals]]:
    """The intervals of `one`, some at a time, and those of `other` that may overlap with these."""
    for low in range(0, len(one[0]), _CHUNK):
        starts, ends = (edges[low : low + _CHUNK] for edges in one)
        first = int(np.searchsorted(other[1], starts[0], side="right"))
        last = int(np.searchsorted(other[0], ends[-1], side="left"))
        yield (starts, ends), (other[0][first:last], other[1][first:last])


def _joined(parts: list[Intervals]) -> Intervals:
    if not parts:
        return NONE
    return np.concatenate([starts for starts, _ in parts]), np.concatenate([ends for _, ends in parts])


def _intersection(one: Intervals, other: Intervals) -> Intervals:
    """The times that both cover, of some intervals."""
    # The sort is stable, so that ends come before starts at equal times: touching intervals do not overlap.
    edges = np.concatenate([one[1], other[1], one[0], other[0]])
    order = np.argsort(edges, kind="stable")
    edges, change = edges[order], np.where(order < len(order) // 2, -1, 1).astype(np.int8)
    depth = np.cumsum(change, dtype=np.int32)
    inside = np.flatnonzero((depth[:-1] == 2) & (edges[:-1] < edges[1:])) if len(edges) else order
    return edges[inside], edges[inside + 1]


def overlap(one: Intervals, other: Intervals) -> float:
    """Total time that both cover."""
    return total(intersection(one, other))


def total(spans: Intervals) -> float:
    """Sum of the intervals' lengths."""
    return float((spans[1] - spans[0]).sum())


def longest(spans: Intervals) -> float:
    """Length of the longest interval; 0 without any."""
    return float((spans[1] - spans[0]).max(initial=0.0))


def overlap_of_each(starts: Floats, ends: Floats, spans: Intervals) -> Floats:
    """How much of each time from start to end `spans` cover."""
    if not len(spans[0]):
        return np.zeros(len(starts))
    edges = np.stack(spans, axis=1).reshape(-1)
    covered = np.repeat(np.concatenate([[0.0], np.cumsum(spans[1] - spans[0])]), 2)[1:-1]
    overlap: Floats = np.interp(ends, edges, covered) - np.interp(starts, edges, covered)
    return overlap
