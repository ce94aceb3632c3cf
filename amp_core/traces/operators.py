"""The category of a PyTorch operator, and of the kernels that it launched.

>>> operator_category("aten::addmm")
'gemm'
>>> refine("elementwise", "aten::copy_", ["c10::Half", "float"])     # dtypes differ: a cast
'cast'
"""

import functools
import re

from amp_core.formats import element_bytes, kernel_precision_of
from amp_core.hardware.kernel_names import CATEGORIES

_CATEGORY_PATTERNS = tuple(
    (category, re.compile(pattern))
    for category, pattern in (
        ("communication", r"c10d|record_param_comms|nccl|gloo|all_?reduce|^rpc_"),  # before "scatter"
        ("attention", r"scaled_dot_product|_flash_attention|_efficient_attention|multi_head_attention|mha"),
        ("conv", r"conv(?!ert)"),
        (
            "gemm",
            r"::(?:addmm|mm|bmm|baddbmm|addmv|mv|addbmm|dot|matmul|linear|einsum|_scaled_mm|mkldnn_linear|onednn_\w*mm|addr)",
        ),
        ("gemm", r"lstm|gru|rnn|mkldnn_rnn"),
        ("reduction", r"vector_norm|_foreach_norm"),
        ("norm", r"norm(?!al)"),
        ("embedding", r"embedding|index_select|::gather|::_?index(?:_put|_add|_copy|_fill)?_?(?:impl_)?$|scatter"),
        ("elementwise", r"_foreach_copy_"),
        ("optimizer", r"_fused_(?:adam|sgd|adagrad)|_foreach_|_amp_foreach|_amp_update"),
        ("cast", r"::_to_copy|::to$"),
        ("layout", r"::(?:contiguous|clone|cat|stack|_reshape_copy|repeat|permute|flip|roll|pad|constant_pad_nd)"),
        ("reduction", r"softmax|::(?:sum|mean|max|min|amax|amin|argmax|argmin|var|std|prod|any|all|cumsum|topk|sort)"),
        ("reduction", r"loss|::item|_local_scalar_dense"),
        ("memset", r"::(?:zero_|fill_|zeros|ones|full|zeros_like|ones_like|empty\w*)$"),
        (
            "elementwise",
            r"::(?:add|sub|mul|div|neg|exp|log|sqrt|rsqrt|pow|tanh|sigmoid|relu|gelu|silu|threshold|clamp|where|eq|ne|"
            r"lt|gt|le|ge|abs|sign|erf|dropout|native_dropout|masked_fill|bernoulli|lerp|addcmul|addcdiv|copy|"
            r"reciprocal|maximum|minimum|bitwise|logical|isfinite|isnan|tril|triu|uniform|normal|random)\w*",
        ),
    )
)


VIEWS = "aten::(?:t|transpose|view|expand|permute|select|slice|as_strided|unsqueeze|squeeze|detach)$"
"""Operators that compute nothing and move nothing."""


def is_view(name: str) -> bool:
    """Whether an operator computes nothing and moves nothing."""
    return re.match(VIEWS, name) is not None


@functools.lru_cache(maxsize=4096)
def operator_category(name: str) -> str:
    """One of `amp_core.hardware.kernel_names.CATEGORIES`."""
    category = next((category for category, pattern in _CATEGORY_PATTERNS if pattern.search(name)), "other")
    assert category in CATEGORIES
    return category


def refine(category: str, op: str | None, dtypes: list[str]) -> str:
    """The category of a kernel, given the operator that launched it: copies between types are casts, copies within one
    type change the layout, and a matrix product inside a convolution or attention belongs to that."""
    if op is not None and category == "gemm" and (launcher := operator_category(op)) in ("conv", "attention"):
        return launcher
    if category == "optimizer" and op is not None and operator_category(op) == "elementwise":
        return "elementwise"  # torch's kernels for lists of tensors copy them, too
    if op is None or category not in ("elementwise", "other", "cast"):
        return category
    if op == "aten::copy_" and len(dtypes) > 1:
        target, source = dtypes[0], dtypes[1]
        if element_bytes(target) is not None and element_bytes(source) is not None:
            return "cast" if target != source else "layout"
    if category == "other":
        return operator_category(op)
    return category


COMPILED = re.compile(r"Torch-Compiled Region|CompiledFunction|CompiledFxGraph")
"""Operators that torch.compile records around the code that it compiled."""
COMPILED_CODE = "compiled code"
"""What is said of several of these operators together, as those of forward and of backward."""


_NO_RANGE = re.compile(r"[:#]|Backward\d*$|^AccumulateGrad$|^detach_?$|^triton_")


def is_range(name: str) -> bool:
    """Whether an event among operators is a range of the program's own, as some versions record those: operators have a
    namespace (`aten::`, `gloo:`); `detach`, nodes of autograd and launches of Triton's kernels have names of their own.
    The operators of PyTorch up to 1.4 have no namespace either: in traces without any, nothing is a range."""
    return _NO_RANGE.search(name) is None


def is_compiled_code(op: str | None) -> bool:
    """Whether an operator is a call of compiled code, or stands for several of them."""
    return op is not None and (op == COMPILED_CODE or COMPILED.search(op) is not None)


def precision_of(dtypes: list[str]) -> str | None:
    """The precision of the first input that is a tensor of floats or 8-bit integers."""
    return next(filter(None, map(kernel_precision_of, dtypes)), None)
