"""What the name of a GPU kernel tells: tensor cores or not, the precision, the category of work.

name -> dtypes (precision, per family of kernels) and categories (kind of work) -> classify -> KernelClass
"""

from amp_core.hardware.kernel_names.classify import CATEGORIES, RULES, KernelClass, classify_kernel, sort_of_kernel

__all__ = ["CATEGORIES", "RULES", "KernelClass", "classify_kernel", "sort_of_kernel"]
