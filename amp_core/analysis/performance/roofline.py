"""How many times as fast products are in 16 bits, by the data sheet's rates of arithmetic and of memory.

>>> in_16_bits(rows, rates.fp32, rates)      # 8.0 for large products, 2.0 for those that memory bounds
"""

import numpy as np
import pandas as pd

from amp_core.analysis.performance.gemm_shapes import Product, product
from amp_core.hardware.data_sheets import Rates


def in_16_bits(rows: pd.DataFrame, tflops: float, rates: Rates) -> "pd.Series[float]":
    """Of each row of `kernels`, which computes at the rate `tflops` from 32 bits. Where sizes are not known, and of
    convolutions and attention, the ratio of the rates."""
    ratios = [_ratio(op, shapes, tflops, rates) for op, shapes in zip(rows["op"], rows["in_shapes"], strict=True)]
    return pd.Series(ratios, index=rows.index, dtype=float)


def rate_frac(rows: pd.DataFrame, rates: Rates) -> float:
    """The share of the memory's rate at which rows of `kernels` in 32 bits move their matrices, each once; 1 where
    sizes are not known, and of convolutions and attention."""
    values = [_values(product(op, shapes)) for op, shapes in zip(rows["op"], rows["in_shapes"], strict=True)]
    moved = (4.0 * pd.Series(values, index=rows.index, dtype=float) * rows["count"]).fillna(np.inf)
    return min(1.0, float(moved.sum()) / (rates.gb_per_s * 1e3 * max(float(rows["total_us"].sum()), 1e-3)))


def _values(made: Product | None) -> float:
    """Values of the three matrices of a product; NaN for others, and where sizes are not known."""
    if made is None or made.kind != "gemm" or not made.flops:
        return np.nan
    m, n, k = (made.sizes[name] for name in "MNK")
    return float((m * k + k * n + m * n) * made.batch)


def _ratio(op: str, shapes: str, tflops: float, rates: Rates) -> float:
    made = product(op, shapes)
    values = _values(made)
    if made is None or not made.flops or np.isnan(values):
        return rates.half / tflops
    per_value_us = values / (rates.gb_per_s * 1e3)
    wide_us = max(made.flops / (tflops * 1e6), 4 * per_value_us)
    return wide_us / max(made.flops / (rates.half * 1e6), 2 * per_value_us)
