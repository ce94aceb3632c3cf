"""Gradients of parts of tensors among rows of `kernels`.

The backward of a part, as `x[i]` or `x[:n]`, fills a tensor of the whole size with zeros and copies the part's gradient
into it, and autograd adds those of all parts: n parts write the whole n times (`select_backward` and `slice_backward`
in torch/csrc/autograd/FunctionsManual.cpp). The backward of `unbind` and `split` joins the gradients of all parts once.
That of an assignment to a part, as `x[i] = y`, copies the gradient of the whole (`CopySlices` in
torch/csrc/autograd/functions/tensor.cpp); that of `stack` and `cat` takes views of it.

>>> part_gradients(rows)
PartGradients(us=3640.0, saved_us=3474.0, parts=362.0, op='SelectBackward0', are_assigned=False)
"""

from dataclasses import dataclass

import pandas as pd

from amp_core.analysis.performance.saving import longest_name
from amp_core.traces.chains import ADDS

_OF_PARTS, _OF_ASSIGNED = r"(?:Select|Slice)Backward\d*$", r"CopySlices$"
_COPY, _FILLS = "aten::copy_", ("aten::fill_", "aten::zero_")
MIN_ADDS_FRAC = 0.4
"""Additions per part from which most tensors have several: of two parts of a tensor one is added to the other."""
MIN_ASSIGNED = 2
"""Assignments from which there are others to join one with."""


@dataclass(frozen=True)
class PartGradients:
    """What the gradients of parts of tensors take, in microseconds of the rows."""

    us: float
    saved_us: float
    """That without the copies which remain where all parts are joined."""
    parts: float
    op: str
    """The node of autograd that takes longest."""
    are_assigned: bool = False
    """Whether they are of parts that are assigned to, and not of such as are taken."""

    def in_words(self, share: str, parts: float) -> str:
        """It, as a part of a sentence; `share` and the number of parts are of the step, or of what is told."""
        if self.are_assigned:
            return (
                f"backward of {parts:,.0f} assignments to parts of tensors takes {share}: each copies the gradient of "
                "the whole tensor"
            )
        return (
            f"gradients of {parts:,.0f} parts of tensors take {share}: each fills a tensor of the whole size with "
            "zeros, and these are added up"
        )


def part_rows(rows: pd.DataFrame) -> "pd.Series[bool]":
    """Which rows the backward of a part launches, or is."""
    return rows["top_op"].str.contains(f"{_OF_PARTS}|{_OF_ASSIGNED}")


def part_gradients(rows: pd.DataFrame) -> PartGradients | None:
    """Gradients of parts of tensors that are taken or assigned to, several of each tensor, whichever take longer; None
    without them."""
    found = [one for one in (_taken(rows), _assigned(rows)) if one is not None]
    return max(found, key=lambda one: one.saved_us, default=None)


def _taken(rows: pd.DataFrame) -> PartGradients | None:
    rows = rows[rows["top_op"].str.contains(_OF_PARTS)]
    copies = rows["op"] == _COPY
    parts, adds = float(rows["count"][copies].sum()), float(rows["count"][rows["op"].isin(ADDS)].sum())
    if not parts or adds < MIN_ADDS_FRAC * parts:
        return None
    us = float(rows["total_us"].sum())
    return PartGradients(us, us - float(rows["total_us"][copies].sum()), parts, longest_name(rows, "top_op"))


def _assigned(rows: pd.DataFrame) -> PartGradients | None:
    rows = rows[rows["top_op"].str.contains(_OF_ASSIGNED)]
    fills = rows["op"].isin(_FILLS)  # of the part in the gradient that goes on
    parts = float(rows[fills].groupby("op")["count"].sum().max()) if fills.any() else 0.0
    if parts < MIN_ASSIGNED:
        return None
    us = float(rows["total_us"].sum())
    return PartGradients(us, us, parts, longest_name(rows, "top_op"), are_assigned=True)
