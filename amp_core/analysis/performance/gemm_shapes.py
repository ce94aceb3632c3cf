"""The matrix products of an operator: their sizes, floating-point operations, and unaligned sizes.

    >>> product("aten::addmm", "[[1000], [32, 2048], [2048, 1000], [], []]")
    Product(kind='gemm', sizes={'M': 32, 'N': 1000, 'K': 2048}, batch=1, flops=131072000)
    >>> unaligned({"M": 4096, "N": 50257, "K": 768}, 8)
    {'N': 50264}

A multiplication and an addition are two operations. Convolutions: 2 · batch · output positions · K · C/groups · taps
forward, the same again for each of the two gradients. Attention: two products forward and, since backward
recomputes part of it, five backward; a causal mask is not subtracted, as in `torch.utils.flop_counter`: that is
`unmasked_frac`. A mixture of experts: two products for each expert that a row goes to. Operators whose inputs do not
determine it (the output of a convolution depends on its stride) have no count.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Product:
    """The matrix product of one call of an operator."""

    kind: str
    """gemm, conv, attention, experts or rnn."""
    sizes: Mapping[str, int]
    """M, N and K of a product; C_in and C_out (per group) of a convolution; the head size D of attention; the hidden
    size H and the inner size I of experts. Those that padding changes."""
    batch: int = 1
    flops: int | None = None
    """Floating-point operations of one call; None if the input shapes do not determine them."""
    queries: int | None = None
    """Of attention: positions of the query of each head."""
    keys: int | None = None
    """Of attention: positions of the key of each head."""
    rows: int | None = None
    """Of experts: rows, each of which goes to one of the `batch` experts; a token has several."""

    @property
    def is_vector(self) -> bool:
        """Whether it is a matrix times a vector: memory-bound, since it reads each weight once."""
        return self.kind == "gemm" and min(self.sizes.values()) == 1

    @property
    def unmasked_frac(self) -> float:
        """The share of its operations under a causal mask that ends at the last key: each query has one key more than
        the one before. 1 for what is no attention or has more queries than keys."""
        if not self.queries or not self.keys or self.queries > self.keys:
            return 1.0
        return 1.0 - (self.queries - 1) / (2.0 * self.keys)


_GEMM = {  # indices of the factors among the inputs
    "mm": (0, 1),
    "bmm": (0, 1),
    "matmul": (0, 1),
    "mv": (0, 1),
    "dot": (0, 1),
    "_int_mm": (0, 1),
    "_scaled_mm": (0, 1),
    "addmm": (1, 2),
    "addmm_": (1, 2),
    "_addmm_activation": (1, 2),
    "addmv": (1, 2),
    "baddbmm": (1, 2),
    "baddbmm_": (1, 2),
    "addbmm": (1, 2),
}
_LINEAR = ("linear", "mkldnn_linear", "_mkldnn_linear_pointwise")
_CONV = (
    "cudnn_convolution",
    "cudnn_convolution_relu",
    "cudnn_convolution_add_relu",
    "_convolution",
    "convolution",
    "convolution_overrideable",
    "conv1d",
    "conv2d",
    "conv3d",
    "mkldnn_convolution",
    "miopen_convolution",
    "miopen_depthwise_convolution",
    "_slow_conv2d_forward",
    "slow_conv3d_forward",
    "thnn_conv2d",
    "_conv_depthwise2d",
    "conv_depthwise3d",
)
_CONV_TRANSPOSED = ("cudnn_convolution_transpose", "miopen_convolution_transpose", "conv_transpose2d")
_CONV_BACKWARD = {  # indices of the output's gradient, the input and the weight; None: not among the inputs
    "convolution_backward": (0, 1, 2),
    "mkldnn_convolution_backward": (1, 0, 2),
    "cudnn_convolution_backward_input": (1, None, 2),
    "cudnn_convolution_backward_weight": (1, 2, None),
}
_ATTENTION = {  # index of the query; whether heads come before positions; number of products
    "_scaled_dot_product_flash_attention": (0, True, 2),
    "_scaled_dot_product_efficient_attention": (0, True, 2),
    "_scaled_dot_product_cudnn_attention": (0, True, 2),
    "_scaled_dot_product_fused_attention_overrideable": (0, True, 2),
    "_scaled_dot_product_flash_attention_for_cpu": (0, True, 2),
    "scaled_dot_product_attention": (0, True, 2),
    "_flash_attention_forward": (0, False, 2),
    "_efficient_attention_forward": (0, False, 2),
    "_cudnn_attention_forward": (0, True, 2),
    "_scaled_dot_product_flash_attention_backward": (1, True, 5),
    "_scaled_dot_product_efficient_attention_backward": (1, True, 5),
    "_scaled_dot_product_cudnn_attention_backward": (1, True, 5),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (1, True, 5),
    "_flash_attention_backward": (1, False, 5),
    "_efficient_attention_backward": (1, False, 5),
    "_cudnn_attention_backward": (1, True, 5),
}
_RNN = (
    *("_cudnn_rnn", "_cudnn_rnn_backward", "miopen_rnn", "mkldnn_rnn_layer", "mkldnn_rnn_layer_backward"),
    *("lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"),
)
_EXPERTS = re.compile(r"fused_(?:moe|experts)")
"""In the names of operators of vLLM, SGLang and AITER that take the rows, the two weights of all experts, and by row
those of the chosen ones."""
WRAPPERS = (
    *("linear", "matmul", "scaled_dot_product_attention", "conv1d", "conv2d", "conv3d", "conv_transpose2d"),
    *("convolution", "_convolution", "lstm", "gru", "rnn_tanh", "rnn_relu"),
)
"""Operators that delegate to others; their own time on a CPU contains no multiplication."""
DEPTHWISE = ("_conv_depthwise2d", "conv_depthwise3d")
"""Operators of convolutions with one input channel per group: cuDNN and torch run them without tensor cores."""


def plain_name(op: str) -> str:
    """`aten::mm` as `mm`."""
    return op.removeprefix("aten::")


def is_matrix_op(op: str) -> bool:
    """Whether an operator multiplies matrices, by its name."""
    name = plain_name(op)
    return any(name in known for known in (_GEMM, _LINEAR, _CONV, _CONV_TRANSPOSED, _CONV_BACKWARD, _ATTENTION, _RNN))


@lru_cache(maxsize=4096)
def product(op: str, in_shapes: str) -> Product | None:
    """The product of the operator `op` from the shapes of its inputs as JSON; None if it is unknown."""
    name = plain_name(op)
    if name in _RNN:
        return Product("rnn", {})
    shapes = shapes_of(in_shapes)
    try:
        if name in _GEMM:
            one, other = _GEMM[name]
            return _gemm(shapes[one], shapes[other])
        if name in _LINEAR:
            return _gemm(shapes[0], shapes[1][::-1])
        if name in _CONV or name in _CONV_TRANSPOSED:
            return _convolution(shapes[0], shapes[1], transposed=name in _CONV_TRANSPOSED)
        if name in _CONV_BACKWARD:
            return _convolution_backward(*(None if at is None else shapes[at] for at in _CONV_BACKWARD[name]))
        if name in _ATTENTION:
            at, heads_first, products = _ATTENTION[name]
            return _attention(shapes[at], shapes[at + 1], heads_first, products)
        if _EXPERTS.search(name):
            return _experts(*shapes[:4])
    except (IndexError, ZeroDivisionError, ValueError, TypeError):  # shapes that such an operator cannot have
        return None
    return None


@lru_cache(maxsize=4096)
def shapes_of(text: str) -> tuple[Shape, ...]:
    """Input shapes from their JSON; an input that is not a list of sizes gives an empty shape."""
    return tuple(_shape(item) for item in _json_list(text))


def tensor_shapes(text: str) -> tuple[Shape, ...]:
    """Shapes of the tensors among the inputs, including those in lists, without numbers and damaged entries."""
    shapes: list[Shape] = []
    for item in _json_list(text):
        inside = item if isinstance(item, list) and any(isinstance(one, list) for one in item) else [item]
        shapes += map(_shape, inside)
    return tuple(shape for shape in shapes if shape)


def dtypes_of(text: str) -> tuple[str, ...]:
    """Input types from their JSON, as the profiler names them."""
    return tuple(str(item) for item in _json_list(text))


def _json_list(text: str) -> list[object]:
    """The items of a JSON list; empty for anything else."""
    try:
        value = json.loads(text) if text else []
    except (ValueError, RecursionError):
        return []
    return value if isinstance(value, list) else []


def _shape(item: object) -> Shape:
    sizes = item if isinstance(item, list) else []
    fine = all(isinstance(size, int) and not isinstance(size, bool) and 0 <= size < 2**40 for size in sizes)
    return tuple(sizes) if fine else ()


def unaligned(sizes: Mapping[str, int], multiple: int) -> dict[str, int]:
    """Sizes that are not a multiple of `multiple`, each with the next multiple."""
    return {name: -(-size // multiple) * multiple for name, size in sizes.items() if size % multiple}


def padding_frac(product: Product, padded: Mapping[str, int]) -> float:
    """Operations that padding adds, over those without it (0–1)."""
    return math.prod(padded.get(name, size) / size for name, size in product.sizes.items() if size) - 1.0


def format_sizes(sizes: Mapping[str, int]) -> str:
    """`M 4096 · N 50257 · K 768`."""
    return " · ".join(f"{name} {size}" for name, size in sizes.items())


def _gemm(a: Shape, b: Shape) -> Product:
    if not a or not b:
        raise ValueError
    batch, rows = (math.prod(a[:-2]), a[-2]) if len(a) > 1 else (1, 1)
    k = a[-1]
    n = b[-1] if len(b) > 1 else 1
    if k != (b[-2] if len(b) > 1 else b[0]):
        raise ValueError
    if len(b) <= 2:  # one matrix for the whole batch: a single product with all rows
        batch, rows = 1, batch * rows
    return Product("gemm", {"M": rows, "N": n, "K": k}, batch, 2 * batch * rows * n * k)


def _convolution(given: Shape, weight: Shape, transposed: bool) -> Product:
    if transposed:
        sizes = {"C_in": weight[0], "C_out": weight[1]}  # C_in of all groups: the shapes do not give their number
        return Product("conv", sizes, 1, 2 * math.prod(given) * weight[1] * math.prod(weight[2:]))
    groups = given[1] // weight[1]
    return Product("conv", {"C_in": weight[1], "C_out": weight[0] // groups}, groups)


def _convolution_backward(grad: Shape | None, given: Shape | None, weight: Shape | None) -> Product:
    if grad is None or len(grad) < 3:
        raise ValueError
    if weight is None:
        if given is None:
            raise ValueError
        return Product("conv", {"C_in": given[1], "C_out": grad[1]})
    groups = given[1] // weight[1] if given else 1
    once = 2 * math.prod(grad) * weight[1] * math.prod(weight[2:])
    return Product("conv", {"C_in": weight[1], "C_out": weight[0] // groups}, groups, (2 if given else 1) * once)


def _attention(query: Shape, key: Shape, heads_first: bool, products: int) -> Product:
    if len(query) != 4 or len(key) != 4:
        raise ValueError  # packed sequences of unequal length: their shapes do not give the lengths
    batch, size = query[0], query[3]
    heads, queries, keys = (query[1], query[2], key[2]) if heads_first else (query[2], query[1], key[1])
    flops = 2 * products * batch * heads * queries * keys * size
    return Product("attention", {"D": size}, batch * heads, flops, queries, keys)


def _experts(given: Shape, first: Shape, second: Shape, chosen: Shape) -> Product:
    experts, hidden, inner = second
    if given[-1] != hidden or first[0] != experts or first[2] != hidden or first[1] not in (inner, 2 * inner):
        raise ValueError
    rows = math.prod(given[:-1]) * chosen[-1]
    flops = 2 * rows * hidden * (first[1] + inner)
    return Product("experts", {"H": hidden, "I": inner}, experts, flops, rows=rows)
