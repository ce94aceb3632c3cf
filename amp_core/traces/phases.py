"""The phase of what nothing marks, from what was marked before and after it.

Between the last data loading, optimizer or step before and the next backward lies forward; between a backward and the
next optimizer lies what belongs to the optimizer's phase: unscaling and clipping. Elsewhere nothing is claimed.
"""

import numpy as np

from amp_core.traces.intervals import Floats
from amp_core.traces.link import BACKWARD, DATA, FORWARD, NOWHERE, OPTIMIZER, Host, Ints


def phases(host: Host, region: Ints, at: Floats) -> Ints:
    """`region` with the unmarked ones told where that is certain. `at`: their times, microseconds."""
    inside = {r: np.array(sorted(host.marks[r]), dtype=float).reshape(-1, 2) for r in (BACKWARD, OPTIMIZER, DATA)}
    backward, optimizer, data = inside[BACKWARD], inside[OPTIMIZER], inside[DATA]
    if not len(backward):
        # No training: what runs is forward. Where there is an optimizer without backward, nobody can tell.
        found = region.copy()
        if not len(optimizer):
            found[region == NOWHERE] = FORWARD
        return found
    steps = np.array([(start, end) for start, end, _ in host.steps], dtype=float).reshape(-1, 2)
    until = np.sort(np.concatenate([optimizer[:, 0], data[:, 0], steps[:, 1]]))
    since = np.sort(np.concatenate([optimizer[:, 1], data[:, 1], steps[:, 0]]))
    next_backward, next_optimizer = _next(backward[:, 0], at), _next(np.sort(optimizer[:, 0]), at)
    last_backward = _last(np.sort(backward[:, 1]), at)
    other = np.sort(np.concatenate([data[:, 0], steps[:, 1]]))
    unmarked = region == NOWHERE
    forward = unmarked & np.isfinite(next_backward) & (next_backward <= _next(until, at))
    unscaling = unmarked & ~forward & (last_backward >= _last(since, at)) & np.isfinite(last_backward)
    unscaling &= np.isfinite(next_optimizer) & (next_optimizer <= _next(other, at))
    found = region.copy()
    found[forward], found[unscaling] = FORWARD, OPTIMIZER
    return found


def _next(times: Floats, at: Floats) -> Floats:
    return np.append(times, np.inf)[np.searchsorted(times, at, side="left")]


def _last(times: Floats, at: Floats) -> Floats:
    return np.insert(times, 0, -np.inf)[np.searchsorted(times, at, side="right")]
