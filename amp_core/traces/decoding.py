"""Passes of a serving engine that decode, as its marks tell: each computes one token, or a few, per request.

>>> decoding(events, linked)
Decoding(passes=127, rows=1.0, frac=0.98, least_rows=1, most_rows=1, products_frac=0.97)
"""

import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from amp_core.hardware.kernel_names import GEMM_CATEGORIES, classify_kernel
from amp_core.traces import intervals as times
from amp_core.traces.events import MARK, TraceEvents
from amp_core.traces.gpu_work import LinkedWork
from amp_core.traces.graphs import VLLM_PASS

_SGLANG_PASS = re.compile(r"step\[DECODE bs=(\d{1,9})\]$")
"""A pass of SGLang that decodes, with its requests."""
_OLDER_VLLM_PASS = re.compile(r"execute_new_(\d{1,9})_cached_(\d{1,9})$")
"""An older mark of vLLM's, with the requests that are new and those that have begun: these decode a token each, but for
the rest of a long prompt."""


def _tokens(mark: str) -> int:
    """The tokens that a marked pass without a prompt decodes; 0 for other marks."""
    if match := VLLM_PASS.match(mark):
        return int(match[3]) if int(match[1]) == int(match[2]) == 0 else 0
    if match := _OLDER_VLLM_PASS.match(mark):
        return int(match[2]) if int(match[1]) == 0 else 0
    return int(match[1]) if (match := _SGLANG_PASS.match(mark)) else 0


@dataclass(frozen=True)
class Decoding:
    """Passes without a prompt."""

    passes: int
    rows: float
    """Median of the tokens of a pass: the rows of its products."""
    frac: float
    """Share of the device's work that these passes launch."""
    least_rows: int
    most_rows: int
    products_frac: float
    """Share of the time of all products of matrices, by the names of their kernels, in these passes."""


def decoding(events: TraceEvents, linked: LinkedWork) -> Decoding | None:
    """The passes that decode; None without marks of any, or without their work."""
    tokens = {number: count for number, text in enumerate(events.texts) if (count := _tokens(text))}
    names = np.asarray(events.spans.name, dtype=np.int64)
    marked = np.isin(names, list(tokens))
    marked &= np.asarray(events.spans.kind) == MARK
    if not marked.any() or not len(linked):
        return None
    marked[marked] = _is_outermost(*(np.asarray(c)[marked] for c in (events.spans.start, events.spans.end)))
    low, high = (np.sort(np.asarray(edge)[marked]) for edge in (events.spans.start, events.spans.end))
    place = np.searchsorted(low, linked.launched_us, side="right") - 1
    inside = (place >= 0) & (linked.launched_us < high[place])
    rows = [tokens[name] for name in names[marked].tolist()]
    multiplies = np.array([_multiplies(text) for text in events.texts], dtype=bool)[linked.name]
    frac, products_frac = (
        float(linked.own_us[inside & of].sum() / max(linked.own_us[of].sum(), 1e-3))
        for of in (np.ones(len(linked), dtype=bool), multiplies)
    )
    return Decoding(int(marked.sum()), float(np.median(rows)), frac, min(rows), max(rows), products_frac)


def _is_outermost(start: times.Floats, end: times.Floats) -> npt.NDArray[np.bool_]:
    """Which of these marks lie in no other one: a scheduler and its model may both mark the same pass."""
    order = np.lexsort((-end, start))
    ended = np.concatenate([[-np.inf], np.maximum.accumulate(end[order])[:-1]])
    result = np.zeros(len(start), dtype=bool)
    result[order] = end[order] > ended
    return result


def _multiplies(kernel: str) -> bool:
    kind = classify_kernel(kernel)
    return kind.category != "attention" and (kind.category in GEMM_CATEGORIES or kind.tensor_core == "yes")
