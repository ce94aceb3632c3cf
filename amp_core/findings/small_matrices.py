"""Decompositions and inverses of many matrices that are small enough for closed formulas, if they take long.

>>> small_matrices(run, savings).sentence
'aten::_linalg_svd takes 11 % of the step, on matrices of 3 × 3: closed formulas, for all of them at once, take less.'
"""

import math
import re

from amp_core.analysis.performance.gemm_shapes import tensor_shapes
from amp_core.analysis.performance.kernels import kernel_rows
from amp_core.analysis.performance.saving import MIN_SAVED_FRAC, step_share
from amp_core.analysis.performance.savings import Savings
from amp_core.findings.part import Part, steps_or_windows
from amp_core.store.run import Run


def small_matrices(run: Run, savings: Savings) -> Part | None:
    """The operator with most of the time among those on many small matrices; None where none takes long."""
    rows = kernel_rows(run)
    rows = rows[rows["op"].str.match(_DECOMPOSES)]
    rows = rows.assign(size=[_size(shapes) for shapes in rows["in_shapes"]])
    rows = rows[rows["size"] != ""]
    us = rows.groupby(["op", "size"])["total_us"].sum().reset_index().sort_values("total_us")
    each_us = float(us["total_us"].max()) / steps_or_windows(run) if len(us) else 0.0
    if each_us < MIN_SAVED_FRAC * savings.cost.step_us:
        return None
    longest, share = us.iloc[-1], step_share(each_us, savings.cost)
    told = f"{longest['op']} takes {share} of the {savings.unit}, on matrices of {longest['size']}"
    formulas = "closed formulas, for all of them at once, take less."
    return Part(f"{told}: {formulas}", each_us / savings.cost.step_us, str(longest["op"]))


def _size(shapes: str) -> str:
    """`3 × 3` of many matrices of that size; empty for others."""
    first = next(iter(tensor_shapes(shapes)), ())
    is_small = len(first) > 2 and 1 < first[-1] == first[-2] <= MAX_ROWS and math.prod(first[:-2]) >= MIN_MATRICES
    return f"{first[-2]} × {first[-1]}" if is_small else ""


MAX_ROWS = 3
"""Rows of a matrix up to which its inverse, its eigenvalues and its singular values have closed formulas."""
MIN_MATRICES = 100
"""Matrices of one call from which its time is that of computing them, and not of its launches."""
_DECOMPOSES = re.compile(r"aten::(?:_?linalg_(?:svd|eigh|inv)|_(?:inverse|svd|symeig)_helper$|inverse$)")
