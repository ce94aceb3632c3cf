"""Matrices that are copied before they are multiplied by, as an expert's weights for each of its tokens.

>>> gathered_matrices(run, savings).sentence
'aten::index takes 40 % of the profiled window: it copies a matrix of 512 × 1024 for each of 256 products, from 16 …'
"""

from amp_core.analysis.performance.attention import PRODUCTS_OF_BATCHES
from amp_core.analysis.performance.gemm_shapes import tensor_shapes
from amp_core.analysis.performance.kernels import kernel_rows, window_rows
from amp_core.analysis.performance.savings import Savings
from amp_core.findings.part import Part
from amp_core.store.run import Run
from amp_core.text.formatting import percent

_GATHERS = r"::(?:index|index_select|embedding|gather)$"
MIN_COPIES_RATIO = 2.0
"""Copies per matrix from which several products share one."""
MIN_GATHERED_FRAC = 0.1
"""Share of the step in such copies from which they are told."""


def gathered_matrices(run: Run, savings: Savings) -> Part | None:
    """The copies of matrices that an operator gathers, of which a product of batches multiplies one each; None where
    they take little, or where shapes were not recorded."""
    rows = kernel_rows(run)
    batches: dict[tuple[int, ...], int] = {}
    for text in rows["in_shapes"][rows["op"].isin(PRODUCTS_OF_BATCHES)].unique().tolist():
        for shape in tensor_shapes(text):
            if len(shape) == 3 and shape[1] > 1:
                batches[shape[1:]] = max(batches.get(shape[1:], 0), shape[0])
    us, found = 0.0, None
    rows = rows[rows["op"].str.contains(_GATHERS)].sort_values("total_us", ascending=False)
    for op, text, took_us in zip(rows["op"], rows["in_shapes"], rows["total_us"], strict=True):
        source = next(iter(tensor_shapes(text)), ())
        copies = batches.get(tuple(source[1:]), 0) if len(source) == 3 else 0
        if copies:
            us, found = us + took_us, found or (op, source, copies)
    frac = us / float(window_rows(run)["wall_us"].sum())
    if found is None or frac < MIN_GATHERED_FRAC:
        return None
    op, (matrices, high, wide), copies = found
    remedy = "Sort the rows by matrix, and multiply each group by its own once."
    if copies < MIN_COPIES_RATIO * matrices:
        remedy = "A grouped product, or a fused kernel of experts, reads the matrices where they are."
    return Part(
        f"{op} takes {percent(frac)} of the {savings.unit}: it copies a matrix of {high} × {wide} for each of "
        f"{copies:,} products, from {matrices:,}, and the products of batches then read the copies. {remedy}",
        frac,
        op,
    )
