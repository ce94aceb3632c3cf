"""First calls of operators on each of their sizes, where these take longer than later ones.

>>> first_sizes(events, linked)
FirstSizes(count=14, us=66200.0, of_us=281000.0)

The first call on a size chooses an algorithm, packs weights, and touches new memory. A trace of one pass alone shows
mostly that.
"""

from dataclasses import dataclass

import numpy as np

from amp_core.traces.events import TraceEvents
from amp_core.traces.gpu_work import LinkedWork

MIN_LATER = 2
"""Later calls on the same sizes from which what is usual is known: a model repeats each of its blocks a few times."""
MIN_PAIRS_RATIO = 4
"""Of sizes with one later call, those on which the first call is longer are as many times more than those on which the
second is: a processor that is taken away now and then slows as many of either."""
MIN_FIRST_RATIO = 1.5
"""A first call is longer that takes that many times the median of the later ones."""
MIN_COUNT = 3
"""Sizes of which the first call is longer: a single one may have been interrupted."""
MIN_FRAC = 0.1
"""Share of the operators' time beyond what is usual from which it is kept."""


@dataclass(frozen=True)
class FirstSizes:
    """First calls that take longer than later ones of the same operator and sizes."""

    count: int
    us: float
    """By how much they are longer, in all, microseconds."""
    of_us: float
    """The time of all operators."""


def first_sizes(events: TraceEvents, linked: LinkedWork) -> FirstSizes | None:
    """Such calls of a trace of a CPU that records shapes; None where they add little, and for other traces."""
    if events.uses_device or not len(linked):
        return None
    names, shapes = np.asarray(events.spans.name)[linked.op], np.asarray(events.spans.shapes)[linked.op]
    known = np.flatnonzero(shapes >= 0)
    known = known[np.argsort(linked.start_us[known], kind="stable")]
    if not len(known):
        return None
    _, kind = np.unique(np.stack([names[known], shapes[known]]), axis=1, return_inverse=True)
    kind = kind.reshape(-1)
    count, beyond_us, of_us = 0, 0.0, float(linked.own_us.sum())
    of_pairs, slower_later = list[float](), 0
    for calls in np.split(known[np.argsort(kind, kind="stable")], np.cumsum(np.bincount(kind))[:-1]):
        if len(calls) == 1:
            continue
        first_us, usual_us = float(linked.own_us[calls[0]]), float(np.median(linked.own_us[calls[1:]]))
        is_longer = first_us > MIN_FIRST_RATIO * usual_us
        if len(calls) <= MIN_LATER:
            of_pairs += [first_us - usual_us] * is_longer
            slower_later += usual_us > MIN_FIRST_RATIO * first_us
        elif is_longer:
            count, beyond_us = count + 1, beyond_us + first_us - usual_us
    if len(of_pairs) >= MIN_PAIRS_RATIO * max(1, slower_later):
        count, beyond_us = count + len(of_pairs), beyond_us + sum(of_pairs)
    return FirstSizes(count, beyond_us, of_us) if count >= MIN_COUNT and beyond_us >= MIN_FRAC * of_us else None
