"""Classify a GPU kernel by its name: tensor cores or not, the precision, the category of work.

    >>> classify_kernel("ampere_fp16_s16816gemm_fp16_128x128_ldg8_f2f_stages_64x3_tn")
    KernelClass(tensor_core='yes', precision='fp16', category='gemm', why='instruction shape of a tensor core ...')
    >>> classify_kernel("sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x128x8_stage3_ffma_execute").tensor_core
    'no'
    >>> classify_kernel("triton_tem_fused_mm_0").tensor_core     # not in its name
    'unknown'

The rules are in `rules`, the families' ways of writing types in `dtypes`, the kinds of work in `categories`. Precision
is the type of the matrix instruction's inputs; the letter in `s16816` is the accumulator's type and does not count.
"""

import functools
import re
from dataclasses import dataclass, field, replace

from amp_core.hardware.kernel_names.categories import kernel_category
from amp_core.hardware.kernel_names.rules import matching_rule


@dataclass(frozen=True)
class KernelClass:
    """The class of a kernel: `tensor_core` is yes, no or unknown; `precision` fp16, bf16, tf32, fp8, fp6, fp4,
    int8, int4, int1, fp32, fp64 or None; `category` one of `CATEGORIES`; `why` the reason, for people. Equality
    compares the first two."""

    tensor_core: str
    precision: str | None
    category: str = field(default="other", compare=False)
    why: str = field(default="", compare=False)
    by_dtype: bool = field(default=False, compare=False)
    """Whether an unknown kernel is known to multiply matrices by `tl.dot`, which is a matrix instruction for inputs of
    16 bits or fewer. `with_dtype` resolves it."""


_SIGNATURE = re.compile(r"(?<!^triton_)_0d1[cde\d]*$")
"""The arguments of a kernel, which Triton appended to its name until 2.1. Inductor's names consist of them."""
_MAX_NAME_CHARS = 1500
"""Characters that are searched: what distinguishes kernels comes before the nested template arguments."""


@functools.lru_cache(maxsize=4096)
def classify_kernel(name: str) -> KernelClass:
    """Whether the kernel called `name`, as a profiler gives it, runs on tensor cores, and in which precision.

    Demangled, mangled and cut-off names are understood. On AMD's GPUs tensor cores are called matrix cores.
    """
    name = name[:_MAX_NAME_CHARS].removeprefix("void ").strip()
    bare = _SIGNATURE.sub("", name) if "_0d1" in name else name
    rule = matching_rule(bare) or (matching_rule(name) if bare != name else None)
    if rule is None:
        return KernelClass("unknown", None, kernel_category(name), "a name that no rule matches")
    precision = rule.precision(name) if callable(rule.precision) else rule.precision
    return KernelClass(rule.tensor_core, precision, rule.category or kernel_category(name), rule.why, rule.by_dtype)


def with_dtype(kernel: KernelClass, precision: str | None) -> KernelClass:
    """The class of a kernel whose operator has inputs of `precision`: one that is unclassified by name uses tensor
    cores if it multiplies by `tl.dot` and its inputs have 16 bits or fewer."""
    if not kernel.by_dtype or kernel.tensor_core != "unknown" or precision not in SMALL_TYPES:
        return kernel
    return replace(kernel, tensor_core="yes", precision=precision)


SMALL_TYPES = ("fp16", "bf16", "fp8", "fp6", "fp4", "int8", "int4")
"""Precisions of 16 bits or fewer that tensor cores multiply."""
