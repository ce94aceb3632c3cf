"""Whether most operators were removed from a trace, as to make its file smaller.

>>> is_thinned(np.arange(0, 300, 3))     # the ids of the operators that are left
True
"""

from dataclasses import dataclass

import numpy as np

from amp_core.traces.link import Ints

MAX_ALONE_FRAC = 0.25
"""Share of operators whose predecessor is missing from which most are taken to have been removed. The profiler numbers
them one after the other: in some 20 traces of PyTorch 1.8 to 2.5 at most 0.6 % had none."""
MIN_OPERATORS = 50


def is_thinned(ids: Ints) -> bool:
    """Whether operators between those with these ids (`External id`) are missing; negative ids are none."""
    known = np.unique(ids[ids >= 0])
    return len(known) >= MIN_OPERATORS and float((np.diff(known) > 1).mean()) >= MAX_ALONE_FRAC


@dataclass(frozen=True)
class Sampled:
    """What is left of a trace whose launches and kernels were removed with most operators."""

    operators_frac: float
    """Share of the operators that are left, by their numbers."""


MIN_IDS_PER_LAUNCH, MIN_LAUNCHES = 100.0, 100
"""Calls into the runtime per launch, by their numbers, from which most launches are taken to have been removed, and
number of launches that tells it. In some 25 traces there are 7 to 24; libraries that start make thousands of calls."""


def sampled(ids: Ints, correlation: Ints, of_work: Ints) -> Sampled | None:
    """What is left of a trace; None where its operators (with these `External id`) or its launches are there.
    `correlation`: of the calls into the runtime; `of_work`: of the device's work."""
    launches = np.unique(correlation[(correlation >= 0) & np.isin(correlation, of_work)])
    if not is_thinned(ids) or len(launches) < MIN_LAUNCHES:
        return None
    if launches[-1] - launches[0] < MIN_IDS_PER_LAUNCH * (len(launches) - 1):
        return None
    known = np.unique(ids[ids >= 0])
    return Sampled(len(known) / float(known[-1] - known[0] + 1))
