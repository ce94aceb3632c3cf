"""What a trace's kernels in FP64 would save in FP32.

>>> fp64_saving(rows, basis, gpu).what
'Kernels in FP64 take 20 % of the step, most in aten::upsample_bilinear2d; FP32 has half the bytes'
"""

import pandas as pd

from amp_core.analysis.performance.gemm_shapes import dtypes_of, shapes_of
from amp_core.analysis.performance.matrix_kinds import is_matrix
from amp_core.analysis.performance.saving import Basis, Saving, longest_name, others
from amp_core.hardware.gpus import Gpu, is_amd
from amp_core.hardware.kernel_names import COPIES

_BY_NAME = r"<double[,>]|lambda\(double[,)]"
"""In the names of torch's kernels for that dtype; arguments of type double are numbers, of any dtype's kernel."""
SMALL_CHIP_RATIO, LARGE_CHIP_RATIO = 32.0, 2.0
"""How many times as fast a GPU multiplies FP32 at least: those for graphics, whose compute capability does not end with
0, have few units for FP64 (CUDA C++ Programming Guide, arithmetic instructions)."""


def fp64_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of `kernels` in FP64, as their names or the inputs of their operators tell. Copies are no kernels: what
    they save is told as theirs."""
    in_fp64 = rows["name"].str.contains(_BY_NAME) | (rows["precision"] == "fp64") | _takes_double(rows)
    return rows[in_fp64 & ~rows["category"].isin(COPIES)]


def fp64_saving(rows: pd.DataFrame, basis: Basis, gpu: Gpu) -> Saving:
    """The saving of kernels in FP64 among rows of `kernels`."""
    rows = fp64_rows(rows)
    # Tensor cores multiply FP64 as fast as other units do FP32 (NVIDIA A100 data sheet): fewer bytes are what is left.
    products = is_matrix(rows) & (rows["tensor_core"] != "yes")
    us, products_us = basis.each_us(rows["total_us"]), basis.each_us(rows["total_us"][products])
    is_small = gpu.capability is not None and gpu.capability[1] != 0 and not is_amd(gpu.name)
    ratio = SMALL_CHIP_RATIO if is_small else LARGE_CHIP_RATIO
    longest = longest_name(rows, "op")
    most = f", most in {longest}" if longest and others(rows, "op") else f", in {longest}" if longest else ""
    gain = f"FP32 is {ratio:.0f} × as fast or more" if products_us > us / 2 else "FP32 has half the bytes"
    return Saving(
        "fp64-operators",
        (us - products_us) / 2 + products_us * (1 - 1 / ratio),
        basis.cost.step_us,
        f"Kernels in FP64 take {basis.taken(us)}{most}; {gain}",
        longest or longest_name(rows, "name"),
        others=others(rows, "op" if longest else "name"),
    )


def _takes_double(rows: pd.DataFrame) -> "pd.Series[bool]":
    """Which operators have a tensor of doubles among their inputs: numbers of Python count as doubles without sizes."""
    inputs = rows[["in_dtypes", "in_shapes"]]
    takes = {
        (dtypes, shapes): any(
            dtype == "double" and shape for dtype, shape in zip(dtypes_of(dtypes), shapes_of(shapes), strict=False)
        )
        for dtypes, shapes in inputs.drop_duplicates().itertuples(index=False)
    }
    return pd.Series([takes[one] for one in inputs.itertuples(index=False, name=None)], index=rows.index, dtype=bool)
