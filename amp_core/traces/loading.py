"""When a trace marks that a phase runs, and the first load of data among these.

>>> first_batch(host, before=900.0)
(12.0, 850.0)
"""

import numpy as np

from amp_core.traces import intervals as times
from amp_core.traces.link import DATA, Host


def marked_time(host: Host, region: int) -> times.Intervals:
    """The times that marks of a phase cover."""
    spans = np.array(host.marks[region], dtype=float).reshape(-1, 2)
    return times.union(spans[:, 0], spans[:, 1])


def first_batch(host: Host, before: float) -> tuple[float, float] | None:
    """Start and end of the first load of data that is marked, if it ends by that time, and later ones are far shorter:
    the first batch of a loader, with the start of its workers, which tells nothing of the loop's batches. None for
    other traces."""
    marks = sorted(host.marks[DATA])
    if not marks or marks[0][1] > before:
        return None
    first_us = marks[0][1] - marks[0][0]
    return marks[0] if all(end - start <= MAX_LATER_FRAC * first_us for start, end in marks[1:]) else None


MAX_LATER_FRAC = 0.1
"""The first batch is far longer than those of which none takes more than this share of it."""
