"""Interval arithmetic, compared with counting microseconds one by one."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from amp_core.traces import intervals as times

SPANS = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 8)), max_size=6)
HIGH = 30


def covered(spans):
    return {t for start, length in spans for t in range(start, start + length)}


def intervals(spans):
    starts = np.array([s for s, _ in spans], dtype=float)
    return times.union(starts, starts + np.array([n for _, n in spans], dtype=float))


def points(intervals):
    result = {t for start, end in zip(*intervals, strict=True) for t in range(int(start), int(end))}
    assert times.total(intervals) == len(result)  # intervals do not overlap
    return result


@given(SPANS, SPANS)
def test_interval_operations_equal_set_operations(one, other):
    a, b = intervals(one), intervals(other)
    assert points(a) == covered(one)
    assert points(times.intersection(a, b)) == covered(one) & covered(other)
    assert points(times.merged(a, b)) == covered(one) | covered(other)
    assert times.overlap(a, b) == len(covered(one) & covered(other))
    assert points(times.gaps(a, 3.0, HIGH)) == set(range(3, HIGH)) - covered(one)
    assert points(times.clip(a, 3.0, 12.0)) == covered(one) & set(range(3, 12))
