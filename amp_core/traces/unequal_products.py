"""Equal products of a device that take unequally long: the same kernel on the same sizes.

>>> unequal_products(events, linked)
UnequalProducts(count=12, us=17800.0, kernel_us=21000.0, kernel='miopenSp3AsmConv_…', longest_us=2555.0, usual_us=194.0)
"""

from dataclasses import dataclass

import numpy as np

from amp_core.hardware.kernel_names import GEMM_CATEGORIES, classify_kernel
from amp_core.traces.events import TraceEvents
from amp_core.traces.gpu_work import LinkedWork

MIN_EQUAL = 5
"""Launches of one kernel on one size from which their usual time is known."""
USUAL_QUANTILE = 0.25
"""A shared or throttled device slows any number of them, so that the median may be one of the slow ones."""
MIN_SLOW_RATIO = 3.0
"""A launch is slow that takes that many times as long; collectives beside it explain less."""
MIN_BEFORE_FRAC = 0.9
"""Share of pairs of a slow launch and another one from which the slow ones come first."""
MIN_SLOW_FRAC = 0.2
"""Share of the kernel time beyond what is usual from which it is kept."""


@dataclass(frozen=True)
class UnequalProducts:
    """Products that take far longer than others of the same kernel and sizes."""

    count: int
    us: float
    """By how much they are longer than what is usual, in all, microseconds."""
    kernel_us: float
    """The time of all kernels and copies that are launched in the trace."""
    kernel: str
    """The kernel of the one that is longer by most."""
    longest_us: float
    usual_us: float
    """The time of that one, and what is usual for it."""
    slow_first: bool = False
    """Whether the slow ones come before nearly all others of the same kernel and sizes, as until a device is warm."""


def unequal_products(events: TraceEvents, linked: LinkedWork) -> UnequalProducts | None:
    """Such products of a trace that records sizes; None for few of them, and for a CPU."""
    if not len(events.work):
        return None
    classes = [classify_kernel(text) for text in events.texts]
    multiplies = np.array([one.category in GEMM_CATEGORIES or one.tensor_core == "yes" for one in classes], dtype=bool)
    shapes = linked.op
    if len(events.spans):
        shapes = np.where(linked.op >= 0, np.asarray(events.spans.shapes)[linked.op], -1)
    known = np.flatnonzero(multiplies[linked.name] & (shapes >= 0))
    if not len(known):
        return None
    _, kind = np.unique(np.stack([linked.name[known], shapes[known]]), axis=1, return_inverse=True)
    beyond, before, pairs = np.zeros(len(linked)), 0, 0
    for number in np.flatnonzero(np.bincount(kind.reshape(-1)) >= MIN_EQUAL).tolist():
        equal = known[kind.reshape(-1) == number]
        equal = equal[np.argsort(linked.start_us[equal], kind="stable")]
        usual_us = float(np.quantile(linked.own_us[equal], USUAL_QUANTILE))
        is_slow = linked.own_us[equal] > MIN_SLOW_RATIO * usual_us
        slow, later = equal[is_slow], np.cumsum(~is_slow[::-1])[::-1]
        before, pairs = before + int(later[is_slow].sum()), pairs + len(slow) * int((~is_slow).sum())
        beyond[slow] = linked.own_us[slow] - usual_us
    kernel_us = float(linked.own_us[np.isfinite(linked.launched_us)].sum())  # of others no sizes are known
    if beyond.sum() < MIN_SLOW_FRAC * kernel_us or not beyond.any():
        return None
    most = int(beyond.argmax())
    return UnequalProducts(
        count=int((beyond > 0).sum()),
        us=float(beyond.sum()),
        kernel_us=kernel_us,
        kernel=events.texts[linked.name[most]],
        longest_us=float(linked.own_us[most]),
        usual_us=float(linked.own_us[most] - beyond[most]),
        slow_first=before >= MIN_BEFORE_FRAC * pairs,
    )
