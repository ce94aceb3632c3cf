"""Whether memory bounds kernels that read and write each value once: by the sizes of their operators' inputs.

>>> far_below_memory(rows, gb_per_s=3350.0)      # True for a sum of 4 MiB that takes 27 µs
"""

import itertools
import math

import pandas as pd

from amp_core.analysis.performance.gemm_shapes import Shape, dtypes_of, tensor_shapes
from amp_core.formats import element_bytes

MIN_LONG_US, MAX_RATE_FRAC = 10.0, 0.1
"""A kernel of that length on average which moves less than that share of what memory could is bound by something else:
too few blocks, arithmetic, or scattered reads. A shorter one takes little more than its launch, which fusing saves."""
_WIDEST_BYTES = 8
"""Of an element whose type is not known."""


def far_below_memory(rows: pd.DataFrame, gb_per_s: float | None, *, short: bool = False) -> "pd.Series[bool]":
    """Which rows of `kernels` that are long, or else `short`, move far less than memory could in that time; False where
    sizes or the rate are unknown.

    The bytes are an upper bound: those of all inputs, and of an output as large as they are together by broadcasting.
    """
    is_long = rows["total_us"] >= MIN_LONG_US * rows["count"]
    known = rows["in_shapes"].ne("") & (is_long != short)
    if gb_per_s is None or not known.any():
        return known & False
    chosen = rows[known]
    bytes_ = [_at_most(shapes, dtypes) for shapes, dtypes in zip(chosen["in_shapes"], chosen["in_dtypes"], strict=True)]
    moved = pd.Series(bytes_, index=chosen.index, dtype=float) * chosen["count"]
    far = (moved > 0) & (moved < MAX_RATE_FRAC * gb_per_s * 1e3 * chosen["total_us"])
    return far.reindex(rows.index, fill_value=False)


MAX_SMALL_BYTES, MAX_SMALL_GB_PER_S = 10e6, 128.0
"""A call that moves fewer bytes at a lower rate is bound by its start or its few blocks on whatever GPU: caches hold so
few, and the slowest memory of a GPU with tensor cores is faster (GeForce RTX 3050 Mobile: 192 GB/s)."""


def moves_hardly_anything(rows: pd.DataFrame) -> "pd.Series[bool]":
    """Which rows of `kernels` move so few bytes so slowly that memory bounds them on no GPU; False where sizes are
    unknown."""
    known = rows["in_shapes"].ne("")
    chosen = rows[known]
    bytes_ = [_at_most(shapes, dtypes) for shapes, dtypes in zip(chosen["in_shapes"], chosen["in_dtypes"], strict=True)]
    each = pd.Series(bytes_, index=chosen.index, dtype=float)
    small = (each > 0) & (each < MAX_SMALL_BYTES)
    small &= each * chosen["count"] < MAX_SMALL_GB_PER_S * 1e3 * chosen["total_us"]
    return small.reindex(rows.index, fill_value=False)


def rate_at_most(rows: pd.DataFrame) -> float:
    """The rate in GB/s at which rows of `kernels` move memory at most, by the same bytes; 0 if sizes are unknown for
    one of them."""
    bytes_ = [_at_most(shapes, dtypes) for shapes, dtypes in zip(rows["in_shapes"], rows["in_dtypes"], strict=True)]
    moved = float((pd.Series(bytes_, index=rows.index, dtype=float) * rows["count"]).sum())
    return moved / (1e3 * float(rows["total_us"].sum())) if bytes_ and min(bytes_) > 0 else 0.0


def _at_most(shapes: str, dtypes: str) -> int:
    """The bytes that one call moves at most; 0 if no size is known."""
    sizes = tensor_shapes(shapes)
    width = max((element_bytes(dtype) or 0 for dtype in dtypes_of(dtypes)), default=0) or _WIDEST_BYTES
    return (sum(map(math.prod, sizes)) + math.prod(_broadcast(sizes))) * width if sizes else 0


def _broadcast(sizes: tuple[Shape, ...]) -> list[int]:
    """The largest size of each dimension, from the last one on."""
    return [max(lengths) for lengths in itertools.zip_longest(*(reversed(shape) for shape in sizes), fillvalue=1)]
