"""A device that takes longer for the same kernels in some steps than in others: throttled, or shared.

>>> slow_device(events, host, linked)
SlowDevice(us=37000.0, of_us=147000.0, least_us=10900.0, most_us=22600.0)
"""

from dataclasses import dataclass

import numpy as np

from amp_core.hardware.kernel_names import classify_kernel
from amp_core.traces.events import TraceEvents
from amp_core.traces.gpu_work import LinkedWork
from amp_core.traces.link import Host

MIN_STEPS = 4
"""Steps from which their pace is known."""
MAX_COUNTS_SPREAD = 0.02
"""Difference of the steps' numbers of kernels, as a share of the mean, up to which they launch the same."""
PACE_QUANTILE = 0.25
MIN_SLOW_RATIO = 1.25
"""The slowest step takes that many times as long as the fastest one."""
MIN_SLOW_STEPS = 2
"""Steps that take so much longer: one alone may wait for something once."""
MIN_LOST_FRAC = 0.1
"""Share of the kernel time beyond the pace of the fastest quarter of the steps from which it is kept."""
MIN_SLOWER_FRAC = 0.8
"""Share of the kernel time of the slowest step in kernels that are slower there than in the fastest one, each by name:
other sizes make some of them slower, and a throttled or shared device all."""


@dataclass(frozen=True)
class SlowDevice:
    """Steps of the same kernels that take unequally long on a device, without its communication and copies."""

    us: float
    """By how much they take longer than at the pace of the fastest quarter of the steps, in all."""
    of_us: float
    """The time of all of these kernels."""
    least_us: float
    most_us: float
    """That of the fastest and of the slowest step."""


def slow_device(events: TraceEvents, host: Host, linked: LinkedWork) -> SlowDevice | None:
    """Such steps of a trace; None where they take about equally long, or launch other kernels."""
    if not len(events.work) or len(host.steps) < MIN_STEPS:
        return None
    starts, ends = (np.array([step[side] for step in host.steps]) for side in (0, 1))
    computes = np.array([classify_kernel(text).category not in _OTHER for text in events.texts], dtype=bool)
    chosen = np.flatnonzero(computes[linked.name] & np.isfinite(linked.launched_us))
    at = np.searchsorted(starts, linked.launched_us[chosen], side="right") - 1
    inside = (at >= 0) & (linked.launched_us[chosen] < ends[np.maximum(at, 0)])
    chosen, at = chosen[inside], at[inside]
    counts = np.bincount(at, minlength=len(starts))
    us = np.bincount(at, linked.own_us[chosen], minlength=len(starts))
    if counts.min() == 0 or counts.max() - counts.min() > MAX_COUNTS_SPREAD * counts.mean():
        return None
    lost_us = float((us - np.quantile(us, PACE_QUANTILE)).clip(min=0.0).sum())
    slow, fast = int(us.argmax()), int(us.argmin())
    are_slow = (us >= MIN_SLOW_RATIO * us[fast]).sum() >= MIN_SLOW_STEPS
    if lost_us < MIN_LOST_FRAC * us.sum() or not are_slow:
        return None
    by_name = [
        np.bincount(linked.name[chosen[at == step]], linked.own_us[chosen[at == step]], minlength=len(events.texts))
        for step in (slow, fast)
    ]
    slower_us = float(by_name[0][by_name[0] > by_name[1]].sum())
    if slower_us < MIN_SLOWER_FRAC * us[slow]:
        return None
    return SlowDevice(lost_us, float(us.sum()), float(us[fast]), float(us[slow]))


_OTHER = ("communication", "memcpy", "memset")
