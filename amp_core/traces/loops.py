"""Loops of Python over small operators: the same series of them, again and again within one step.

>>> operator_loop(events, host)
OperatorLoop(passes=360, operators=4, us=51576.0, of_us=66566.0, names=('aten::where', 'aten::ge', 'aten::lt'), …)

Layers of a model are such a series too, and so is a benchmark that calls the same over and over. A series with
operators that have weights of their own is a loop only with more passes than a model has layers. A series that is
nearly all of a trace without marked steps is the loop that is profiled. Other operators between its passes end a run of
them, and are no part of its time. Beside a loop that is told, further ones of the same step are part of its time.
"""

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from amp_core.traces.collect import LAUNCHES
from amp_core.traces.events import OP, TraceEvents
from amp_core.traces.graphs import CAPTURES, GRAPH_LAUNCHES, count_calls
from amp_core.traces.link import DATA, OPTIMIZER, WATCH, Host
from amp_core.traces.operators import COMPILED, is_range, is_view, operator_category

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
MIN_RUN_PASSES = 2
"""Passes one after another, without another operator between them, from which they are part of the loop."""
MIN_EQUAL_FRAC = 0.75
"""Share of the passes that are the same as the one before from which they are those of one loop: series of unlike
length have most operators in common, too."""
MIN_FURTHER_FRAC = 0.1
"""Share of a step that a further loop takes at least."""
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


_PER_PARAMETER = re.compile(r"_$|vector_norm|::norm$|foreach|addc(?:div|mul)|lerp")
"""Operators that optimizers, averages and clipping call for each parameter where no `foreach` does it for all: no
further loops."""


@dataclass(frozen=True)
class FurtherLoop:
    """Another loop of the same step."""

    passes: int
    operators: int
    name: str
    """The operator that takes longest."""


@dataclass(frozen=True)
class OperatorLoop:
    """The same operators, again and again."""

    passes: int
    """In one step, or in the trace without steps."""
    operators: int
    """Of one pass, without those that they call."""
    us: float
    """From the first to the last of passes that follow one another, with what the host does between them,
    microseconds; with further loops of the step."""
    of_us: float
    """The time of that step, or of all operators of the trace."""
    names: tuple[str, ...]
    """The operators that take longest, of the passes of all steps, the longest first."""
    names_us: tuple[float, ...] = ()
    """How long each of them takes there."""
    further: tuple[FurtherLoop, ...] = ()
    """Further loops of that step, in the order in which they run."""
    called: tuple[str, ...] = ()
    """All of its operators, and those that they call."""
    compares: bool = False
    """Whether its passes compare tensors, as with bounds, and the host reads none of the results: no pass needs the one
    before."""
    moves: bool = False
    """Whether its passes compute nothing, and only gather elements and write them to others."""
    kernels: int = 0
    """If its operators only select and slice: kernels that its passes launch outside of operators."""


@dataclass(frozen=True)
class _Calls:
    """Operators that the loop's thread calls itself, in order."""

    spans: npt.NDArray[np.int64]
    names: npt.NDArray[Any]
    start: npt.NDArray[Any]
    end: npt.NDArray[Any]

    def part(self, chosen: Any) -> "_Calls":
        """Some of them, by index."""
        return _Calls(self.spans[chosen], self.names[chosen], self.start[chosen], self.end[chosen])


@dataclass(frozen=True)
class _Series:
    """A series that repeats."""

    us: float
    period: int
    runs: npt.NDArray[np.int64]
    """First and end of each stretch of passes that follow one another, as indices of the calls."""

    @property
    def inside(self) -> npt.NDArray[np.int64]:
        """The calls of all passes, as indices."""
        return _inside(self.runs)


def _inside(runs: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The indices from the first of each run to its end."""
    return np.concatenate([np.zeros(0, dtype=np.int64), *(np.arange(first, last) for first, last in runs.tolist())])


def operator_loop(events: TraceEvents, host: Host) -> OperatorLoop | None:
    """The loop that takes longest in the middle step of a trace, or in one without steps; None without such a one."""
    chosen = _operators(events, host)
    spans = events.spans
    everything = _Calls(chosen, *(np.asarray(column)[chosen] for column in (spans.name, spans.start, spans.end)))
    calls = everything
    if len(host.steps):
        low, high, _ = host.steps[len(host.steps) // 2]
        calls = calls.part((calls.start >= low) & (calls.end <= high))
    if count_calls(events, CAPTURES) and not count_calls(events, GRAPH_LAUNCHES):  # what is captured runs once
        return None
    calls = calls.part(slice(_MAX_CALLS))
    if len(calls.names) < MIN_PASSES:
        return None
    low, high = (low, high) if len(host.steps) else (float(calls.start[0]), float(calls.end.max()))
    ends, kernels = _with_launches(events, host, calls.start, calls.end)
    best = _longest_series(events, host, calls, ends)
    share = best.us / max(high - low, 1e-3)
    if share < MIN_FRAC or (not len(host.steps) and share > MAX_WHOLE_FRAC):
        return None
    inside, runs = best.inside, best.runs
    graphs = _graphs_launched(events, calls.start[runs[:, 0]], ends[runs[:, 1] - 1])
    if graphs * MAX_PASSES_OF_GRAPH >= len(inside) // best.period:
        return None
    each = np.unique(_one_pass(calls.names[inside], best.period))
    called = _called(events, host, calls.spans[inside])
    of_each = _us_of_names(calls, inside)[each]
    if len(host.steps):
        of_all_steps = everything.part(slice(_MAX_CALLS))
        in_passes = _inside(_equal_runs(of_all_steps.names, called, best.period))
        of_each = _us_of_names(of_all_steps, in_passes)[each] if len(in_passes) else of_each
    order = np.argsort(-of_each, kind="stable")[:_MAX_NAMES]
    texts = {events.texts[name] for name in each.tolist()}
    only_views = all(map(is_view, texts))
    # Of a trace without steps, loops may be benchmarks one after another.
    others = _further_series(events, host, calls, best, high - low) if len(host.steps) and not only_views else []
    of_all = np.concatenate([inside, *(one.inside for one in others)])
    period = best.period if len(each) > 1 else 1
    return OperatorLoop(
        passes=len(inside) // period,
        operators=period,
        us=best.us + sum(one.us for one in others),
        of_us=high - low,
        names=tuple(events.texts[name] for name in each[order].tolist()),
        names_us=tuple(of_each[order].tolist()),
        further=tuple(_told_further(events, calls, one) for one in others),
        called=tuple(events.texts[name] for name in _called(events, host, calls.spans[of_all])[:_MAX_CALLED].tolist()),
        compares=not others and any(map(_COMPARES.match, texts)) and not any(map(_READS.match, texts)),
        moves=not others
        and all(_MOVES.match(text) or is_view(text) for text in texts)
        and any(map(_WRITES.match, texts)),
        kernels=int(kernels[inside].sum()) if only_views else 0,
    )


def _longest_series(events: TraceEvents, host: Host, calls: _Calls, ends: npt.NDArray[Any]) -> _Series:
    """The series that takes longest among these calls; one of 0 µs without any. `ends`: when each call ends, with what
    is launched after it."""
    names, start, end = calls.names, calls.start, calls.end
    weights = np.array([_has_weights(text) for text in events.texts], dtype=bool)
    best = _Series(0.0, 1, np.zeros((0, 2), dtype=np.int64))
    for period in range(1, min(MAX_OPERATORS, len(names) // MIN_PASSES) + 1):
        first, last = _longest_run(names[period:] == names[:-period])
        last += period
        if last - first < MIN_PASSES * period or float((end - start)[first:last].mean()) > MAX_MEAN_US:
            continue
        each = _one_pass(names[first:last], period)
        of_pass = first + np.flatnonzero(np.isin(names[first:last], each))
        called = _called(events, host, calls.spans[of_pass])  # rounded times may put one of these beside its caller
        runs = first + _equal_runs(names[first:last], called, period)
        if not len(runs):
            continue
        passes = int((runs[:, 1] - runs[:, 0]).sum()) // period
        us = float((ends[runs[:, 1] - 1] - start[runs[:, 0]]).sum())
        least = MIN_PASSES_WITH_WEIGHTS if weights[each].any() else MIN_PASSES
        if passes >= least and us > MIN_BETTER_RATIO * best.us:
            best = _Series(us, period, runs)
    return best


def _equal_runs(names: npt.NDArray[Any], called: npt.NDArray[np.int64], period: int) -> npt.NDArray[np.int64]:
    """Stretches of a loop's operators in which one pass is mostly as the one before, one row each."""
    runs = _runs(np.isin(names, called), MIN_RUN_PASSES * period)
    equal = np.array([_equal_frac(names[a:b], period) >= MIN_EQUAL_FRAC for a, b in runs], dtype=bool)
    chosen: npt.NDArray[np.int64] = runs[equal]
    return chosen


def _further_series(events: TraceEvents, host: Host, calls: _Calls, best: _Series, step_us: float) -> list[_Series]:
    """Series of elementwise operators beside the longest one of a step, in the same phase."""
    free = np.ones(len(calls.names), dtype=bool)
    free[best.inside] = False
    regions = host.region_of_span[calls.spans]
    of_best = np.unique(regions[best.inside])
    found = []
    for first, last in _runs(free, MIN_PASSES).tolist():
        if calls.end[last - 1] - calls.start[first] < MIN_FURTHER_FRAC * step_us:
            continue
        part = calls.part(slice(first, last))
        one = _longest_series(events, host, part, part.end)
        if one.us < MIN_FURTHER_FRAC * step_us:
            continue
        one = _Series(one.us, one.period, one.runs + first)
        texts = [events.texts[name] for name in _pass_of(calls, one).tolist()]
        computes = any(operator_category(text) == "elementwise" for text in texts)
        if computes and not any(map(_PER_PARAMETER.search, texts)) and np.isin(regions[one.inside], of_best).all():
            found.append(one)
    return found


def _pass_of(calls: _Calls, series: _Series) -> npt.NDArray[np.int64]:
    """The names of the operators of one pass, each once."""
    return np.unique(_one_pass(calls.names[series.inside], series.period))


def _told_further(events: TraceEvents, calls: _Calls, series: _Series) -> FurtherLoop:
    inside, each = series.inside, _pass_of(calls, series)
    us = _us_of_names(calls, inside)[each]
    period = series.period if len(each) > 1 else 1
    return FurtherLoop(len(inside) // period, period, events.texts[int(each[us.argmax()])])


def _us_of_names(calls: _Calls, inside: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    """By name: how long these calls take, microseconds."""
    us: npt.NDArray[Any] = np.bincount(
        calls.names[inside], (calls.end - calls.start)[inside], minlength=int(calls.names.max(initial=0)) + 1
    )
    return us


def _called(events: TraceEvents, host: Host, operators: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The names of these operators, and of those that they call."""
    return np.unique(np.asarray(events.spans.name)[np.isin(host.top_of_span, operators)])


_MAX_CALLED = 100
_COMPARES = re.compile(r"aten::(?:ge|gt|le|lt|eq|ne|greater|less|bucketize|searchsorted)(?:_equal)?_?$")
_WRITES = re.compile(r"aten::(?:fill_|copy_|index_put_)$")
_MOVES = re.compile(rf"{_WRITES.pattern}|aten::(?:index|index_select|gather|clone|item|alias|lift_fresh)$")
_READS = re.compile(r"aten::(?:item|is_nonzero|_local_scalar_dense|equal|allclose)$")
"""Operators by which the host reads a result, as of the test that ends an iteration."""


def _runs(same: npt.NDArray[np.bool_], least: int) -> npt.NDArray[np.int64]:
    """First and end of each stretch of at least that many places that are True, one row each."""
    changes = np.flatnonzero(np.diff(np.concatenate([[False], same, [False]]).astype(np.int8))).reshape(-1, 2)
    return changes[changes[:, 1] - changes[:, 0] >= least]


def _with_launches(
    events: TraceEvents, host: Host, start: npt.NDArray[Any], end: npt.NDArray[Any]
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """By operator of the loop's thread: when it ends, or the last kernel is launched after it outside of operators; and
    how many kernels are."""
    calls, kernels, ends = events.calls, np.zeros(len(start), dtype=np.int64), end.copy()
    if not len(calls):
        return ends, kernels
    ranges = np.array([is_range(text) for text in events.texts], dtype=bool)
    launches = np.array([LAUNCHES.search(text) is not None for text in events.texts], dtype=bool)
    own = (np.asarray(calls.thread) == host.loop_thread) & launches[np.asarray(calls.name)]
    own &= (host.op_of_call < 0) | ranges[np.asarray(events.spans.name)[host.op_of_call]]
    after = np.searchsorted(start, np.asarray(calls.start)[own], side="right") - 1
    np.add.at(kernels, after[after >= 0], 1)
    np.maximum.at(ends, after[after >= 0], np.asarray(calls.end)[own][after >= 0])
    return ends, kernels


def _graphs_launched(events: TraceEvents, low: npt.NDArray[Any], high: npt.NDArray[Any]) -> int:
    """How many graphs are launched between one of `low` and the same of `high`, which follow one another."""
    matches = np.array([GRAPH_LAUNCHES.search(text) is not None for text in events.texts], dtype=bool)
    at = np.asarray(events.calls.start)[matches[np.asarray(events.calls.name, dtype=np.int64)]]
    place = np.searchsorted(low, at, side="right") - 1
    return int(((place >= 0) & (at < high[place])).sum())


MAX_PASSES_OF_GRAPH = 10
"""Passes per graph that is launched among them up to which they belong to replays: torch fills the state of random
numbers before each."""


def _one_pass(names: npt.NDArray[Any], period: int) -> npt.NDArray[Any]:
    """The operator at each place of a pass: that which is there most often."""
    whole = names[: len(names) // period * period].reshape(-1, period)
    return np.array([np.bincount(column).argmax() for column in whole.T])


def _operators(events: TraceEvents, host: Host) -> npt.NDArray[np.int64]:
    """The operators that the loop's thread calls itself, in order, without those that load data and the optimizer's."""
    operators = outermost_operators(events, host)
    own = np.asarray(events.spans.thread)[operators] == host.loop_thread
    chosen: npt.NDArray[np.int64] = operators[own & ~np.isin(host.region_of_span[operators], (DATA, OPTIMIZER, WATCH))]
    return chosen


def outermost_operators(events: TraceEvents, host: Host) -> npt.NDArray[np.int64]:
    """The operators that no other one calls, as indices of spans, in the order in which they start."""
    spans = events.spans
    if not len(spans):
        return np.zeros(0, dtype=np.int64)
    ranges = np.array([is_range(one) or _OTHERS.search(one) is not None for one in events.texts], dtype=bool)
    name = np.asarray(spans.name)
    is_op = (np.asarray(spans.kind) == OP) & ~ranges[name]
    called = (host.parent >= 0) & is_op[np.maximum(host.parent, 0)]
    chosen = np.flatnonzero(is_op & ~called)
    return chosen[np.argsort(np.asarray(spans.start)[chosen], kind="stable")]


def _equal_frac(names: npt.NDArray[Any], period: int) -> float:
    """The share of passes that are the same, in each of their operators, as the one before."""
    same = names[period:] == names[:-period]
    return float(same[: len(same) // period * period].reshape(-1, period).all(axis=1).mean())


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
    """Whether an operator may belong to a layer of a model; those that only gather or scatter do not tell."""
    category = operator_category(name) if name.startswith("aten::") else ""
    is_layer = category in _WITH_WEIGHTS and (category != "embedding" or "embedding" in name)
    return name in _PRODUCTS_WITH_WEIGHTS or is_layer
