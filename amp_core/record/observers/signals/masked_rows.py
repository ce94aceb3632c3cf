"""Finds rows that a mask made -inf throughout: their softmax is NaN, in any dtype.

    masked_rows(loss)       # 12: rows of the first softmax in the graph of a non-finite loss; 0 if there is none

It reads what autograd has saved, before backward. Tensors that were saved under hooks, as checkpointing and offloading
do, are left alone: unpacking them would run the program's code. Rows that are NaN for another reason do not count:
the scores before the mask must be finite, by the values that the product of queries and keys saved, and by what it is
multiplied with.
"""

import math
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
    return count if count and node.next_functions and _was_finite(node.next_functions[0][0]) else 0


def _was_finite(node: Any) -> bool:
    """Whether what `node` computes was finite before it was masked."""
    return _bound(node, [MAX_SCORE_NODES]) < math.inf


def _bound(node: Any, budget: list[int]) -> float:
    """No magnitude that `node` computed was above this before it was masked; infinite where one may have overflowed, or
    if that cannot be told. `budget` is the number of operators that may still be visited."""
    if node is None:  # a constant
        return 0.0
    budget[0] -= 1
    if budget[0] < 0:
        return math.inf
    name = node.name().removeprefix("torch::autograd::")
    if name in _FACTORS:
        return _bound_of_product(node, name)
    if name == "AccumulateGrad":
        return _largest(node.variable.detach())
    base = _base(name)
    if base not in _ELEMENTWISE and base not in _VIEWS:
        return math.inf
    if base == "Mul":
        bound = _factor(node, 0, "self", budget) * _factor(node, 1, "other", budget)
    elif base == "Div":
        divisor = _saved(node, "other")
        smallest = float(divisor.abs().amin()) if divisor is not None and divisor.numel() else 0.0
        bound = _factor(node, 0, "self", budget) / smallest if smallest else math.inf
    else:
        bound = sum(_bound(following, budget) for following, _ in node.next_functions)
    return bound if bound < torch.finfo(node._input_metadata[0].dtype).max else math.inf


def _factor(node: Any, place: int, name: str, budget: list[int]) -> float:
    """The bound of one input of a product of elements; a constant is saved there."""
    following = node.next_functions[place][0]
    if following is not None:
        return _bound(following, budget)
    constant = _saved(node, name)
    return math.inf if constant is None else _largest(constant)


def _bound_of_product(node: Any, name: str) -> float:
    """By the norms of rows of the first factor, and of the second as a whole: it may be transposed."""
    a, b = (_saved(node, factor) for factor, _ in _FACTORS[name])
    if b is None and a is not None:  # saved only if the gradient of the other factor is needed
        b = _variable(node.next_functions[_FACTORS[name][1][1]][0])
    if a is None or b is None:
        return math.inf
    bound = float(a.float().norm(dim=-1).amax() * b.float().norm(dim=(-2, -1)).amax())
    return bound if bound < torch.finfo(a.dtype).max else math.inf


def _largest(values: torch.Tensor) -> float:
    """The largest magnitude; infinite if a value is NaN, and 0 of no values."""
    largest = float(values.abs().amax()) if values.numel() else 0.0
    return math.inf if math.isnan(largest) else largest


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


def _saved(node: Any, name: str) -> torch.Tensor | None:
    """A tensor that `node` saved without hooks; None otherwise. Older versions of torch do not tell, so None too."""
    raw = getattr(node, f"_raw_saved_{name}", None)
    if raw is None or getattr(raw, "unpack_hook", True) is not None:
        return None
    saved: torch.Tensor | None = getattr(node, f"_saved_{name}")
    if saved is None or saved.dim() or type(saved) is not torch.Tensor:
        return saved.detach() if saved is not None else None
    with torch._C._DisableTorchDispatch():  # a mode would take the tensor of a Python number for that number again
        return torch.tensor(saved.item(), device="cpu")


def _signed(dim: int) -> int:
    """A dimension that torch stores as an unsigned number: 2^64 - 1 for -1."""
    return dim - 2**64 if dim >= 2**63 else dim
