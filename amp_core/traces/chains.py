"""What fusing saves of kernels that memory bounds: those that follow one another become one, as long as the longest.

>>> fused_away_us(events, host, linked)      # by work: of five kernels of 10 µs in a row, 8 µs each
array([8., 8., 8., 8., 8.])
"""

import math
import re
from dataclasses import dataclass

import numpy as np

from amp_core.hardware.kernel_names import classify_kernel
from amp_core.traces.events import TraceEvents
from amp_core.traces.gpu_work import Bools, LinkedWork
from amp_core.traces.link import OPTIMIZER, Floats, Host, Ints
from amp_core.traces.operators import operator_category
from amp_core.traces.waits import waiting_calls

FUSED_KINDS = ("norm", "elementwise", "reduction", "cast", "layout", "embedding")
"""Kinds of kernels that compilers fuse with one another."""
MAX_SIZE_RATIO = 4.0
"""Of the elements of one kernel to those of the next one, at most: others work on other tensors. Halves of a tensor
are put together again, as in rotary embeddings."""
_STAYS = re.compile(r"(?i)batch_?norm|\bbn_(?:fw|bw)")
"""Kernels that pass over a tensor once to reduce it across rows, which no other kernel does on its way."""
SORT_KERNELS = r"(?i)topk|sort|DeviceSelect"
"""In the names of kernels that sort or choose values: compilers leave them as they are."""
_APART, _AROUND = ("conv", "gemm", "attention", "optimizer"), ("conv", "gemm")
"""Operators whose kernels are a library's own, or an optimizer's, and those in which all are."""
ACCUMULATES = "AccumulateGrad"
"""In the names of operators that autograd calls itself, outside of what is compiled."""


def fused_away_us(events: TraceEvents, host: Host, linked: LinkedWork) -> Floats:
    """By work: what its chain takes beyond its longest kernel, in proportion to its own time, microseconds; 0 for work
    in no chain. A chain is of kernels of `FUSED_KINDS` that follow one another on a stream, on about as many elements,
    in one step and between two waits of the host; a few far shorter ones, which make masks or scalars for it, may lie
    between them."""
    away = np.zeros(len(linked))
    if not len(events.work):
        return away
    kinds = [classify_kernel(text).category for text in events.texts]
    fuses, fills = (np.array([kind in of for kind in kinds], dtype=np.bool_) for of in (FUSED_KINDS, ("memset",)))
    stays = np.array([_STAYS.search(text) is not None for text in events.texts], dtype=np.bool_)
    order = np.lexsort((linked.start_us, linked.stream, linked.device))
    order = order[~fills[linked.name[order]]]
    if not len(order):
        return away
    fuses &= np.array([re.search(SORT_KERNELS, text) is None for text in events.texts], dtype=np.bool_)
    member = fuses[linked.name[order]] & ~_is_apart(events, linked)[order]
    place = np.stack([linked.device[order], linked.stream[order]])
    us, elements = linked.own_us[order], _elements(events, linked)[order]
    ratio = _size_ratio(us, elements)
    follows = (place[:, 1:] == place[:, :-1]).all(axis=0) & member[1:] & member[:-1]
    follows &= ratio <= MAX_SIZE_RATIO
    stretch = np.searchsorted(_cuts(events, host), linked.launched_us[order], side="right")
    follows &= stretch[1:] == stretch[:-1]
    chain = np.concatenate([[0], np.cumsum(~follows)])
    kind = _kind(events, linked)[order]
    chain = _passes_apart(chain, kind)
    reduces = np.array([one == "reduction" for one in kinds], dtype=np.bool_)[linked.name[order]]
    where = np.unique(np.concatenate([place, stretch[None]]), axis=1, return_inverse=True)[1].reshape(-1)
    chain = _over_side_inputs(chain, _Kernels(us, elements, kind, where, member, reduces))
    whole_us = np.bincount(chain, us)
    longest_us = np.zeros(len(whole_us))
    np.maximum.at(longest_us, chain, us)
    stays_us = np.bincount(chain, np.where(stays[linked.name[order]], us, 0.0))
    left_us = np.maximum(longest_us, stays_us)
    share = np.divide(whole_us - left_us, whole_us, out=np.zeros(len(whole_us)), where=whole_us > 0)
    away[order] = np.where(member, us * share[chain], 0.0)
    return away


def _kind(events: TraceEvents, linked: LinkedWork) -> Ints:
    """By work: a number of its kernel, its operator and the shapes of its inputs together."""
    op, shapes = np.full(len(linked), -1), np.full(len(linked), -1)
    if len(events.spans):
        op = np.where(linked.op >= 0, np.asarray(events.spans.name)[linked.op], -1)
        shapes = np.where(linked.op >= 0, np.asarray(events.spans.shapes)[linked.op], -1)
    return np.unique(np.stack([linked.name, op, shapes]), axis=1, return_inverse=True)[1].reshape(-1)


def _passes_apart(chain: Ints, kind: Ints) -> Ints:
    """The chains, cut where the same kernels begin anew, as in passes without marks, or in equal calls of one
    operator: what comes later works on other values."""
    begins = np.flatnonzero(np.concatenate([[True], chain[1:] != chain[:-1]]))
    ends = np.append(begins[1:], len(chain))
    cuts = np.zeros(len(chain), dtype=np.int64)
    for low, high in zip(begins.tolist(), ends.tolist(), strict=True):
        if high - low >= MIN_PASSES_LENGTH and (period := _period(kind[low:high])):
            cuts[low + period : high : period] = 1
    return np.cumsum(np.diff(chain, prepend=0).astype(np.int64) | cuts)


def _period(kind: Ints) -> int:
    """After how many kernels a series of at least two passes begins anew; 0 for others."""
    for period in range(1, min(len(kind) // 2, MAX_PERIOD) + 1):
        if (kind[period:] == kind[:-period]).all() and len(kind) >= max(2 * period, MIN_PASSES_LENGTH):
            return period
    return 0


MIN_PASSES_LENGTH, MAX_PERIOD = 4, 64
"""Kernels of a chain from which it may be passes, and of a pass at most."""


@dataclass(frozen=True)
class _Kernels:
    """Work in the order of its streams."""

    us: Floats
    elements: Floats
    kind: Ints
    where: Ints
    """A number of its stream and of what lies between two cuts of the host."""
    member: Bools
    """Whether compilers fuse it."""
    reduces: Bools


def _over_side_inputs(chain: Ints, work: _Kernels) -> Ints:
    """The chains, joined where nothing but a few far shorter kernels lies between two, as for a mask or a scalar that
    the second one reads. These stay chains of their own. After a reduction they work on what is left of the values, so
    that what follows is another chain; so is what repeats the beginning of the first one, as of a pass."""
    begins = np.flatnonzero(np.concatenate([[True], chain[1:] != chain[:-1]]))
    ends = np.append(begins[1:], len(chain))
    whole_us, shortest_us = np.add.reduceat(work.us, begins), np.minimum.reduceat(work.us, begins)
    joined = np.arange(len(begins))
    # Without a chain that is far shorter than the one before it there is nothing to join.
    is_short = np.concatenate([[False], whole_us[1:] <= MAX_SIDE_FRAC * shortest_us[:-1]])
    if not (is_short & work.member[begins]).any():
        return chain
    where, member = work.where[begins].tolist(), work.member[begins].tolist()
    first, last, between, between_us, least_us = -1, -1, 0, 0.0, 0.0
    bounds = zip(begins.tolist(), ends.tolist(), whole_us.tolist(), shortest_us.tolist(), strict=True)
    for place, (low, high, us, shortest) in enumerate(bounds):
        if not member[place]:
            first = -1
            continue
        is_open = first >= 0 and where[first] == where[place]
        if is_open and between_us + us <= MAX_SIDE_FRAC * least_us and between + high - low <= MAX_SIDE_KERNELS:
            between, between_us = between + high - low, between_us + us
            continue
        if (
            is_open
            and between
            and between_us <= MAX_SIDE_FRAC * shortest
            and not work.reduces[last]
            and _size_ratio(work.us[[last, low]], work.elements[[last, low]])[0] <= MAX_SIZE_RATIO
            and not _begins_anew(work.kind[int(begins[first]) : int(ends[first])], work.kind[low:high])
        ):
            joined[place], least_us = first, min(least_us, shortest)
        else:
            first, least_us = place, shortest
        last, between, between_us = high - 1, 0, 0.0
    return np.repeat(joined, ends - begins)


def _begins_anew(kind: Ints, then: Ints) -> bool:
    """Whether some of these kernels, to their last or as many as the earlier ones, are as the earlier ones begin."""
    starts = np.flatnonzero(then == kind[0]).tolist()
    return any(np.array_equal(then[at:][: len(kind)], kind[: len(then) - at]) for at in starts)


MAX_SIDE_FRAC, MAX_SIDE_KERNELS = 0.05, 4
"""Time of all kernels between two chains over that of the shortest kernel of these, and how many they are, up to which
they make no more than masks and scalars."""


def _cuts(events: TraceEvents, host: Host) -> Floats:
    """Moments of the host across which nothing is fused: where a step begins, and where it waits for the device."""
    waits = np.asarray(events.calls.start)[waiting_calls(events)]
    return np.sort(np.concatenate([np.array([start for start, _, _ in host.steps], dtype=float), waits]))


def _size_ratio(us: Floats, elements: Floats) -> Floats:
    """By how much each two neighbours differ in elements; by their times, where these are not known: memory takes as
    long as bytes are many."""
    return np.where(np.isnan(_ratio(elements)), _ratio(us), _ratio(elements))


def _ratio(values: Floats) -> Floats:
    """Of each two neighbours the larger over the smaller."""
    ratio: Floats = np.maximum(values[1:], values[:-1]) / np.maximum(np.minimum(values[1:], values[:-1]), 1.0)
    return ratio


def _is_apart(events: TraceEvents, linked: LinkedWork) -> Bools:
    """By work: whether no compiler reaches it."""
    apart: Bools = linked.phase == OPTIMIZER
    if not len(events.spans):
        return apart
    names = np.asarray(events.spans.name)
    own, outer = (
        np.array([holds(text) for text in events.texts], dtype=np.bool_)
        for holds in (lambda text: operator_category(text) in _APART, is_library)
    )
    adds, biased = (
        np.array([holds(text) for text in events.texts], dtype=np.bool_)
        for holds in (ADDS.__contains__, lambda text: BIASED.search(text) is not None)
    )
    has_op, has_top = linked.op >= 0, linked.top >= 0
    of_bias = has_op & adds[names[linked.op]] & biased[names[linked.top]]
    apart |= (has_op & own[names[linked.op]]) | (has_top & outer[names[linked.top]] & ~of_bias)
    return apart


ADDS, BIASED = ("aten::add_", "aten::add"), re.compile(r"::(?:linear|_?conv(?:olution|\dd))$")
"""Operators that add, as a bias, and those that add one by one of these: compilers fuse that with the product, or with
what comes after it."""


def is_library(top_op: str) -> bool:
    """Whether an outermost operator computes by kernels of a library, or adds to gradients: no compiler fuses these."""
    return ACCUMULATES in top_op or operator_category(top_op) in _AROUND


def _elements(events: TraceEvents, linked: LinkedWork) -> Floats:
    """By work: the elements of the largest input of its operator; NaN where none is recorded."""
    elements = np.full(len(linked), np.nan)
    if not len(events.spans):
        return elements
    shapes = np.asarray(events.spans.shapes)
    of_op = np.where(linked.op >= 0, shapes[linked.op], -1)
    for number in np.unique(of_op[of_op >= 0]).tolist():
        shapes_of_op = [map(int, found.split(",")) for found in _SHAPE.findall(events.texts[number])]
        elements[of_op == number] = min(float(max(map(math.prod, shapes_of_op), default=np.nan)), MAX_ELEMENTS)
    return elements


_SHAPE = re.compile(r"\[(\d{1,15}(?:, ?\d{1,15}){0,9})\]")
"""A shape in the JSON list of the inputs' shapes."""
MAX_ELEMENTS = 2.0**60
"""More are of a damaged trace."""
