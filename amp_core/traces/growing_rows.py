"""Products that get one more row per sequence with every pass, as in decoding without a cache of keys and values.

>>> growing_rows(events, linked)
GrowingRows(passes=56, first=200, last=255, frac=0.98)
"""

import json
import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from amp_core.traces.events import OP, TraceEvents
from amp_core.traces.gpu_work import LinkedWork

_FACTORS = {"aten::linear": (0, 1), "aten::mm": (0, 1), "aten::addmm": (1, 2)}
"""By operator, the places of the rows and of the weight among its inputs."""
MIN_PASSES = 8
"""Passes that grow by the same number of rows, one after another."""
MIN_ROWS_RATIO = 4
"""Rows of the first of them over those by which they grow: with a cache a pass has only the new ones."""
MIN_FRAC = 0.5
"""Share of the time of all work in these passes from which it is kept."""


@dataclass(frozen=True)
class GrowingRows:
    """Passes whose products have all rows so far."""

    passes: int
    first: int
    """Rows of the first pass, of all sequences of a batch together."""
    last: int
    frac: float
    """Share of the time of all work that is launched in them."""


def growing_rows(events: TraceEvents, linked: LinkedWork) -> GrowingRows | None:
    """Such passes of a trace that records shapes; None without them."""
    spans = events.spans
    numbers = {events.texts.index(op): places for op, places in _FACTORS.items() if op in events.texts}
    name, shapes = np.asarray(spans.name), np.asarray(spans.shapes)
    chosen = np.flatnonzero(np.isin(name, list(numbers)) & (np.asarray(spans.kind) == OP) & (shapes >= 0))
    if len(chosen) < MIN_PASSES or not len(linked):
        return None
    start, end = np.asarray(spans.start), np.asarray(spans.end)
    chosen = chosen[np.argsort(start[chosen], kind="stable")]
    by_weight: dict[tuple[int, tuple[int, ...]], list[tuple[int, int]]] = {}
    known: dict[tuple[int, int], tuple[int, tuple[int, ...]] | None] = {}
    for span in chosen.tolist():
        key = (int(name[span]), int(shapes[span]))
        if key not in known:
            known[key] = _rows(events.texts[key[1]], *numbers[key[0]])
        if (made := known[key]) is not None:
            by_weight.setdefault((key[0], made[1]), []).append((made[0], span))
    found = max((_longest(calls) for calls in by_weight.values()), key=len, default=[])
    if len(found) < MIN_PASSES:
        return None
    began, ended = float(start[found[0][1]]), float(end[found[-1][1]])
    at = np.where(np.isfinite(linked.launched_us), linked.launched_us, linked.start_us)
    frac = float(linked.own_us[(at >= began) & (at <= ended)].sum() / max(linked.own_us.sum(), 1e-3))
    return GrowingRows(len(found), found[0][0], found[-1][0], frac) if frac >= MIN_FRAC else None


def _longest(calls: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Of calls of products with one weight, in order, as rows and span: the last one of each pass, for the longest
    series of passes that grow by the same number of rows."""
    passes = [call for call, after in pairwise([*calls, (-1, -1)]) if call[0] != after[0]]
    best: list[tuple[int, int]] = []
    series = passes[:1]
    for before, this in pairwise(passes):
        grows = this[0] - before[0]
        if grows <= 0 or before[0] < MIN_ROWS_RATIO * grows:
            series = [this]
        elif len(series) > 1 and grows != series[-1][0] - series[-2][0]:
            series = [before, this]
        else:
            series.append(this)
        best = max(best, series.copy() if len(series) > len(best) else best, key=len)
    return best


def _rows(text: str, rows_at: int, weight_at: int) -> tuple[int, tuple[int, ...]] | None:
    """Rows and shape of the weight of a product, from its input shapes as JSON; None for others."""
    try:
        shapes = json.loads(text)
        given, weight = shapes[rows_at], shapes[weight_at]
        if len(weight) != 2 or len(given) < 2:
            return None
        return math.prod(map(int, given[:-1])), (int(weight[0]), int(weight[1]))
    except (ValueError, TypeError, IndexError, KeyError, RecursionError):
        return None
