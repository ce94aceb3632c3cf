"""Attention in steps among the kernels of a trace: products of batches with a softmax of scores between them.

>>> has_attention_in_steps(kernel_rows(run))
True
"""

import math

import pandas as pd

from amp_core.analysis.performance.gemm_shapes import product, tensor_shapes

SOFTMAX = "aten::_softmax"
PRODUCTS_OF_BATCHES = ("aten::bmm", "aten::baddbmm")
MIN_SOFTMAX_FRAC = 0.25
"""Time of softmax over that of the products of batches from which they are taken for attention."""
MAX_SCORES_RATIO = 2.0
"""Values of a softmax over those of a product of batches, or the other way round, up to which it may be of these: a
model may add a column to its scores, or leave padding out."""


def has_attention_in_steps(rows: pd.DataFrame) -> bool:
    """Whether rows of kernels compute attention in steps: a softmax of scores takes long beside products of batches."""
    products_us = float(rows["total_us"][rows["op"].isin(PRODUCTS_OF_BATCHES)].sum())
    return products_us > 0 and softmax_of_scores_us(rows) >= MIN_SOFTMAX_FRAC * products_us


def softmax_of_scores_us(rows: pd.DataFrame) -> float:
    """The time of softmax that may be of the scores of attention, microseconds: these are what a product of batches
    makes. Others, as of experts, have other sizes. Of sizes that were not recorded, all of it."""
    softmax, products = rows[rows["op"] == SOFTMAX], rows[rows["op"].isin(PRODUCTS_OF_BATCHES)]
    made = [product(op, sizes) for op, sizes in products[["op", "in_shapes"]].drop_duplicates().itertuples(index=False)]
    scores = [one.batch * one.sizes["M"] * one.sizes["N"] for one in made if one is not None]
    values = [math.prod(next(iter(tensor_shapes(sizes)), ())) for sizes in softmax["in_shapes"]]
    is_of_scores = [
        sizes == "" or not scores or any(many <= MAX_SCORES_RATIO * one <= MAX_SCORES_RATIO**2 * many for one in scores)
        for sizes, many in zip(softmax["in_shapes"], values, strict=True)
    ]
    return float(softmax["total_us"][is_of_scores].sum())
