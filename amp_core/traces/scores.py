"""Kernels on the scores of attention that is computed in steps: what runs between its two products.

>>> of_scores(events, linked)      # by work: True for the scale, the mask, the softmax and the casts
"""

import re

import numpy as np
import numpy.typing as npt

from amp_core.hardware.kernel_names import COPIES, GEMM_CATEGORIES, classify_kernel
from amp_core.traces.events import TraceEvents
from amp_core.traces.gpu_work import LinkedWork

_PRODUCTS = re.compile(r"aten::(?:bmm|baddbmm_?)$")
_SOFTMAX = re.compile(r"aten::_softmax(?:_backward_data)?$")


def of_scores(events: TraceEvents, linked: LinkedWork) -> npt.NDArray[np.bool_]:
    """By work: whether it runs on its stream between two products of batches, with a softmax and no other product
    between these. Forward and backward are alike in that."""
    found = np.zeros(len(linked), dtype=bool)
    if not len(events.work) or not len(events.spans):
        return found
    in_product, in_softmax = (
        np.array([of.match(text) is not None for text in events.texts], dtype=bool) for of in (_PRODUCTS, _SOFTMAX)
    )
    kinds = [classify_kernel(text).category for text in events.texts]
    multiplies, copies = (np.array([kind in of for kind in kinds], dtype=bool) for of in (GEMM_CATEGORIES, COPIES))
    order = np.lexsort((linked.start_us, linked.stream, linked.device))
    order = order[~copies[linked.name[order]]]
    if not len(order):
        return found
    op = np.where(linked.op[order] >= 0, np.asarray(events.spans.name)[linked.op[order]], -1)
    of_batches, softmax = in_product[op] & (op >= 0), in_softmax[op] & (op >= 0)
    place = np.stack([linked.device[order], linked.stream[order]])
    # A stretch begins with a product, and with the first work of a stream.
    begins = np.concatenate([[True], (place[:, 1:] != place[:, :-1]).any(axis=0)])
    begins |= of_batches | multiplies[linked.name[order]]
    stretch = np.cumsum(begins) - 1
    first = np.flatnonzero(begins)
    has_softmax = np.bincount(stretch, softmax, minlength=len(first)) > 0
    same_stream = (place[:, first[1:]] == place[:, first[:-1]]).all(axis=0)
    between = of_batches[first] & np.concatenate([same_stream & of_batches[first[1:]], [False]])
    found[order] = (between & has_softmax)[stretch] & ~begins
    return found
