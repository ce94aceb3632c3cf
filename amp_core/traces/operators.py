"""What sort of work an operator of PyTorch is, and what its types make of the kernels it launched.

>>> sort_of_operator("aten::addmm")
'gemm'
>>> refine("elementwise", "aten::copy_", ["c10::Half", "float"])     # dtypes differ: a cast
'cast'
"""

import functools
import re

from amp_core.formats import element_bytes, kernel_precision_of
from amp_core.hardware.kernel_names import CATEGORIES

_SORTS = tuple(
    (sort, re.compile(pattern))
    for sort, pattern in (
        ("attention", r"scaled_dot_product|_flash_attention|_efficient_attention|multi_head_attention|mha"),
        ("conv", r"conv(?!ert)"),
        ("gemm", r"::(?:addmm|mm|bmm|baddbmm|addmv|mv|addbmm|dot|matmul|linear|einsum|_scaled_mm|mkldnn_linear|addr)"),
        ("gemm", r"lstm|gru|rnn|mkldnn_rnn"),
        ("reduction", r"vector_norm|_foreach_norm"),
        ("norm", r"norm"),
        ("embedding", r"embedding|index_select|::gather|::index(?:_put_?)?(?:_impl_?)?$|scatter"),
        ("optimizer", r"_fused_(?:adam|sgd|adagrad)|_foreach_|_amp_foreach|_amp_update"),
        ("cast", r"::_to_copy|::to$"),
        ("layout", r"::(?:contiguous|clone|cat|stack|_reshape_copy|repeat|permute|flip|roll|pad|constant_pad_nd)"),
        ("reduction", r"softmax|::(?:sum|mean|max|min|amax|amin|argmax|argmin|var|std|prod|any|all|cumsum|topk|sort)"),
        ("reduction", r"loss|::item|_local_scalar_dense"),
        ("memset", r"::(?:zero_|fill_|zeros|ones|full|zeros_like|ones_like|empty\w*)$"),
        ("communication", r"c10d|record_param_comms|nccl|gloo|all_?reduce"),
        (
            "elementwise",
            r"::(?:add|sub|mul|div|neg|exp|log|sqrt|rsqrt|pow|tanh|sigmoid|relu|gelu|silu|threshold|clamp|where|eq|ne|"
            r"lt|gt|le|ge|abs|sign|erf|dropout|native_dropout|masked_fill|bernoulli|lerp|addcmul|addcdiv|copy|"
            r"reciprocal|maximum|minimum|bitwise|logical|isfinite|isnan|tril|triu|uniform|normal|random)\w*",
        ),
    )
)


@functools.lru_cache(maxsize=4096)
def sort_of_operator(name: str) -> str:
    """One of `amp_core.hardware.kernel_names.CATEGORIES`."""
    found = next((sort for sort, pattern in _SORTS if pattern.search(name)), "other")
    assert found in CATEGORIES
    return found


def refine(category: str, op: str | None, dtypes: list[str]) -> str:
    """The category of a kernel, given the operator that launched it: copies between types are casts, copies within one
    type change the layout, and a matrix product inside a convolution or an attention is part of that."""
    if op is not None and category == "gemm" and (sort := sort_of_operator(op)) in ("conv", "attention"):
        return sort
    if op is None or category not in ("elementwise", "other", "cast"):
        return category
    if op == "aten::copy_" and len(dtypes) > 1:
        target, source = dtypes[0], dtypes[1]
        if element_bytes(target) is not None and element_bytes(source) is not None:
            return "cast" if target != source else "layout"
    if category == "other":
        return sort_of_operator(op)
    return category


def precision_of(dtypes: list[str]) -> str | None:
    """The precision of the first input that is a tensor of floats, or of eight-bit integers."""
    return next(filter(None, map(kernel_precision_of, dtypes)), None)
