"""Which operator, module, phase and step each moment of a host thread belongs to.

    >>> host = link(kept)
    >>> host.op_of_call[i], host.module_of_call[i], host.region_of_call[i]     # of the call that launched a kernel

Spans of a thread lie in one another like brackets, so one pass in the order of time with a stack tells, for each span
and call, the operator it happened in, the outermost one, the module and the phase. In backward the module is that of
the forward operator with the same sequence number: the autograd node was made there.
"""

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from amp_core import phases
from amp_core.traces.collect import MARK, Kept
from amp_core.traces.marks import MODULE, PHASE

Ints = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]

PHASES = (None, *phases.PHASES)
NOWHERE = 0
DATA, FORWARD, BACKWARD, OPTIMIZER, WATCH = map(PHASES.index, ("data", "forward", "backward", "optimizer", "watch"))
"""Phases, as `region` has them. NOWHERE: nothing marks it; `_phases` may tell it from what came before and after."""
AFTER_BACKWARD = len(PHASES)
"""As a mark only: what it is shows in what follows."""
_BY_NAME = {name: number for number, name in enumerate(PHASES) if name is not None}

STEP = re.compile(r"ProfilerStep#(\d{1,15})$")
_PYTHON_MODULE = "nn.Module: "
EVALUATE = "autograd::engine::evaluate_function: "
_NODE = re.compile(r"[A-Za-z_]\w*Backward\d*$|torch::autograd::")
_SCALER = re.compile(r"aten::_amp_(?:foreach_non_finite_check_and_unscale_|update_scale_)")
_WORDS = re.compile(
    r"(?:##\s*)?(forward|backward|optimizer)(?:[ _]?(?:pass|step))?(?:\s*##)?$|(DistributedDataParallel)\.forward$"
)


@dataclass
class Host:
    """What the host did; arrays are by span or by call, in the order of `Kept`. -1 is none."""

    region_of_span: Ints
    parent: Ints
    top_of_span: Ints
    module_of_span: Ints
    watched_us: Floats
    """Of an operator, the time in it that AMPscope's hooks took without calling operators."""
    op_of_call: Ints
    module_of_call: Ints
    region_of_call: Ints
    modules: list[str]
    steps: list[tuple[float, float, int]]
    """Start, end and number of the marked steps, in order."""
    marks: dict[int, list[tuple[float, float]]]
    """Spans that mark a phase: outermost ones, by region."""


def link(kept: Kept) -> Host:
    """Link spans and calls. Threads with marked steps, else those with most operators, come first: forward is there."""
    spans, calls = kept.spans, kept.calls
    kinds = [_Kind(text) for text in kept.texts]
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
    )
    thread = np.concatenate([np.asarray(spans.thread), np.asarray(calls.thread)])
    start = np.concatenate([np.asarray(spans.start), np.asarray(calls.start)])
    end = np.concatenate([np.asarray(spans.end), np.asarray(calls.end)])
    order = np.lexsort((-end, start, thread)).astype(np.int32)
    bounds = np.searchsorted(thread[order], np.arange(kept.threads + 1))
    del thread, start, end  # of a trace of a gigabyte, a hundred megabytes
    names, stepping = np.asarray(spans.name), np.array([n for n, kind in enumerate(kinds) if kind.step >= 0])
    parts = [order[bounds[n] : bounds[n + 1]] for n in range(kept.threads)]
    one_pass = _Pass(kept, kinds, host, _points(kept, kinds, host))
    for number, items in enumerate(sorted(parts, key=lambda part: _rank(names, stepping, part))):
        one_pass.thread(items, beside=number > 0)
    host.steps.sort()
    return host


class _Kind:
    """What a name says, found out once per name."""

    __slots__ = ("module", "outermost", "phase", "region", "step", "told")

    def __init__(self, text: str) -> None:
        found = STEP.match(text)
        self.step = int(found.group(1)) if found else -1
        self.module: str | None = None
        self.phase = -1
        self.region = NOWHERE
        # zero_grad stands anywhere between two steps, so it says nothing of what comes before and after it.
        self.told = not text.startswith("Optimizer.zero_grad")
        node = text.startswith(EVALUATE) or _NODE.match(text) is not None
        self.outermost = node or "::" in text
        if text.startswith(MODULE):
            self.module = text.removeprefix(MODULE)
        elif text.startswith(_PYTHON_MODULE):
            self.module = text
        elif text.startswith(PHASE):
            word = text.removeprefix(PHASE)
            self.phase = AFTER_BACKWARD if word == "after_backward" else _BY_NAME.get(word, NOWHERE)
        elif node:
            self.region = BACKWARD
        elif text.startswith("Optimizer.") or _SCALER.match(text):
            self.region = OPTIMIZER
        elif text.startswith("enumerate(DataLoader)"):
            self.region = DATA
        elif (found := _WORDS.match(text)) is not None:
            self.region = {"backward": BACKWARD, "optimizer": OPTIMIZER}.get(found.group(1), FORWARD)


def _points(kept: Kept, kinds: list[_Kind], host: Host) -> list[tuple[float, int]]:
    """Times from which on the loop is in a phase, with the phase, in order, on whichever thread they were marked: a
    backward's begin and end show on autograd's. What follows backward is data if a forward comes next (of another
    micro-batch), else the optimizer's. Time in DATA and WATCH goes into `host.marks`."""
    names = np.asarray(kept.spans.name)
    marked = np.flatnonzero(np.isin(names, [n for n, kind in enumerate(kinds) if kind.phase >= 0]))
    start = np.asarray(kept.spans.start)
    found: list[tuple[float, int]] = []
    following, until = NOWHERE, max(kept.spans.end, default=0.0)
    for item in marked[np.argsort(start[marked], kind="stable")][::-1].tolist():
        phase = kinds[names[item]].phase
        if phase == AFTER_BACKWARD:
            phase = {NOWHERE: NOWHERE, FORWARD: DATA}.get(following, OPTIMIZER)
        elif phase != WATCH:
            following = phase
        at = float(start[item])
        if phase in (DATA, WATCH):
            host.marks[phase].append((at, until))
        found.append((at, phase))
        until = at
    return found[::-1]


def _rank(names: Ints, stepping: Ints, items: Ints) -> tuple[bool, int]:
    own = items[items < len(names)]
    return not np.isin(names[own], stepping).any(), -len(own)


_KEPT = {
    NOWHERE: (NOWHERE,),
    FORWARD: (NOWHERE,),
    BACKWARD: (NOWHERE, FORWARD),  # a checkpoint's forward that runs again is part of backward
    OPTIMIZER: (NOWHERE, FORWARD),  # a closure's
    DATA: (NOWHERE,),
    WATCH: tuple(range(len(PHASES))),
}
"""Phases that do not begin inside another one."""


_PART = 2**16  # Python's own numbers are five times as large as those of an array


class _Pass:
    """The one pass over each thread."""

    def __init__(self, kept: Kept, kinds: list[_Kind], host: Host, points: list[tuple[float, int]]) -> None:
        self._kept = kept
        self._kinds = kinds
        self._host = host
        self._points = points
        self._names = np.asarray(kept.spans.name)
        self._nodes = np.array([n for n, kind in enumerate(kinds) if kind.region == BACKWARD])
        self._module_number: dict[str, int] = {}
        self._module_by_sequence: dict[int, int] = {}

    def thread(self, items: Ints, beside: bool) -> None:
        """Go through one thread's spans and calls, sorted by start, longer ones first. `beside`: it is not the loop's,
        so that where it runs autograd's nodes, all it does (a reducer's calls between them) belongs to backward."""
        kept, kinds, host = self._kept, self._kinds, self._host
        spans, calls = kept.spans, kept.calls
        many = len(spans)
        own = items[items < many]
        base = BACKWARD if beside and np.isin(self._names[own], self._nodes).any() else NOWHERE
        points, next_point = self._points, 0
        phase, since, before, before_since = NOWHERE, 0.0, NOWHERE, 0.0  # as marked by points in time: now, and before
        called, until = 0.0, 0.0  # time of the operators that were called since, and until when the last of them ran
        # What lies around: end, operator, outermost operator, module, region, of each open span.
        stack: list[tuple[float, int, int, int, int]] = [(float("inf"), -1, -1, -1, NOWHERE)]
        for item in (one for part in range(0, len(items), _PART) for one in items[part : part + _PART].tolist()):
            start = spans.start[item] if item < many else calls.start[item - many]
            while stack[-1][0] <= start:
                stack.pop()
            _, op, top, module, region = stack[-1]
            while next_point < len(points) and points[next_point][0] <= start:
                before, before_since = phase, since
                since, phase = points[next_point]
                next_point += 1
            if item >= many:
                call = item - many
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
            if kind.region != region and kind.region not in _KEPT[region]:
                region = kind.region
                if kind.told:
                    host.marks[region].append((start, spans.end[item]))
            host.parent[item] = op
            sequence = spans.sequence[item]
            if kind.module is not None:
                module = self._enter(kind.module, module)
            elif spans.sort[item] != MARK:
                op = item
                if phase == WATCH and start >= until:  # not one that another of them called
                    called, until = called + spans.end[item] - start, spans.end[item]
                if sequence >= 0:
                    if kind.region == BACKWARD:
                        module = self._module_by_sequence.get(sequence, module)
                    else:  # the last operator that begins with a number makes the node
                        self._module_by_sequence[sequence] = module
            if top < 0 and kind.outermost:
                top = item
            host.region_of_span[item] = WATCH if phase == WATCH else region or phase or base
            host.top_of_span[item] = top
            host.module_of_span[item] = module
            stack.append((spans.end[item], op, top, module, region))

    def _enter(self, name: str, around: int) -> int:
        """The number of the module of this name; Python's frames name a class, so the path to it is made here."""
        if name.startswith(_PYTHON_MODULE):
            outer = self._host.modules[around] if around >= 0 else ""
            name = name.removeprefix(_PYTHON_MODULE)
            name = f"{outer}.{name}" if outer else name
        number = self._module_number.get(name)
        if number is None:
            number = self._module_number[name] = len(self._host.modules)
            self._host.modules.append(name)
        return number
