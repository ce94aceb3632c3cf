"""Gradients of parts of tensors among rows of `kernels`.

The backward of a part, as `x[i]` or `x[:n]`, fills a tensor of the whole size with zeros and copies the part's gradient
into it, and autograd adds those of all parts: n parts write the whole n times (`select_backward` and `slice_backward`
in torch/csrc/autograd/FunctionsManual.cpp). The backward of `unbind` and `split` joins the gradients of all parts once.

>>> part_gradients(rows)
PartGradients(us=3640.0, saved_us=3474.0, parts=362.0, op='SelectBackward0')
"""

from dataclasses import dataclass

import pandas as pd

from amp_core.analysis.performance.saving import longest_name
from amp_core.traces.chains import ADDS

_OF_PARTS = r"(?:Select|Slice)Backward\d*$"
_COPY = "aten::copy_"
MIN_ADDS_FRAC = 0.4
"""Additions per part from which most tensors have several: of two parts of a tensor one is added to the other."""


@dataclass(frozen=True)
class PartGradients:
    """What the gradients of parts of tensors take, in microseconds of the rows."""

    us: float
    saved_us: float
    """That without the copies, which remain where all parts are joined."""
    parts: float
    op: str
    """The node of autograd that takes longest."""

    def in_words(self, share: str, parts: float) -> str:
        """It, as a part of a sentence; `share` and the number of parts are of the step, or of what is told."""
        return (
            f"gradients of {parts:,.0f} parts of tensors take {share}: each fills a tensor of the whole size with "
            "zeros, and these are added up"
        )


def part_rows(rows: pd.DataFrame) -> "pd.Series[bool]":
    """Which rows the backward of a part launches, or is."""
    return rows["top_op"].str.contains(_OF_PARTS)


def part_gradients(rows: pd.DataFrame) -> PartGradients | None:
    """Gradients of parts of tensors with several parts each; None without them."""
    rows = rows[part_rows(rows)]
    copies = rows["op"] == _COPY
    parts, adds = float(rows["count"][copies].sum()), float(rows["count"][rows["op"].isin(ADDS)].sum())
    if not parts or adds < MIN_ADDS_FRAC * parts:
        return None
    us = float(rows["total_us"].sum())
    return PartGradients(us, us - float(rows["total_us"][copies].sum()), parts, longest_name(rows, "top_op"))
