"""Passes of a serving engine that decode, as its marks tell: each computes one token, or a few, per request.

>>> decoding(events, linked)
Decoding(passes=127, rows=1.0, frac=0.98)
"""

import re
from dataclasses import dataclass

import numpy as np

from amp_core.traces.events import MARK, TraceEvents
from amp_core.traces.gpu_work import LinkedWork

_DECODES = re.compile(r"execute_context_0\(0\)_generation_\d{1,9}\((\d{1,9})\)$|step\[DECODE bs=(\d{1,9})\]$")
"""Marks of vLLM, with the tokens of the pass, and of SGLang, with its requests."""


@dataclass(frozen=True)
class Decoding:
    """Passes without a prompt."""

    passes: int
    rows: float
    """Median of the tokens of a pass: the rows of its products."""
    frac: float
    """Share of the device's work that these passes launch."""


def decoding(events: TraceEvents, linked: LinkedWork) -> Decoding | None:
    """The passes that decode; None without marks of any, or without their work."""
    matches = {number: match for number, text in enumerate(events.texts) if (match := _DECODES.match(text))}
    tokens = {number: int(match[1] or match[2]) for number, match in matches.items()}
    names = np.asarray(events.spans.name, dtype=np.int64)
    marked = np.isin(names, [number for number, count in tokens.items() if count])
    marked &= np.asarray(events.spans.kind) == MARK
    if not marked.any() or not len(linked):
        return None
    low, high = (np.sort(np.asarray(edge)[marked]) for edge in (events.spans.start, events.spans.end))
    place = np.searchsorted(low, linked.launched_us, side="right") - 1
    inside = (place >= 0) & (linked.launched_us < high[place])
    rows = float(np.median([tokens[name] for name in names[marked].tolist()]))
    frac = float(linked.own_us[inside].sum() / max(linked.own_us.sum(), 1e-3))
    return Decoding(int(marked.sum()), rows, frac)
