"""Link each moment of a host thread to its operator, module, phase and step.

    >>> host = link(events)
    >>> host.op_of_call[i], host.module_of_call[i], host.region_of_call[i]     # of the call that launched a kernel

Spans of a thread nest, so one pass in time order with a stack gives, for each span and call, its operator, the
outermost operator, the module and the phase. In backward the module is that of the forward operator with the same
sequence number, which created the autograd node.
"""

import itertools
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from amp_core import phases
from amp_core.traces.collect import LAUNCHES
from amp_core.traces.events import MARK, OP, STEP, TraceEvents
from amp_core.traces.marks import MODULE, PHASE

Ints = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]

PHASES = (None, *phases.PHASES)
UNMARKED = 0
DATA, FORWARD, BACKWARD, OPTIMIZER, WATCH = map(PHASES.index, ("data", "forward", "backward", "optimizer", "watch"))
"""Phases, as `region` numbers them. UNMARKED: `infer_phases` may fill it in from the marks before and after."""
AFTER_BACKWARD = len(PHASES)
"""Only a mark: the phase that follows decides which it is."""
_BY_NAME = {name: number for number, name in enumerate(PHASES) if name is not None}

_PYTHON_MODULE = "nn.Module: "
EVALUATE = "autograd::engine::evaluate_function: "
_NODE = re.compile(r"[A-Za-z_]\w*Backward\d*$|torch::autograd::")
_SCALER = re.compile(r"aten::_amp_(?:foreach_non_finite_check_and_unscale_|update_scale_)")
_WORDS = re.compile(
    r"(?:##\s*)?(forward|backward|optimizer)(?:[ _]?(?:pass|step))?(?:\s*##)?$|(DistributedDataParallel)\.forward$"
)
LOADING = re.compile(
    r"(?:##\s*)?(?:data|(?:data|batch)[ _-]?(?:load(?:ing|er)?|fetch(?:ing)?|wait)"
    r"|(?:load|fetch|get|next|wait[ _-]?for)[ _-]?(?:data|batch)(?:es)?)(?:\s*##)?$",
    re.IGNORECASE,
)
"""Ranges in which programs load their data, by the names that they give them."""


@dataclass
class Host:
    """Activity of the host; arrays are by span or by call, in the order of `TraceEvents`. -1 is none."""

    region_of_span: Ints
    parent: Ints
    top_of_span: Ints
    module_of_span: Ints
    watched_us: Floats
    """Time within an operator that AMPscope's hooks took without calling operators."""
    op_of_call: Ints
    module_of_call: Ints
    region_of_call: Ints
    modules: list[str]
    steps: list[tuple[float, float, int]]
    """Start, end and number of the marked steps, in order; without marks of steps, of those that an optimizer's step
    ends."""
    marks: dict[int, list[tuple[float, float]]]
    """Outermost spans that mark a phase, by region."""
    launching: npt.NDArray[np.bool_]
    """Which calls are on a thread that launches work; another one may wait for results meanwhile."""
    loop_thread: int = -1
    """The thread that runs the loop."""
    steps_inferred: bool = False
    """Whether the steps are those that an optimizer's step ends."""


def link(events: TraceEvents) -> Host:
    """Link spans and calls. Threads with marked steps, else those with most operators, come first: they run forward."""
    spans, calls = events.spans, events.calls
    kinds = [_NameFacts(text) for text in events.texts]
    host = Host(
        region_of_span=np.zeros(len(spans), np.int8),
        parent=np.full(len(spans), -1, np.int32),
        top_of_span=np.full(len(spans), -1, np.int32),
        module_of_span=np.full(len(spans), -1, np.int32),
        watched_us=np.zeros(len(spans), np.float32),
        op_of_call=np.full(len(calls), -1, np.int32),
        module_of_call=np.full(len(calls), -1, np.int32),
        region_of_call=np.zeros(len(calls), np.int8),
        modules=[],
        steps=[],
        marks={region: [] for region in range(len(PHASES))},
        launching=_on_launching_threads(events),
    )
    thread = np.concatenate([np.asarray(spans.thread), np.asarray(calls.thread)])
    start = np.concatenate([np.asarray(spans.start), np.asarray(calls.start)])
    end = np.concatenate([np.asarray(spans.end), np.asarray(calls.end)])
    order = np.lexsort((-end, start, thread)).astype(np.int32)
    bounds = np.searchsorted(thread[order], np.arange(events.threads + 1))
    del thread, start, end  # a hundred megabytes in a trace of a gigabyte
    names, stepping = np.asarray(spans.name), np.array([n for n, kind in enumerate(kinds) if kind.step >= 0])
    parts = [order[bounds[n] : bounds[n + 1]] for n in range(events.threads)]
    one_pass = _Pass(events, kinds, host, _phase_points(events, kinds, host))
    in_order = sorted(range(len(parts)), key=lambda n: _thread_priority(names, stepping, parts[n]))
    host.loop_thread = in_order[0] if in_order else -1
    for place, n in enumerate(in_order):
        one_pass.thread(parts[n], other_thread=place > 0)
    host.steps = _of_all_ranks(sorted(host.steps))
    if not host.steps:
        host.steps = _optimizer_steps(events, host)
        host.steps_inferred = bool(host.steps)
    _split_closures(host, events)
    _drop_unfinished_step(host, events)
    return host


MIN_LAUNCHING_FRAC = 0.01
"""Share of the launches from which a thread is one that launches."""


def _on_launching_threads(events: TraceEvents) -> npt.NDArray[np.bool_]:
    thread = np.asarray(events.calls.thread, dtype=np.int64)
    launches = np.array([LAUNCHES.search(text) is not None for text in events.texts], dtype=bool)
    count = np.bincount(thread[launches[np.asarray(events.calls.name, dtype=np.int64)]], minlength=events.threads + 1)
    result: npt.NDArray[np.bool_] = (count >= MIN_LAUNCHING_FRAC * count.sum())[thread]
    return result


def _of_all_ranks(steps: list[tuple[float, float, int]]) -> list[tuple[float, float, int]]:
    """Steps with those of the same number as one: a trace into which several ranks are merged marks each of them once
    per rank."""
    whole: dict[int, tuple[float, float, int]] = {}
    for start, end, number in steps:
        before = whole.get(number)
        if before is not None and start >= before[1]:  # counted anew
            return steps
        whole[number] = (start, end, number) if before is None else (before[0], max(end, before[1]), number)
    return list(whole.values())


def _optimizer_steps(events: TraceEvents, host: Host) -> list[tuple[float, float, int]]:
    """Steps from the end of an optimizer's step to the end of the next, for traces that mark none. What comes before
    the first is no whole step, and often the start of the program; it is left out. Of several optimizers, the one that
    steps last counts."""
    spans = events.spans
    stepping = [number for number, text in enumerate(events.texts) if text.startswith(_OPTIMIZER_STEP)]
    lasting = np.asarray(spans.end) > np.asarray(spans.start)  # the last one may be cut off where the trace ends
    found = np.flatnonzero(np.isin(np.asarray(spans.name), stepping) & lasting).tolist()
    outermost: list[int] = []
    for item in sorted(found, key=lambda i: (spans.start[i], -spans.end[i])):
        if not outermost or spans.start[item] >= spans.end[outermost[-1]]:
            outermost.append(item)
    ends = [spans.end[item] for item in outermost if spans.name[item] == spans.name[outermost[-1]]]
    # Several optimizers of one class, as GANs have, bear one name.
    if len(ends) == len(outermost) > MIN_OPTIMIZER_STEPS:
        ends = ends[::-1][:: _steps_per_iteration(events, host, outermost)][::-1]
    if len(ends) <= MIN_OPTIMIZER_STEPS:
        return []
    steps = [(start, end, number) for number, (start, end) in enumerate(itertools.pairwise(ends), start=1)]
    return steps[1:] if _begins_cold(steps) else steps


def _begins_cold(steps: list[tuple[float, float, int]]) -> bool:
    """Whether the first step is far longer than the others: it begins with what the first iteration does last, as the
    first value that is read."""
    first_us, *others_us = [end - start for start, end, _ in steps]
    return len(others_us) >= MIN_OTHER_STEPS and first_us > MAX_FIRST_RATIO * float(np.median(others_us))


MIN_OTHER_STEPS, MAX_FIRST_RATIO = 4, 2.0
"""Steps beside the first one from which their time is known, and how many times as long the first one may take."""


def _steps_per_iteration(events: TraceEvents, host: Host, optimizers: list[int]) -> int:
    """How many steps of optimizers an iteration has: as many as between two loads of data or two times that gradients
    are zeroed, or after as many as the optimizers call the same operators again, on tensors of the same sizes."""
    spans = events.spans
    starts = np.array([spans.start[item] for item in optimizers])
    zeroing = [number for number, text in enumerate(events.texts) if text.startswith(_OPTIMIZER_ZEROING)]
    zeroed = np.asarray(spans.start)[np.isin(np.asarray(spans.name), zeroing)]
    for begins in (sorted(start for start, _ in host.marks[DATA]), np.sort(zeroed)):
        marks = np.searchsorted(starts, begins)
        between = set(np.diff(marks).tolist())
        if len(marks) > MIN_OPTIMIZER_STEPS and len(between) == 1 and between != {0}:
            return int(between.pop())
    own = np.flatnonzero(np.asarray(spans.thread) == spans.thread[optimizers[0]])
    own = own[np.argsort(np.asarray(spans.start)[own], kind="stable")]
    calls = np.stack([np.asarray(spans.name)[own], np.asarray(spans.shapes)[own]])
    ends = [spans.end[item] for item in optimizers]
    bounds = np.searchsorted(np.asarray(spans.start)[own], np.stack([starts, ends]))
    called = [calls[:, low:high] for low, high in bounds.T.tolist()]
    for each in range(1, len(called) // (MIN_OPTIMIZER_STEPS + 1) + 1):
        again = called[each:]  # the first iteration also creates the optimizers' states
        if all(itertools.starmap(np.array_equal, zip(again, again[each:], strict=False))):
            return each
    return 1


def optimizer_names(events: TraceEvents) -> list[str]:
    """The classes of the optimizers that step, by the marks of their steps, in order of their names."""
    marks = (text for text in events.texts if text.startswith(_OPTIMIZER_STEP))
    return sorted({mark.removeprefix(_OPTIMIZER_STEP).removesuffix(".step") for mark in marks})


_OPTIMIZER_STEP, _OPTIMIZER_ZEROING = "Optimizer.step#", "Optimizer.zero_grad#"
MIN_OPTIMIZER_STEPS = 2


def _split_closures(host: Host, events: TraceEvents) -> None:
    """Give each phase its part of an optimizer step that runs forward and backward in a closure, as Lightning's do:
    what comes before backward is forward, and only what comes after it is the optimizer's."""
    starts, ends = np.array(host.marks[BACKWARD], dtype=float).reshape(-1, 2).T
    marks, host.marks[OPTIMIZER] = host.marks[OPTIMIZER], []
    of_spans, of_calls = np.asarray(events.spans.start), np.asarray(events.calls.start)
    for start, end in marks:
        inside = (starts >= start) & (ends <= end)
        if not inside.any():
            host.marks[OPTIMIZER].append((start, end))
            continue
        began, done = float(starts[inside].min()), float(ends[inside].max())
        for region, at in ((host.region_of_span, of_spans), (host.region_of_call, of_calls)):
            closure = (region == OPTIMIZER) & (at >= start) & (at < done)
            region[closure] = np.where(at[closure] < began, FORWARD, BACKWARD)
        host.marks[FORWARD].append((start, began))
        host.marks[OPTIMIZER].append((done, end))


def _drop_unfinished_step(host: Host, events: TraceEvents) -> None:
    """Drop a last step in which nothing ran: the last `prof.step()` of a loop begins one."""
    if len(host.steps) < 2:
        return
    operators = np.asarray(events.spans.kind) == OP
    began = np.sort(np.concatenate([np.asarray(events.spans.start)[operators], np.asarray(events.calls.start)]))
    (before, last) = ([start, end] for start, end, _ in host.steps[-2:])
    ran_before, ran = (np.diff(np.searchsorted(began, span)).item() for span in (before, last))
    if ran_before and not ran:
        host.steps.pop()


class _NameFacts:
    """Facts that follow from a name, computed once per name."""

    __slots__ = ("delimits", "module", "outermost", "phase", "region", "step")

    def __init__(self, text: str) -> None:
        match = STEP.match(text)
        self.step = int(match.group(1)) if match else -1
        self.module: str | None = None
        self.phase = -1
        self.region = UNMARKED
        # zero_grad may be called anywhere between two steps, so it delimits no phase.
        self.delimits = not text.startswith("Optimizer.zero_grad")
        node = text.startswith(EVALUATE) or _NODE.match(text) is not None
        self.outermost = node or "::" in text
        if text.startswith(MODULE):
            self.module = text.removeprefix(MODULE)
        elif text.startswith(_PYTHON_MODULE):
            self.module = text
        elif text.startswith(PHASE):
            word = text.removeprefix(PHASE)
            self.phase = AFTER_BACKWARD if word == "after_backward" else _BY_NAME.get(word, UNMARKED)
        elif node:
            self.region = BACKWARD
        elif text.startswith("Optimizer.") or _SCALER.match(text):
            self.region = OPTIMIZER
        elif text.startswith("enumerate(DataLoader)") or LOADING.match(text):
            self.region = DATA
        elif (match := _WORDS.match(text)) is not None:
            self.region = {"backward": BACKWARD, "optimizer": OPTIMIZER}.get(match.group(1), FORWARD)


def _phase_points(events: TraceEvents, kinds: list[_NameFacts], host: Host) -> list[tuple[float, int]]:
    """Times at which the loop enters a phase, with the phase, in order, from all threads: the start and end of backward
    are marked on autograd's thread. The time after backward is data if another forward follows (of the next
    micro-batch), else the optimizer's. Times of DATA and WATCH go into `host.marks`."""
    names = np.asarray(events.spans.name)
    marked = np.flatnonzero(np.isin(names, [n for n, kind in enumerate(kinds) if kind.phase >= 0]))
    start = np.asarray(events.spans.start)
    points: list[tuple[float, int]] = []
    following, until = UNMARKED, max(events.spans.end, default=0.0)
    for item in marked[np.argsort(start[marked], kind="stable")][::-1].tolist():
        phase = kinds[names[item]].phase
        if phase == AFTER_BACKWARD:
            phase = {UNMARKED: UNMARKED, FORWARD: DATA}.get(following, OPTIMIZER)
        elif phase != WATCH:
            following = phase
        at = float(start[item])
        if phase in (DATA, WATCH):
            host.marks[phase].append((at, until))
        points.append((at, phase))
        until = at
    return points[::-1]


def _thread_priority(names: Ints, stepping: Ints, items: Ints) -> tuple[bool, int]:
    own = items[items < len(names)]
    return not np.isin(names[own], stepping).any(), -len(own)


_NOT_WITHIN = {
    UNMARKED: (UNMARKED,),
    FORWARD: (UNMARKED,),
    BACKWARD: (UNMARKED, FORWARD),  # recomputation of a checkpoint is part of backward
    OPTIMIZER: (UNMARKED, FORWARD),  # a closure's
    DATA: (UNMARKED,),
    WATCH: tuple(range(len(PHASES))),
}
"""By phase, the phases that do not begin within it."""


_CHUNK = 2**16  # as Python objects, numbers take five times the memory of an array


class _Pass:
    """A pass over each thread."""

    def __init__(
        self, events: TraceEvents, kinds: list[_NameFacts], host: Host, points: list[tuple[float, int]]
    ) -> None:
        self._events = events
        self._kinds = kinds
        self._host = host
        self._points = points
        self._names = np.asarray(events.spans.name)
        self._nodes = np.array([n for n, kind in enumerate(kinds) if kind.region == BACKWARD])
        self._module_number: dict[str, int] = {}
        self._module_by_sequence: dict[int, int] = {}

    def thread(self, items: Ints, other_thread: bool) -> None:
        """Link one thread's spans and calls, sorted by start, longer ones first. `other_thread`: it is not the loop's,
        so that if it runs autograd nodes, all its work (such as a reducer's calls between them) belongs to backward."""
        events, kinds, host = self._events, self._kinds, self._host
        spans, calls = events.spans, events.calls
        num_spans = len(spans)
        own = items[items < num_spans]
        base = BACKWARD if other_thread and np.isin(self._names[own], self._nodes).any() else UNMARKED
        points, next_point = self._points, 0
        phase, since, before, before_since = UNMARKED, 0.0, UNMARKED, 0.0  # the marked phase now, and the one before
        called, until = 0.0, 0.0  # time of the operators called since, and the end of the last one
        # The open spans: end, operator, outermost operator, module, region.
        stack: list[tuple[float, int, int, int, int]] = [(float("inf"), -1, -1, -1, UNMARKED)]
        for item in (one for part in range(0, len(items), _CHUNK) for one in items[part : part + _CHUNK].tolist()):
            start = spans.start[item] if item < num_spans else calls.start[item - num_spans]
            while stack[-1][0] <= start:
                stack.pop()
            _, op, top, module, region = stack[-1]
            while next_point < len(points) and points[next_point][0] <= start:
                before, before_since = phase, since
                since, phase = points[next_point]
                next_point += 1
            if item >= num_spans:
                call = item - num_spans
                host.op_of_call[call] = op
                host.module_of_call[call] = module
                host.region_of_call[call] = WATCH if phase == WATCH else region or phase or base
                continue
            kind = kinds[spans.name[item]]
            if kind.phase >= 0:
                if before == WATCH and op >= 0:
                    host.watched_us[op] += max(0.0, start - before_since - called)
                called = 0.0
                continue
            if kind.step >= 0:
                host.steps.append((start, spans.end[item], kind.step))
                continue
            if kind.region != region and kind.region not in _NOT_WITHIN[region]:
                region = kind.region
                if kind.delimits:
                    host.marks[region].append((start, spans.end[item]))
            host.parent[item] = op
            sequence = spans.sequence[item]
            if kind.module is not None:
                module = self._enter(kind.module, module)
            elif spans.kind[item] != MARK:
                op = item
                if phase == WATCH and start >= until:  # not called by another of them
                    called, until = called + spans.end[item] - start, spans.end[item]
                if sequence >= 0:
                    if kind.region == BACKWARD:
                        module = self._module_by_sequence.get(sequence, module)
                    else:  # the last operator with a sequence number creates the node
                        self._module_by_sequence[sequence] = module
            if top < 0 and kind.outermost:
                top = item
            host.region_of_span[item] = WATCH if phase == WATCH else region or phase or base
            host.top_of_span[item] = top
            host.module_of_span[item] = module
            stack.append((spans.end[item], op, top, module, region))

    def _enter(self, name: str, around: int) -> int:
        """The number of a module by its name. Python's frames name a class, so its path is built here."""
        if name.startswith(_PYTHON_MODULE):
            outer = self._host.modules[around] if around >= 0 else ""
            name = name.removeprefix(_PYTHON_MODULE)
            name = f"{outer}.{name}" if outer else name
        number = self._module_number.get(name)
        if number is None:
            number = self._module_number[name] = len(self._host.modules)
            self._host.modules.append(name)
        return number
