"""Facts from the name of a GPU kernel: tensor cores or not, the precision, the category of work.

name -> dtypes (precision, per family of kernels) and categories (kind of work) -> rules -> classify -> KernelClass
"""

from amp_core.hardware.kernel_names.categories import CATEGORIES, COPIES, GEMM_CATEGORIES, kernel_category
from amp_core.hardware.kernel_names.classify import SMALL_TYPES, KernelClass, classify_kernel, with_dtype
from amp_core.hardware.kernel_names.dtypes import tells_type
from amp_core.hardware.kernel_names.masks import masks_causally
from amp_core.hardware.kernel_names.npu import classify_npu_kernel
from amp_core.hardware.kernel_names.rules import OF_WARP, RULES

__all__ = [
    "CATEGORIES",
    "COPIES",
    "GEMM_CATEGORIES",
    "OF_WARP",
    "RULES",
    "SMALL_TYPES",
    "KernelClass",
    "classify_kernel",
    "classify_npu_kernel",
    "kernel_category",
    "masks_causally",
    "tells_type",
    "with_dtype",
]
