"""Kernels that convert the layout of convolutions' inputs and outputs, and copies into another layout.

>>> layout_rows(kernel_rows(run))["total_us"].sum()
68500.0
"""

import pandas as pd

_TURNING = r"(?i)nchw_?(?:to|2)_?nhwc|nhwc_?(?:to|2)_?nchw|^batched_transpose_\d+x\d+_"
"""In the names of such kernels; MIOpen's have the tile, then what they move at once: `16x64_pack_1x4_ediv_1x2_half`,
`4x64_half`."""


def layout_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """Those of `kernel_rows` that turn NCHW to NHWC or back. Concatenations and copies of other operators change the
    layout too, but not for convolutions; MIOpen's SubTensorOp fills and casts, and its batched transposes are these,
    unless a product of matrices launches them."""
    of_convolution = rows["op"].str.contains("conv(?!ert)", regex=True) & ~rows["name"].str.startswith("SubTensorOp")
    turning = rows["name"].str.contains(_TURNING) & ~rows["op"].str.contains(_OF_MATRICES)
    return rows[turning | ((rows["category"] == "layout") & of_convolution)]


_OF_MATRICES = r"(?i)(?<![a-z])(?:add|b|baddb)?mm(?![a-z])|matmul|linear"
"""In the names of operators that multiply matrices, and convolve nothing."""


_LAYING_OUT = ("aten::contiguous", "aten::clone")
_CONVOLUTION = r"^aten::_?conv(?:\dd|olution|_transpose)"
"""Outermost operators of convolutions."""


def layout_copies(rows: pd.DataFrame) -> pd.DataFrame:
    """Those of `kernel_rows` that copy a tensor as it is but for the order of its elements, or keep a copy of it. On a
    CPU also those of a convolution that lays out its input."""
    laying_out = rows["top_op"][rows["name"].isin(_LAYING_OUT) & rows["top_op"].str.contains(_CONVOLUTION)]
    of_them = rows["top_op"].isin([*_LAYING_OUT, *laying_out])
    return rows[(rows["op"] == "aten::copy_") & of_them & (rows["category"] != "cast")]
