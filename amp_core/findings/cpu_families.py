"""What the first sentence says of a CPU's operators beside the longest: their kinds, casts, and the largest size.

>>> family(rows, "aten::mul", longest_us=1799.0, total_us=3760.0)
(3609.0, ', and all elementwise operators take 96.0 %')
"""

import math

import pandas as pd

from amp_core.analysis.performance.gemm_shapes import dtypes_of, product, tensor_shapes
from amp_core.analysis.performance.layouts import layout_copies
from amp_core.analysis.performance.saving import MIN_SAVED_FRAC
from amp_core.formats import element_bytes
from amp_core.text.formatting import join_words, number, percent, size
from amp_core.traces.operators import VIEWS

MIN_FAMILY_RATIO = 1.1
"""All operators of a kind are told with the longest operator if they take that many times as long."""
_FAMILIES = {
    "gemm": "all matrix products take {share}",
    "conv": "all convolutions take {share}",
    "communication": "all communication takes {share}",
    "embedding": "all indexing, gathering and scattering takes {share}",
}
"""By category, of which one is told: the one that takes longest. An optimizer's elementwise operators are none of the
model's."""
LIGHT = "light"
_LIGHT = {"elementwise": "elementwise operators", "norm": "norms", "reduction": "reductions, pooling and softmax"}
"""Kinds that read and write each value once, which are told together, each in words."""
MIN_LIGHT_FRAC = 0.1
"""Share of such a kind in the time of all three from which it is told."""
_CALLERS = ("aten::linear", "aten::matmul", "aten::einsum", "aten::conv1d", "aten::conv2d", "aten::conv3d")
"""Operators that call the one that computes, whose own time is that of the call."""
_RECURRENT = "lstm|gru|rnn"
_WITH_RECURRENT = "all recurrent layers and matrix products take {share}"
MIN_CASTS_FRAC = 0.5
"""Share of casts in the time of an operator from which they are told."""


def family(rows: pd.DataFrame, longest: str, longest_us: float, total_us: float) -> tuple[float, str]:
    """The time of the longest kind of operators in microseconds, 0 where none is told, and that as part of a
    sentence."""
    of_model = (rows["category"] != "elementwise") | (rows["phase"] != "optimizer")
    calls_others = rows["name"].isin(_CALLERS)
    calls_others |= rows["name"].str.contains(VIEWS)
    by_category = rows[of_model & ~calls_others].groupby("category")["total_us"].sum()
    light = by_category[by_category.index.isin(_LIGHT)].sort_values(ascending=False)
    light = light[light >= MIN_LIGHT_FRAC * light.sum()]
    us = by_category[by_category.index.isin(_FAMILIES)]
    us = pd.concat([us, pd.Series({LIGHT: light.sum()}, dtype=float)]) if len(light) else us
    if us.empty or us.max() <= MIN_FAMILY_RATIO * longest_us:
        return 0.0, casts(rows, longest, longest_us)
    share, longest_family = percent(float(us.max()) / total_us), str(us.idxmax())
    recurs = rows["op"][rows["category"] == longest_family].str.contains(_RECURRENT).any()
    if longest_family == LIGHT:
        with_called = rows["total_us"][of_model & ~calls_others & _with_called(rows).isin(light.index)].sum()
        share = percent(float(with_called) / total_us)
        return float(us.max()), f", and all {join_words([_LIGHT[str(kind)] for kind in light.index])} take {share}"
    words = _WITH_RECURRENT if longest_family == "gemm" and recurs else _FAMILIES[longest_family]
    return float(us.max()), f", and {words.format(share=share)}"


def _with_called(rows: pd.DataFrame) -> "pd.Series[str]":
    """The category of each row; of what a light operator calls, as the allocations and casts of dropout, that of the
    operator."""
    own = rows.drop_duplicates("name").set_index("name")["category"]
    of_top = rows["top_op"].map(own).fillna("")
    return rows["category"].mask(of_top.isin(_LIGHT) & ~rows["category"].isin(_FAMILIES), of_top)


def casts(rows: pd.DataFrame, op: str, op_us: float) -> str:
    """That an operator mostly casts, as part of a sentence; empty for others."""
    us = float(rows["total_us"][(rows["name"] == op) & (rows["category"] == "cast")].sum())
    most = "all" if us >= op_us else f"{number(us / 1e3, 'ms')}"
    return f", {most} of that in casts between types" if us >= MIN_CASTS_FRAC * op_us > 0 else ""


def second_operator(rows: pd.DataFrame, longest: str, total_us: float) -> str:
    """The operator with most of the time after the longest one, as a further sentence; empty if it takes little."""
    us = rows.groupby("op")["total_us"].sum().drop(longest, errors="ignore")
    if us.empty or us.max() < MIN_SECOND_FRAC * total_us:
        return ""
    return f" {us.idxmax()} takes {percent(float(us.max()) / total_us)}."


MIN_SECOND_FRAC = 0.25
"""Share of the operators' time from which the second longest operator is told."""


def light_beside(rows: pd.DataFrame, longest: str, total_us: float, wall_us: float) -> str:
    """What reads and writes each value once beside products, as a further sentence; empty if it takes little of the
    operators' time, or of all."""
    if rows["category"][rows["op"] == longest].mode().iloc[0] not in ("gemm", "conv"):
        return ""
    of_model = rows.drop(layout_copies(rows).index)  # a copy for a product is fused with nothing
    of_model = of_model[(of_model["phase"] != "optimizer") & (of_model["op"] != longest)]
    of_model = of_model[~of_model["name"].isin(_CALLERS)]
    us = of_model[~of_model["name"].str.contains("pool")].groupby("category")["total_us"].sum()
    us = us[us.index.isin(_FUSED)].sort_values(ascending=False)
    us = us[us >= MIN_LIGHT_FRAC * us.sum()]
    if us.sum() < max(MIN_BESIDE_FRAC * total_us, MIN_SAVED_FRAC * wall_us):
        return ""
    kinds, share = join_words([_FUSED[str(kind)] for kind in us.index]), percent(float(us.sum()) / total_us)
    return f" {kinds[0].upper()}{kinds[1:]} take {share}: {COMPILING}, fuses those that follow one another."


COMPILING = "torch.compile, from PyTorch 2.0 on (on Windows 2.5)"
"""What fuses operators of a CPU, and since when."""


_FUSED = {"elementwise": "elementwise operators", "norm": "norms", "reduction": "reductions"}
MIN_BESIDE_FRAC = 0.2
"""Share of the operators' time from which such operators are told beside products."""


def large_tensors(rows: pd.DataFrame, total_us: float) -> str:
    """That most of the time is on tensors that no cache holds, as a further sentence; empty for others, for training,
    where a step needs all of its batch at once, and without shapes."""
    if rows["phase"].isin(["backward", "optimizer"]).any():
        return ""
    sums = rows.groupby(["name", "in_shapes", "in_dtypes"])["total_us"].sum()
    large_us, largest = 0.0, 0
    for name, shapes, dtypes, us in sums.reset_index().itertuples(index=False):
        width = next((n for n in map(element_bytes, dtypes_of(str(dtypes))) if n is not None), 4)
        made = product(str(name), str(shapes))
        output = [(made.batch * made.sizes["M"], made.sizes["N"])] if made is not None and made.kind == "gemm" else []
        tensors = [*tensor_shapes(str(shapes)), *output]
        of_rows = (shape for shape in tensors if shape[0] >= shape[-1])  # no weight of a large table
        bytes_ = max((math.prod(shape) for shape in of_rows), default=0) * width
        if bytes_ >= LARGE_BYTES:
            large_us, largest = large_us + us, max(largest, bytes_)
    if large_us < MIN_LARGE_FRAC * total_us or total_us <= 0:
        return ""
    return (
        f" Operators on tensors of up to {size(largest)} take {percent(large_us / total_us)}: no cache holds these, "
        "so each operator reads and writes memory, and parts of fewer rows stay in the cache."
    )


LARGE_BYTES, MIN_LARGE_FRAC = 2**30, 0.5
"""Size of a tensor that is larger than any cache, and share of the operators' time on such ones from which that is
told."""
MIN_SINGLE_FRAC = 0.5
"""Share of products of one row in the operators' time from which it is told."""


def single_rows(rows: pd.DataFrame, total_us: float) -> str:
    """That most of the time is in products of one row and a weight, as a further sentence; else empty."""
    products = rows[(rows["category"] == "gemm") & (rows["name"] == rows["op"])]
    made = [product(str(op), str(shapes)) for op, shapes in zip(products["op"], products["in_shapes"], strict=True)]
    us = float(products["total_us"][[one is not None and one.is_vector and one.batch == 1 for one in made]].sum())
    if us < MIN_SINGLE_FRAC * total_us:
        return ""
    return (
        f" Products of a single row take {percent(us / total_us)}: each reads its whole weight for it, and one call "
        "for several rows reads it once."
    )


MIN_SIZE = 4096
"""A size from which it may be that of a vocabulary, a table, or the edges of a graph."""
MIN_SIZE_FRAC, MAX_SIZE_CALLS_FRAC = 0.5, 0.25
"""Share of the operators' time on tensors of such a size from which it is told, and of the calls up to which: a batch
and the widths of a model are in most of them."""


def dominant_size(rows: pd.DataFrame, total_us: float) -> str:
    """The size that most of the time is spent on, as a further sentence; empty without one, and without shapes."""
    us_of: dict[int, float] = {}
    calls_of: dict[int, float] = {}
    sums = rows.groupby("in_shapes")[["total_us", "count"]].sum()
    for text, us, calls in sums.itertuples():
        for one in {length for shape in tensor_shapes(str(text)) for length in shape if length >= MIN_SIZE}:
            us_of[one] = us_of.get(one, 0.0) + us
            calls_of[one] = calls_of.get(one, 0.0) + calls
    all_calls = float(sums["count"].sum())
    told = {n: us for n, us in us_of.items() if calls_of[n] <= MAX_SIZE_CALLS_FRAC * all_calls}
    one = max(told, key=lambda n: (told[n], n), default=0)
    if not one or told[one] < MIN_SIZE_FRAC * total_us:
        return ""
    return (
        f" Operators on tensors with a size of {one:,} take {percent(told[one] / total_us)}, in "
        f"{percent(calls_of[one] / all_calls)} of the calls."
    )
