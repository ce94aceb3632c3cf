"""Matrices that are copied before they are multiplied by, as an expert's weights for each of its tokens.

>>> gathered(rows, basis).us
1180.0
"""

import math
from dataclasses import dataclass

import pandas as pd

from amp_core.analysis.performance.attention import PRODUCTS_OF_BATCHES
from amp_core.analysis.performance.gemm_shapes import Shape, dtypes_of, tensor_shapes
from amp_core.analysis.performance.saving import Basis
from amp_core.formats import element_bytes

_GATHERS = r"::(?:index|index_select|embedding|gather)$"
MIN_GATHERED_FRAC = 0.1
"""Share of the step in such copies and the products that read them from which they are told."""
MIN_COPIES_RATIO = 2.0
"""Copies per matrix from which several products share one."""


@dataclass(frozen=True)
class Gathered:
    """Copies of matrices that an operator gathers, of which a product of batches multiplies one each."""

    op: str
    """The operator that gathers them, of several the longest; and so of what follows."""
    size: Shape
    """Of a matrix: rows and columns."""
    matrices: int
    copies: int
    us: float
    """Copies and products, microseconds per step."""
    saved_us: float
    """Without the time to read each matrix once that is used."""
    products: frozenset[str]
    """The shapes of the products' inputs, as recorded."""

    @property
    def are_shared(self) -> bool:
        """Whether several products share a matrix."""
        return self.copies >= MIN_COPIES_RATIO * self.matrices

    def in_words(self, basis: Basis) -> str:
        """What they take, and why."""
        high, wide = self.size
        return (
            f"{self.op} and the products of batches that read its copies take {basis.taken(self.us)}: it copies a "
            f"matrix of {high} × {wide} for each of {self.copies:,} products, from {self.matrices:,}"
        )


def gathered(rows: pd.DataFrame, basis: Basis) -> Gathered | None:
    """The copies of matrices in rows of `kernels`, and the products that read them; None where they take little, or
    where shapes were not recorded."""
    products = rows[rows["op"].isin(PRODUCTS_OF_BATCHES)]
    batches = [_matrices(text) for text in products["in_shapes"]]
    gathers = rows[rows["op"].str.contains(_GATHERS)].sort_values("total_us", ascending=False)
    us, reading_us, read, found = 0.0, 0.0, set(), None
    for op, text, dtypes, took_us, count in zip(
        *(gathers[name] for name in ("op", "in_shapes", "in_dtypes", "total_us", "count")), strict=True
    ):
        source = next(iter(tensor_shapes(text)), ())
        if len(source) != 3:
            continue
        size, matrices = source[1:], source[0]
        those = [number for number, by_size in enumerate(batches) if size in by_size]
        copies = max((batches[number][size] for number in those), default=0)
        if not copies:
            continue
        each = math.prod(size) * ((element_bytes(next(iter(dtypes_of(dtypes)), "")) or _WIDEST_BYTES) / 1e3)
        # A data sheet's rate, or that at which the copies are read and written.
        kb_per_us = basis.rates.gb_per_s if basis.rates is not None else 2 * copies * each * count / max(took_us, 1e-3)
        reading_us += min(matrices, copies) * each * count / max(kb_per_us, 1e-3)
        us += took_us
        read.update(those)
        found = found or (op, size, matrices, copies)
    products_us = float(products["total_us"].iloc[sorted(read)].sum())
    if found is None or (us + products_us) / basis.steps < MIN_GATHERED_FRAC * basis.cost.step_us:
        return None
    both_us = (us + products_us) / basis.steps
    saved_us = max(0.0, both_us - reading_us / basis.steps)
    shapes = frozenset(products["in_shapes"].iloc[sorted(read)])
    return Gathered(*found, us=both_us, saved_us=saved_us, products=shapes)


_WIDEST_BYTES = 8
"""Of an element whose type is not known."""


def _matrices(text: str) -> dict[Shape, int]:
    """How many matrices of a size an input of a product of batches holds, by that, also if it is transposed; vectors
    are none."""
    found: dict[Shape, int] = {}
    for shape in tensor_shapes(text):
        if len(shape) == 3 and min(shape[1:]) > 1:
            for size in (shape[1:], shape[:0:-1]):
                found[size] = max(found.get(size, 0), shape[0])
    return found
