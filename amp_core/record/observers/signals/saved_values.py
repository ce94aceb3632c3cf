"""Reads the values that autograd has saved for backward, and bounds those that it has not.

    saved(loss.grad_fn, "self")     # a tensor, or None
    bound(loss.grad_fn)             # no value was larger

Tensors that were saved under hooks, as checkpointing and offloading do, are left alone: unpacking them would run the
program's code.
"""

import math
from typing import Any

import torch

from amp_core.record.model.parameters import local_values

MAX_NODES = 20_000
"""Most operators of a graph that are looked at."""
LEAF = "AccumulateGrad"
_MAX_BOUNDED_NODES = 64
"""Operators between a result and the products that its bound comes from."""
_FACTORS = {
    "Mm": (("self", 0), ("mat2", 1)),
    "Bmm": (("self", 0), ("mat2", 1)),
    "Addmm": (("mat1", 1), ("mat2", 2)),
    "Baddbmm": (("batch1", 1), ("batch2", 2)),
}
"""The factors of products, as their nodes save them, and their places among the inputs."""
_ELEMENTWISE = ("Add", "Sub", "Mul", "Div", "Neg", "Abs", "Clamp", "ClampMin", "ClampMax", "MaskedFill", "Where",
                "ToCopy", "Relu", "LeakyRelu", "Elu", "Gelu", "Silu", "Softplus", "Tanh", "Sigmoid", "Mean",
                "Dropout", "NativeDropout", "FusedDropout")  # fmt: skip
VIEWS = ("View", "UnsafeView", "ReshapeAlias", "Expand", "Permute", "Transpose", "T", "Unsqueeze", "Squeeze", "Slice",
          "Select", "Split", "Clone", "Index", "As_Strided")  # fmt: skip
"""Operators whose result holds numbers of their argument alone."""


def bound(node: Any) -> float:
    """No magnitude that `node` computed was above this before it was masked; infinite where one may have overflowed, or
    if that cannot be told."""
    return _bounded(node, [_MAX_BOUNDED_NODES])


def _bounded(node: Any, budget: list[int]) -> float:
    """See `bound`; `budget` is the number of operators that may still be visited."""
    if node is None:  # a constant
        return 0.0
    budget[0] -= 1
    if budget[0] < 0:
        return math.inf
    op = operator(node)
    if op in _FACTORS:
        return _bound_of_product(node, op)
    if op == LEAF:
        return largest(leaf_values(node))
    if op not in _ELEMENTWISE and op not in VIEWS:
        return math.inf
    if op == "Mul":
        most = _factor(node, 0, "self", budget) * _factor(node, 1, "other", budget)
    elif op == "Div":
        divisor = saved(node, "other")
        smallest = float(divisor.abs().amin()) if divisor is not None and divisor.numel() else 0.0
        most = _factor(node, 0, "self", budget) / smallest if smallest else math.inf
    else:
        most = sum(_bounded(following, budget) for following, _ in node.next_functions)
    return most if most < torch.finfo(result_dtype(node)).max else math.inf


def _factor(node: Any, place: int, name: str, budget: list[int]) -> float:
    """The bound of one input of a product of elements; a constant is saved there."""
    following = node.next_functions[place][0]
    if following is not None:
        return _bounded(following, budget)
    constant = saved(node, name)
    return math.inf if constant is None else largest(constant)


def _bound_of_product(node: Any, op: str) -> float:
    """By the norms of rows of the first factor, and of the second as a whole: it may be transposed."""
    a, b = (saved(node, factor) for factor, _ in _FACTORS[op])
    if b is None and a is not None:  # saved only if the gradient of the other factor is needed
        b = _variable(node.next_functions[_FACTORS[op][1][1]][0])
    if a is None or b is None:
        return math.inf
    most = float(a.float().norm(dim=-1).amax() * b.float().norm(dim=(-2, -1)).amax())
    return most if most < torch.finfo(a.dtype).max else math.inf


def largest(values: torch.Tensor) -> float:
    """The largest magnitude; infinite if a value is NaN, and 0 of no values."""
    size = float(values.abs().amax()) if values.numel() else 0.0
    return math.inf if math.isnan(size) else size


def operator(node: Any) -> str:
    """The operator whose backward a node is, as torch spells it there: `Exp`, `LinalgVectorNorm`; `LEAF` of a leaf."""
    name: str = node.name().removeprefix("torch::autograd::")
    return name.partition("Backward")[0]


def result_dtype(node: Any) -> torch.dtype:
    """The dtype of the first result of the operator of a node."""
    dtype: torch.dtype = node._input_metadata[0].dtype
    return dtype


def _variable(node: Any) -> torch.Tensor | None:
    """The leaf that `node` gives a view or a cast copy of; None for other nodes."""
    for _ in range(_MAX_BOUNDED_NODES):
        op = operator(node) if node is not None else ""
        if op == LEAF:
            return leaf_values(node)
        if op not in ("ToCopy", *VIEWS):
            return None
        node = node.next_functions[0][0]
    return None


def leaf_values(node: Any) -> torch.Tensor:
    """The values of a leaf, of which a sharded one has its own part: the whole would take a collective."""
    return local_values(node.variable.detach())


def saved(node: Any, name: str) -> torch.Tensor | None:
    """A tensor that `node` saved without hooks and that is as it was saved; None otherwise. Older versions of torch do
    not tell, so None too."""
    raw = getattr(node, f"_raw_saved_{name}", None)
    if raw is None or getattr(raw, "unpack_hook", True) is not None:
        return None
    try:
        value: torch.Tensor | None = getattr(node, f"_saved_{name}")
    except RuntimeError:  # the program changed the tensor since: backward raises too, if it needs it
        return None
    if value is None or value.dim() or type(value) is not torch.Tensor:
        return local_values(value.detach()) if value is not None else None
    with torch._C._DisableTorchDispatch():  # a mode would take the tensor of a Python number for that number again
        return torch.tensor(value.item(), device="cpu")
