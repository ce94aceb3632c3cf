"""Infer the phase of unmarked times from the marks before and after them.

Forward lies between the end of the last data loading, optimizer or step and the next backward. The optimizer's phase,
with unscaling and clipping, lies between a backward and the next optimizer. Elsewhere the phase stays unknown.
"""

import numpy as np

from amp_core.traces.intervals import Floats
from amp_core.traces.link import BACKWARD, DATA, FORWARD, OPTIMIZER, UNMARKED, Host, Ints


def infer_phases(host: Host, region: Ints, at: Floats) -> Ints:
    """`region` with unmarked entries filled in where their phase is certain. `at`: their times, microseconds."""
    inside = {r: np.array(sorted(host.marks[r]), dtype=float).reshape(-1, 2) for r in (BACKWARD, OPTIMIZER, DATA)}
    backward, optimizer, data = inside[BACKWARD], inside[OPTIMIZER], inside[DATA]
    if not len(backward):
        # Without backward there is no training, so everything is forward. With an optimizer it remains unknown.
        phase = region.copy()
        if not len(optimizer):
            phase[region == UNMARKED] = FORWARD
        return phase
    steps = np.array([(start, end) for start, end, _ in host.steps], dtype=float).reshape(-1, 2)
    until = np.sort(np.concatenate([optimizer[:, 0], data[:, 0], steps[:, 1]]))
    since = np.sort(np.concatenate([optimizer[:, 1], data[:, 1], steps[:, 0]]))
    next_backward, next_optimizer = _next(backward[:, 0], at), _next(np.sort(optimizer[:, 0]), at)
    last_backward = _last(np.sort(backward[:, 1]), at)
    other = np.sort(np.concatenate([data[:, 0], steps[:, 1]]))
    unmarked = region == UNMARKED
    forward = unmarked & np.isfinite(next_backward) & (next_backward <= _next(until, at))
    unscaling = unmarked & ~forward & (last_backward >= _last(since, at)) & np.isfinite(last_backward)
    unscaling &= np.isfinite(next_optimizer) & (next_optimizer <= _next(other, at))
    phase = region.copy()
    phase[forward], phase[unscaling] = FORWARD, OPTIMIZER
    return phase


def _next(times: Floats, at: Floats) -> Floats:
    return np.append(times, np.inf)[np.searchsorted(times, at, side="left")]


def _last(times: Floats, at: Floats) -> Floats:
    return np.insert(times, 0, -np.inf)[np.searchsorted(times, at, side="right")]
