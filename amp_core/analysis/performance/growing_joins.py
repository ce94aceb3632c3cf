"""Concatenations that grow: each joins a little to the result of the one before, and so copies all of it again.

>>> rows[growing_joins(rows)]["in_shapes"].tolist()
['[[[100, 8], [10, 8]], 0]', '[[[110, 8], [10, 8]], 0]', '[[[120, 8], [10, 8]], 0]', '[[[130, 8], [10, 8]], 0]']
"""

import pandas as pd

from amp_core.analysis.performance.gemm_shapes import Shape, tensor_shapes

JOINS = "aten::cat"
MIN_GROWING = 4
"""Calls of which each joins to the result of the one before from which they are a loop."""
MIN_GROWING_FRAC = 0.02
"""Share of the step in such calls from which they are told."""


def growing_joins(rows: pd.DataFrame) -> "pd.Series[bool]":
    """Which rows of `kernels` are of concatenations whose first input is as large as the result of another one, or the
    other way round, in chains of some length. None where a program trains, whose layers may each join their own."""
    joins = rows[rows["op"] == JOINS]
    if (rows["phase"] == "backward").any() or len(joins) < MIN_GROWING:
        return rows["op"].ne(rows["op"])
    shapes = {text: tensor_shapes(text) for text in joins["in_shapes"].unique().tolist()}
    by_first: dict[Shape, list[str]] = {}
    for text, inputs in shapes.items():
        if len(inputs) > 1:
            by_first.setdefault(inputs[0], []).append(text)
    calls: dict[str, int] = {}
    """The longest chain that ends with each."""
    before: dict[str, str] = {}
    in_order = [text for first in sorted(by_first) for text in by_first[first]]
    for text in in_order:  # a result is larger than its first input
        calls.setdefault(text, 1)
        for after in (one for result in _results(shapes[text]) for one in by_first.get(result, ())):
            if calls[text] + 1 > calls.get(after, 1):
                calls[after], before[after] = calls[text] + 1, text
    found: set[str] = set()
    for text, count in calls.items():
        while count >= MIN_GROWING and text not in found:
            found.add(text)
            text = before.get(text, text)
    return rows["op"].eq(JOINS) & rows["in_shapes"].isin(found)


def _results(inputs: tuple[Shape, ...]) -> set[Shape]:
    """The shapes that the inputs may have when they are joined along one dimension."""
    first = inputs[0]
    results = {
        (*first[:place], sum(one[place] for one in inputs), *first[place + 1 :])
        for place in range(len(first))
        if all(len(one) == len(first) and _without(one, place) == _without(first, place) for one in inputs)
    }
    return results - {first}


def _without(shape: Shape, place: int) -> Shape:
    return (*shape[:place], *shape[place + 1 :])
