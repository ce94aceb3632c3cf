"""What the first sentence says of a CPU's operators beside the longest: their kinds, casts, FP64.

>>> family(rows, "aten::mul", longest_us=1799.0, total_us=3760.0)
(3609.0, ', and all elementwise operators take 96.0 %')
"""

import pandas as pd

from amp_core.text.formatting import number, percent

MIN_FAMILY_RATIO = 1.1
"""All operators of a kind are told with the longest operator if they take that many times as long."""
_FAMILIES = {
    "gemm": "all matrix products take {share}",
    "conv": "all convolutions take {share}",
    "communication": "all communication takes {share}",
    "embedding": "all indexing, gathering and scattering takes {share}",
    "elementwise": "all elementwise operators take {share}",
}
"""By category, of which one is told: the one that takes longest. An optimizer's elementwise operators are none of the
model's."""
_CALLERS = ("aten::linear", "aten::matmul", "aten::einsum", "aten::conv1d", "aten::conv2d", "aten::conv3d")
"""Operators that call the one that computes, whose own time is that of the call."""
_RECURRENT = "lstm|gru|rnn"
_WITH_RECURRENT = "all recurrent layers and matrix products take {share}"
MIN_CASTS_FRAC = 0.5
"""Share of casts in the time of an operator from which they are told."""
MIN_FP64_FRAC = 0.5
"""Share of operators on FP64 tensors in the operators' time from which it is told."""
_ANY_DTYPE = r'"(?:double|float|c10::\w+|__half)"'


def family(rows: pd.DataFrame, longest: str, longest_us: float, total_us: float) -> tuple[float, str]:
    """The time of the longest kind of operators in microseconds, 0 where none is told, and that as part of a
    sentence."""
    of_model = (rows["category"] != "elementwise") | (rows["phase"] != "optimizer")
    calls_others = rows["name"].isin(_CALLERS)
    us = rows[rows["category"].isin(_FAMILIES) & of_model & ~calls_others].groupby("category")["total_us"].sum()
    if us.empty or us.max() <= MIN_FAMILY_RATIO * longest_us:
        return 0.0, casts(rows, longest, longest_us)
    share, longest_family = percent(float(us.max()) / total_us), str(us.idxmax())
    recurs = rows["op"][rows["category"] == longest_family].str.contains(_RECURRENT).any()
    words = _WITH_RECURRENT if longest_family == "gemm" and recurs else _FAMILIES[longest_family]
    return float(us.max()), f", and {words.format(share=share)}"


def casts(rows: pd.DataFrame, op: str, op_us: float) -> str:
    """That an operator mostly casts, as part of a sentence; empty for others."""
    us = float(rows["total_us"][(rows["name"] == op) & (rows["category"] == "cast")].sum())
    most = "all" if us >= op_us else f"{number(us / 1e3, 'ms')}"
    return f", {most} of that in casts between types" if us >= MIN_CASTS_FRAC * op_us > 0 else ""


def in_fp64(rows: pd.DataFrame, total_us: float) -> str:
    """That most of the operators' time is in FP64, as a further sentence; empty for others and without dtypes."""
    first = rows["in_dtypes"].str.extract(f"({_ANY_DTYPE})", expand=False)
    share = float(rows["total_us"][first == '"double"'].sum()) / total_us
    if share < MIN_FP64_FRAC:
        return ""
    return f" Operators on FP64 tensors take {percent(share)}: FP32 has half the bytes, and twice the rate in vectors."
