"""Loops of Python over small operators: the same series of them, again and again within one step.

>>> operator_loop(events, host)
OperatorLoop(passes=360, operators=4, us=51576.0, of_us=66566.0, names=('aten::where', 'aten::ge', 'aten::lt'))

Layers of a model are such a series too, and so is a benchmark that calls the same over and over. A series with
operators that have weights of their own is a loop only with more passes than a model has layers. A series that is
nearly all of a trace without marked steps is the loop that is profiled.
"""

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from amp_core.traces.events import OP, TraceEvents
from amp_core.traces.link import DATA, OPTIMIZER, WATCH, Host
from amp_core.traces.operators import COMPILED, is_range, operator_category

MAX_OPERATORS = 160
"""Operators of one pass; longer series are those of models."""
MIN_PASSES, MIN_PASSES_WITH_WEIGHTS = 8, 200
"""Passes of a loop, and of one over operators with weights: models have up to some 130 layers."""
MAX_MEAN_US = 100.0
"""Mean time of the operators up to which calling them costs much of it."""
MIN_FRAC = 0.3
"""Share of the time of a step, or of the trace without steps, from which it is kept."""
MAX_WHOLE_FRAC = 0.85
"""The same without steps up to which it is part of a program, and not all that is profiled."""
MIN_BETTER_RATIO = 1.1
"""A longer series counts only if it covers that much more: two passes of a series are one of a longer one, too."""
_MAX_NAMES = 3
_MAX_CALLS = 500_000
"""Calls among which a loop is looked for; a step has fewer."""
_OTHERS = re.compile(rf"^autograd::|Backward\d*$|^triton_|{COMPILED.pattern}")
"""Backward repeats what forward does, and what is compiled is no loop of Python."""
_WITH_WEIGHTS = frozenset({"conv", "norm", "embedding", "attention"})
"""Categories of operators with weights, beside `_PRODUCTS_WITH_WEIGHTS`."""
_PRODUCTS_WITH_WEIGHTS = ("aten::linear", "aten::addmm", "aten::mm", "aten::lstm", "aten::gru")


@dataclass(frozen=True)
class OperatorLoop:
    """The same operators, again and again."""

    passes: int
    """In one step, or in the trace without steps."""
    operators: int
    """Of one pass, without those that they call."""
    us: float
    """From the first to the last, with what the host does between them, microseconds."""
    of_us: float
    """The time of that step, or of all operators of the trace."""
    names: tuple[str, ...]
    """The operators that take longest, the longest first."""


def operator_loop(events: TraceEvents, host: Host) -> OperatorLoop | None:
    """The loop that takes longest in the middle step of a trace, or in one without steps; None without such a one."""
    chosen = _operators(events, host)
    start, end = (np.asarray(times)[chosen] for times in (events.spans.start, events.spans.end))
    if len(host.steps):
        low, high, _ = host.steps[len(host.steps) // 2]
        inside = (start >= low) & (end <= high)
        chosen, start, end = chosen[inside], start[inside], end[inside]
    chosen, start, end = chosen[:_MAX_CALLS], start[:_MAX_CALLS], end[:_MAX_CALLS]
    if len(chosen) < MIN_PASSES:
        return None
    low, high = (low, high) if len(host.steps) else (float(start[0]), float(end.max()))
    names = np.asarray(events.spans.name)[chosen]
    weights = np.array([_has_weights(text) for text in events.texts], dtype=bool)
    best: tuple[float, int, int, int] = (0.0, 0, 0, 0)
    for period in range(1, min(MAX_OPERATORS, len(names) // MIN_PASSES) + 1):
        first, last = _longest_run(names[period:] == names[:-period])
        last += period
        if last - first < MIN_PASSES * period or float((end - start)[first:last].mean()) > MAX_MEAN_US:
            continue
        least = MIN_PASSES_WITH_WEIGHTS if weights[_one_pass(names[first:last], period)].any() else MIN_PASSES
        us = float(end[last - 1] - start[first])
        if (last - first) // period >= least and us > MIN_BETTER_RATIO * best[0]:
            best = us, period, first, last
    us, period, first, last = best
    share = us / max(high - low, 1e-3)
    if share < MIN_FRAC or (not len(host.steps) and share > MAX_WHOLE_FRAC):
        return None
    of_name = np.bincount(names[first:last], (end - start)[first:last])
    each = np.unique(_one_pass(names[first:last], period))
    longest = each[np.argsort(-of_name[each], kind="stable")][:_MAX_NAMES]
    return OperatorLoop(
        passes=(last - first) // period,
        operators=period,
        us=us,
        of_us=high - low,
        names=tuple(events.texts[name] for name in longest.tolist()),
    )


def _one_pass(names: npt.NDArray[Any], period: int) -> npt.NDArray[Any]:
    """The operator at each place of a pass: that which is there most often."""
    whole = names[: len(names) // period * period].reshape(-1, period)
    return np.array([np.bincount(column).argmax() for column in whole.T])


def _operators(events: TraceEvents, host: Host) -> npt.NDArray[np.int64]:
    """The operators that the loop's thread calls itself, in order, without those that load data and the optimizer's."""
    spans = events.spans
    if not len(spans):
        return np.zeros(0, dtype=np.int64)
    ranges = np.array([is_range(one) or _OTHERS.search(one) is not None for one in events.texts], dtype=bool)
    name = np.asarray(spans.name)
    is_op = (np.asarray(spans.kind) == OP) & ~ranges[name]
    called = (host.parent >= 0) & is_op[np.maximum(host.parent, 0)]
    is_op &= ~called & (np.asarray(spans.thread) == host.loop_thread)
    chosen = np.flatnonzero(is_op & ~np.isin(host.region_of_span, (DATA, OPTIMIZER, WATCH)))
    return chosen[np.argsort(np.asarray(spans.start)[chosen], kind="stable")]


def _longest_run(same: npt.NDArray[np.bool_]) -> tuple[int, int]:
    """Begin and end of the stretch that is True for the longest, but for some places within it."""
    score = np.concatenate([[0], np.cumsum(np.where(same, 1, -MISMATCH_COST))])
    begins = np.minimum.accumulate(score)
    last = int((score - begins).argmax())
    first = int(score[: last + 1].argmin())
    return first, last


MISMATCH_COST = 5
"""Places that are the same, which one that is not is worth: rounded times may hide which of two operators is inside
the other."""


def _has_weights(name: str) -> bool:
    """Whether an operator may belong to a layer of a model."""
    return name in _PRODUCTS_WITH_WEIGHTS or (name.startswith("aten::") and operator_category(name) in _WITH_WEIGHTS)
