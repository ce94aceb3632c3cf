"""Finds rows that a mask made -inf throughout: their softmax is NaN, in any dtype.

    masked_rows(loss)       # 12: rows of the first softmax in the graph of a non-finite loss; 0 if there is none

It reads what autograd has saved, before backward. Tensors that were saved under hooks, as checkpointing and offloading
do, are left alone: unpacking them would run the program's code. Rows that are NaN for another reason do not count:
the scores before the mask must be finite, by the values that the product of queries and keys saved.
"""

from typing import Any

import torch

MAX_NODES = 20_000
MAX_SCORE_NODES = 64
"""Operators between a softmax and the products that its scores come from."""
REDUCTIONS = ("_softmax", "_log_softmax", "logsumexp", "amax")
"""Operators that make NaN of such a row, or of what is subtracted from it, by name in the dispatcher."""
_SOFTMAX = ("SoftmaxBackward0", "LogSoftmaxBackward0")
_MAXIMA = ("LogsumexpBackward0", "AmaxBackward0")
_FACTORS = {
    "MmBackward0": (("self", 0), ("mat2", 1)),
    "BmmBackward0": (("self", 0), ("mat2", 1)),
    "AddmmBackward0": (("mat1", 1), ("mat2", 2)),
    "BaddbmmBackward0": (("batch1", 1), ("batch2", 2)),
}
"""The factors of products, as their nodes save them, and their places among the inputs."""
_ELEMENTWISE = ("Add", "Sub", "Mul", "Div", "Neg", "Abs", "Clamp", "ClampMin", "ClampMax", "MaskedFill", "Where",
                "ToCopy", "Relu", "LeakyRelu", "Elu", "Gelu", "Silu", "Softplus", "Tanh", "Sigmoid", "Mean",
                "Dropout", "NativeDropout", "FusedDropout")  # fmt: skip
_VIEWS = ("View", "UnsafeView", "ReshapeAlias", "Expand", "Permute", "Transpose", "T", "Unsqueeze", "Squeeze", "Slice",
          "Select", "Split", "Clone", "Index", "As_Strided")  # fmt: skip


def count_masked_rows(scores: torch.Tensor, dim: int) -> torch.Tensor:
    """Rows that are -inf throughout, as a tensor; 0 if a value is +inf or NaN, as after an overflow."""
    scores = scores.detach()
    return (scores.amax(dim) == float("-inf")).sum() * (scores.amax() < float("inf"))


def masked_rows(loss: torch.Tensor) -> int:
    """Rows of the first softmax in the graph of `loss` that a mask made -inf throughout; 0 if there is none."""
    waiting, seen = [loss.grad_fn], {loss.grad_fn}
    rows = 0
    while waiting and len(seen) <= MAX_NODES:
        node = waiting.pop()
        if node is None:
            continue
        rows = _rows_at(node) or rows
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return rows


def _rows_at(node: Any) -> int:
    name = node.name()
    if name not in (*_SOFTMAX, *_MAXIMA):
        return 0
    result = _saved(node, "result")
    if result is None or not result.numel():
        return 0
    dim = node._saved_dim if name in _SOFTMAX else None
    bad = result.isnan().all(_signed(dim)) if dim is not None and result.dim() else result == float("-inf")
    count = int(bad.sum())
    return count if count and node.next_functions and _is_finite(node.next_functions[0][0]) else 0


def _is_finite(node: Any) -> bool:
    """Whether what `node` computes was finite before it was masked."""
    waiting, visited = [node], 0
    while waiting and visited < MAX_SCORE_NODES:
        node, visited = waiting.pop(), visited + 1
        if node is None:  # a constant
            continue
        name = node.name().removeprefix("torch::autograd::")
        if name in _FACTORS:
            a, b = (_saved(node, factor) for factor, _ in _FACTORS[name])
            if b is None and a is not None:  # saved only if the gradient of the other factor is needed
                b = _variable(node.next_functions[_FACTORS[name][1][1]][0])
            if a is None or b is None or not _product_fits(a, b):
                return False
        elif name == "AccumulateGrad":
            if not bool(node.variable.detach().isfinite().all()):
                return False
        elif _base(name) in _ELEMENTWISE or _base(name) in _VIEWS:
            waiting += [following for following, _ in node.next_functions]
        else:
            return False
    return not waiting


def _base(name: str) -> str:
    return name.partition("Backward")[0]


def _variable(node: Any) -> torch.Tensor | None:
    """The leaf that `node` gives a view or a cast copy of; None for other nodes."""
    for _ in range(MAX_SCORE_NODES):
        name = node.name().removeprefix("torch::autograd::") if node is not None else ""
        if name == "AccumulateGrad":
            leaf: torch.Tensor = node.variable.detach()
            return leaf
        if _base(name) not in ("ToCopy", *_VIEWS):
            return None
        node = node.next_functions[0][0]
    return None


def _product_fits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether no element of `a @ b` can overflow, by the norms of rows of `a`, and of `b` as a whole: it may be
    transposed."""
    largest = a.float().norm(dim=-1).amax() * b.float().norm(dim=(-2, -1)).amax()
    return bool(largest < torch.finfo(a.dtype).max)


def _saved(node: Any, name: str) -> torch.Tensor | None:
    """A tensor that `node` saved without hooks; None otherwise. Older versions of torch do not tell, so None too."""
    raw = getattr(node, f"_raw_saved_{name}", None)
    if raw is None or getattr(raw, "unpack_hook", True) is not None:
        return None
    saved: torch.Tensor | None = getattr(node, f"_saved_{name}")
    return saved.detach() if saved is not None else None


def _signed(dim: int) -> int:
    """A dimension that torch stores as an unsigned number: 2^64 - 1 for -1."""
    return dim - 2**64 if dim >= 2**63 else dim
