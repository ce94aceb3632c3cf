"""What the first sentence says of a CPU's operators beside the longest: their kinds, attention in steps, FP64.

>>> family(rows, "aten::mul", longest_us=1799.0, total_us=3760.0)
(3609.0, ', and all elementwise operators take 96.0 %')
"""

import pandas as pd

from amp_core.analysis.performance.kernels import SOFTMAX, has_attention_in_steps
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
MIN_ATTENTION_FRAC = 0.2
"""Share of attention in steps in the operators' time from which it is told."""
MIN_FP64_FRAC = 0.5
"""The same of operators on FP64 tensors."""
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


def attention_in_steps(rows: pd.DataFrame, total_us: float) -> str:
    """That attention is computed in steps, as a further sentence; empty where it is not or takes little."""
    if not has_attention_in_steps(rows):
        return ""
    softmax_us = float(rows["total_us"][rows["op"] == SOFTMAX].sum())
    us = softmax_us + float(rows["total_us"][rows["op"].isin(["aten::bmm", "aten::baddbmm"])].sum())
    if us < MIN_ATTENTION_FRAC * total_us:
        return ""
    return (
        f" Attention is computed in steps, {SOFTMAX} alone {percent(softmax_us / total_us)}: "
        "F.scaled_dot_product_attention computes it in one operator, without the matrix of scores in memory."
    )


def in_fp64(rows: pd.DataFrame, total_us: float) -> str:
    """That most of the operators' time is in FP64, as a further sentence; empty for others and without dtypes."""
    first = rows["in_dtypes"].str.extract(f"({_ANY_DTYPE})", expand=False)
    share = float(rows["total_us"][first == '"double"'].sum()) / total_us
    if share < MIN_FP64_FRAC:
        return ""
    return f" Operators on FP64 tensors take {percent(share)}: FP32 has half the bytes, and twice the rate in vectors."
