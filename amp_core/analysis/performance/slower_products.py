"""A product on tensor cores at a lower rate than smaller products of the same trace, though it has more work per byte.

>>> slower_product(matrix_ops(run))
SlowerProduct(op='aten::mm', sizes='M 15360 · N 24576 · K 4096', us=243600.0, calls=36.0, flops_per_s=4.57e14, …)

What a device reaches in practice depends on its power limit and its library more than on the data sheet; smaller
products that run faster beside a larger one show what it would reach with another kernel.
"""

from dataclasses import dataclass

import pandas as pd

from amp_core.analysis.performance.gemm_shapes import product

MIN_SIDE = 512
"""M, N and K from which a product fills tiles of any kernel, and none of its sides is a few rows."""
MIN_OTHERS_FRAC = 0.05
"""Share of the smaller products in the time of all from which their rate is known."""
MIN_OTHERS = 2
"""Sizes among them, so that it is no single lucky one."""
MIN_CALL_US = 100.0
"""Time of a call at their rate from which it has enough work for any GPU: some ten times a launch."""
MAX_RATE_RATIO = 0.9
"""A rate below that part of theirs is lower: equal kernels differ by some percent with their sizes."""


@dataclass(frozen=True)
class SlowerProduct:
    """The product with most time to win at the rate of smaller ones."""

    op: str
    sizes: str
    us: float
    """Its kernels, all calls, microseconds."""
    calls: float
    flops_per_s: float
    others_per_s: float
    """The mean rate over the time of the smaller products of the same precision."""

    @property
    def won_us(self) -> float:
        """What it would save at their rate."""
        return self.us * (1 - self.flops_per_s / self.others_per_s)


def slower_product(ops: pd.DataFrame) -> SlowerProduct | None:
    """Such a product among rows of `matrix_ops`; None without one, or without recorded shapes."""
    ops = ops[(ops["tensor_core"] == "yes") & ops["flops_per_s"].notna()]
    made = [product(str(op), str(shapes)) for op, shapes in zip(ops["op"], ops["in_shapes"], strict=True)]
    is_large = [one is not None and one.kind == "gemm" and min(one.sizes.values()) >= MIN_SIDE for one in made]
    ops = ops[is_large].assign(each=ops["flops"] / ops["count"])
    if ops.empty:
        return None
    sums = ops.groupby(["precision", "each", "op", "sizes"], as_index=False)[["total_us", "flops", "count"]].sum()
    found = []
    for row in sums.to_dict("records"):
        others = sums[(sums["precision"] == row["precision"]) & (sums["each"] < row["each"])]
        others_us, us = float(others["total_us"].sum()), float(row["total_us"])
        if others["each"].nunique() < MIN_OTHERS or others_us < MIN_OTHERS_FRAC * float(sums["total_us"].sum()):
            continue
        rate, theirs = 1e6 * float(row["flops"]) / us, 1e6 * float(others["flops"].sum()) / others_us
        if rate < MAX_RATE_RATIO * theirs and us * rate / theirs >= MIN_CALL_US * float(row["count"]):
            found.append(SlowerProduct(str(row["op"]), str(row["sizes"]), us, float(row["count"]), rate, theirs))
    return max(found, key=lambda one: one.won_us, default=None)
