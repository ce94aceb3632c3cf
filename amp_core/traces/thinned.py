"""Whether most operators were removed from a trace, as to make its file smaller.

>>> is_thinned(np.arange(0, 300, 3))     # the ids of the operators that are left
True
"""

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
