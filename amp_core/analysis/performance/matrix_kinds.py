"""Kernels of products, convolutions and attention, and how a sentence calls them.

>>> matrix_kinds(rows["total_us"], rows["category"] == "attention").text
'GEMM/conv'
"""

from dataclasses import dataclass

import pandas as pd

from amp_core.analysis.performance.gemm_shapes import is_matrix_op
from amp_core.hardware.kernel_names import GEMM_CATEGORIES


def is_matrix(rows: pd.DataFrame) -> "pd.Series[bool]":
    """Which rows are kernels that multiply matrices; those on tensor cores do, whatever their category."""
    by_name = (rows["category"] == "") & rows["op"].map(is_matrix_op).astype(bool)  # from other programs
    return rows["category"].isin(GEMM_CATEGORIES) | (rows["tensor_core"] == "yes") | by_name


def multiplies(rows: pd.DataFrame) -> bool:
    """Whether any row of kernels multiplies matrices, or may do so."""
    return bool(is_matrix(rows).any() or (rows["tensor_core"] == "unknown").any())


MIN_KIND_FRAC = 0.02
"""Share of the time of what multiplies matrices from which attention, and the rest of it, is named."""


@dataclass(frozen=True)
class MatrixKinds:
    """What multiplies matrices among kernels or operators, in words."""

    text: str
    """`GEMM/conv`, `attention`, or `GEMM/conv and attention`."""
    fracs: tuple[float, ...]
    """The share of each in their time."""

    @property
    def subject(self) -> str:
        """The same at the beginning of a sentence."""
        return f"{self.text[0].upper()}{self.text[1:]}"

    @property
    def verb(self) -> str:
        """`takes`, or of both `take`."""
        return "takes" if len(self.fracs) == 1 else "take"


def matrix_kinds(total_us: "pd.Series[float]", is_attention: "pd.Series[bool]") -> MatrixKinds:
    """The kinds of what multiplies matrices, by time in microseconds."""
    whole = float(total_us.sum())
    attention = float(total_us[is_attention].sum()) / whole if whole > 0 else 0.0
    if attention < MIN_KIND_FRAC:
        return MatrixKinds("GEMM/conv", (1.0,))
    if attention > 1 - MIN_KIND_FRAC:
        return MatrixKinds("attention", (1.0,))
    return MatrixKinds("GEMM/conv and attention", (1 - attention, attention))
