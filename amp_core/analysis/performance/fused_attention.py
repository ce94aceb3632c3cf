"""What one fused kernel saves of attention in steps: its softmax has one with the products of batches beside it.

>>> attention_products(run, rows, basis).saved_us
203_000.0
"""

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from amp_core.analysis.performance.attention import (
    MAX_SCORES_RATIO,
    PRODUCTS_OF_BATCHES,
    SOFTMAX,
    has_attention_in_steps,
)
from amp_core.analysis.performance.eligible_ops import matrix_ops
from amp_core.analysis.performance.gemm_shapes import product, tensor_shapes
from amp_core.analysis.performance.saving import MIN_KERNEL_US, Basis, step_share
from amp_core.analysis.performance.step_cost import MATRIX_PARTS
from amp_core.formats import memory_bits_of
from amp_core.store.run import Run
from amp_core.text.formatting import percent

FUSED_PEAK_FRAC = 0.5
"""Share of the dense rate that fused attention is taken to reach: 50 to 73 % forward on an A100 (Dao,
"FlashAttention-2", section 4), and less where the softmax itself takes long."""
BACKWARD_RATIO = 5 / 4
"""Products of the fused backward over those in steps: it computes the scores again, and so five instead of four."""


@dataclass(frozen=True)
class AttentionProducts:
    """The products of attention in steps, in microseconds per step."""

    us: float
    fused_us: float
    """What a fused kernel would take for them, at `FUSED_PEAK_FRAC` or to read its inputs and write its output."""

    @property
    def saved_us(self) -> float:
        """What it would save of them."""
        return self.us - self.fused_us

    def in_words(self, scores_us: float, softmax_us: float, basis: Basis) -> str:
        """What attention takes, and what one kernel would take for it. `scores_us`: kernels between the products, of
        which the softmax takes `softmax_us`."""
        one = step_share(self.fused_us, basis.cost)
        return (
            f"Attention in steps takes {basis.taken(scores_us + self.us)}, {SOFTMAX} alone "
            f"{step_share(softmax_us, basis.cost)} and its products {step_share(self.us, basis.cost)}; one fused "
            f"kernel, at {percent(FUSED_PEAK_FRAC)} of the peak rate, would take {one}"
        )


def attention_products(run: Run, rows: pd.DataFrame, basis: Basis) -> AttentionProducts | None:
    """The products beside the softmax of attention in steps; None where there is none, where their rate or that of the
    device is not known, and where one kernel would be no faster. `rows` of `kernels`."""
    if basis.rates is None or not has_attention_in_steps(rows):
        return None
    ops = matrix_ops(run)
    ops = ops[is_of_scores(ops, rows)]
    fused = np.array([_fused_us(row, basis.rates.gb_per_s) for row in ops.to_dict("records")])
    # Products on several streams at a time take no longer together than their part of the step.
    all_us = basis.each_us(matrix_ops(run)["total_us"])
    of_step = min(1.0, float(basis.cost.us(*MATRIX_PARTS)) / max(all_us, MIN_KERNEL_US))
    us, fused_us = basis.each_us(ops["total_us"]) * of_step, float(fused.sum()) / basis.steps * of_step
    return AttentionProducts(us, fused_us) if us > fused_us else None


def is_of_scores(ops: pd.DataFrame, rows: pd.DataFrame) -> "pd.Series[bool]":
    """Which rows of `matrix_ops` are products of batches of known rate that make or read as many values as a softmax
    among `rows` of `kernels` has: the scores of attention, or their gradients. Where the sizes of that are not
    recorded, all of them."""
    texts = rows["in_shapes"][rows["op"] == SOFTMAX].unique().tolist()
    values = [math.prod(shapes[0]) for text in texts if (shapes := tensor_shapes(text))]
    known = ops["op"].isin(PRODUCTS_OF_BATCHES) & ops["of_peak_frac"].notna()
    of_scores = [
        not values or any(one / MAX_SCORES_RATIO <= many <= one * MAX_SCORES_RATIO for one in values for many in sizes)
        for sizes in (_matrices(row) for row in ops.to_dict("records"))
    ]
    return known & pd.Series(of_scores, index=ops.index, dtype=bool)


def _matrices(row: Mapping[Hashable, Any]) -> list[int]:
    """Values of the three matrices of a product, of all of its batch, the fewest first; empty if not known."""
    made = product(str(row["op"]), str(row["in_shapes"]))
    if made is None or made.kind != "gemm":
        return []
    m, n, k = (made.sizes[name] for name in "MNK")
    return sorted(made.batch * values for values in (m * k, k * n, m * n))


def _fused_us(row: Mapping[Hashable, Any], gb_per_s: float) -> float:
    """What a fused kernel takes for the products of a row: the scores, which are the largest of the three matrices or
    nearly so, stay on the chip."""
    ratio = BACKWARD_RATIO if row["phase"] == "backward" else 1.0
    computing_us = float(row["total_us"]) * float(row["of_peak_frac"]) / FUSED_PEAK_FRAC * ratio
    bits = memory_bits_of(str(row["precision"])) or 16
    moved = sum(_matrices(row)[:2]) * float(row["count"]) * bits / 8
    return max(computing_us, moved / (gb_per_s * 1e3))
