"""What a trace shows of captured graphs and of compiled code.

>>> count_calls(events, GRAPH_LAUNCHES), compiled_launch_frac(events, linked)
(14, 0.0)
"""

import re
from dataclasses import dataclass

import numpy as np

from amp_core.hardware.kernel_names import COPIES, classify_kernel
from amp_core.traces import intervals as times
from amp_core.traces.events import OP, TraceEvents
from amp_core.traces.gpu_work import LinkedWork
from amp_core.traces.operators import COMPILED

CAPTURES = re.compile(r"StreamBeginCapture")
GRAPH_LAUNCHES = re.compile(r"GraphLaunch|ExecuteGraph")
GRAPH_BUILDS = re.compile(r"GraphInstantiate|GraphExecUpdate|GraphAdd\w*Node|GraphClone")
_COMPILED_CALL = re.compile(r"Torch-Compiled Region|CompiledFunction$")
"""Those around a call of it in forward."""


def count_calls(events: TraceEvents, pattern: "re.Pattern[str]") -> int:
    """The number of calls into the device's runtime whose names contain the pattern."""
    matches = np.array([pattern.search(text) is not None for text in events.texts], dtype=bool)
    return int(matches[np.asarray(events.calls.name, dtype=np.int64)].sum())


VLLM_PASS = re.compile(
    r"execute_(?:\d{1,9}_)?context_(\d{1,9})\((?:sq)?(\d{1,9})[^()]{0,200}\)"
    r"_generation_\d{1,9}\((?:sq)?(\d{1,9})[^()]{0,200}\)$"
)
"""A pass of vLLM, which marks how many requests and tokens of prompts and of decoding it has; some versions write `sq`
before the tokens, and sums of other lengths behind them."""


def tokens_of_smallest_pass(events: TraceEvents) -> int:
    """The tokens of the smallest pass that a serving engine marks, beside empty ones; 0 without such marks."""
    matches = (VLLM_PASS.match(text) for text in events.texts)
    return min((tokens for match in matches if match and (tokens := int(match[2]) + int(match[3]))), default=0)


def compiled_calls(events: TraceEvents) -> int:
    """The number of calls of compiled code, without those inside another: one per step unless the graph breaks."""
    return len(_in_operators(events, _COMPILED_CALL)[0])


_REGION = re.compile(r"Torch-Compiled Region: (\d+)/\d+")
"""A call of a compiled graph: the number of its code, and how often that was compiled before."""


def compiled_regions(events: TraceEvents) -> int:
    """The number of pieces of code that are called compiled, where torch numbers them; what follows a break is another
    one."""
    return len({match[1] for text in events.texts if (match := _REGION.match(text))})


@dataclass(frozen=True)
class Compilations:
    """What torch.compile compiles."""

    count: int
    """Graphs, or pieces of one between its breaks; each compiled anew counts again."""
    us: float
    frac: float
    """Share of the time from the first operator to the last."""


def compilations(events: TraceEvents) -> Compilations | None:
    """The compilations of a trace; None without one."""
    ranges, spans = events.compiling, events.spans
    if not len(ranges) or not len(spans):
        return None
    us = times.total(times.union(np.asarray(ranges.start), np.asarray(ranges.end)))
    whole_us = float(np.asarray(spans.end).max() - np.asarray(spans.start).min())
    inner = [number for number, text in enumerate(events.texts) if _ONE_COMPILATION.match(text)]
    return Compilations(int(np.isin(np.asarray(ranges.name), inner).sum()), us, min(1.0, us / max(whole_us, 1e-3)))


_ONE_COMPILATION = re.compile(r"_compile\.compile_inner\b")


@dataclass(frozen=True)
class CapturedCalls:
    """Calls of compiled code in which graphs are captured, and the others; times in microseconds, of all of a kind."""

    captured: int
    others: int
    captured_us: float
    others_us: float


def captured_calls(events: TraceEvents) -> CapturedCalls | None:
    """The calls of compiled code by whether a graph is captured within; None without captures in at least two."""
    starts, ends = _in_operators(events, _COMPILED_CALL)
    matches = np.array([CAPTURES.search(text) is not None for text in events.texts], dtype=bool)
    at = np.asarray(events.calls.start)[matches[np.asarray(events.calls.name, dtype=np.int64)]]
    within = np.searchsorted(np.sort(at), ends) > np.searchsorted(np.sort(at), starts)
    if within.sum() < MIN_CAPTURED_CALLS:
        return None
    us = ends - starts
    return CapturedCalls(int(within.sum()), int((~within).sum()), float(us[within].sum()), float(us[~within].sum()))


MIN_CAPTURED_CALLS = 2


def _in_operators(events: TraceEvents, pattern: "re.Pattern[str]") -> times.Intervals:
    """The times in operators whose names contain the pattern."""
    matches = np.array([pattern.search(text) is not None for text in events.texts], dtype=bool)
    spans = events.spans
    chosen = matches[np.asarray(spans.name, dtype=np.int64)] & (np.asarray(spans.kind) == OP)
    return times.union(np.asarray(spans.start)[chosen], np.asarray(spans.end)[chosen])


def compiled_launch_frac(events: TraceEvents, linked: LinkedWork) -> float:
    """Share of the device's kernels, by number, that are launched while the host is in compiled code: copies of what
    the code takes come before it."""
    starts, ends = _in_operators(events, COMPILED)
    copies = np.array([classify_kernel(text).category in COPIES for text in events.texts], dtype=bool)
    launched_us = linked.launched_us[~copies[linked.name]]
    if not len(starts) or not len(launched_us):
        return 0.0
    at = np.searchsorted(starts, launched_us, side="right") - 1
    inside = (at >= 0) & (launched_us < ends[np.maximum(at, 0)])
    return float(inside.mean())
