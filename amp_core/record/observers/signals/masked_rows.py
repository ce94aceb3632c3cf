"""Finds rows that a mask made -inf throughout: their softmax is NaN, in any dtype.

    masked_rows(loss)       # 12: rows of the first softmax in the graph of a non-finite loss; 0 if there is none

Rows that are NaN for another reason do not count: the scores before the mask must be finite, by what autograd has
saved of the product of queries and keys, and by what it is multiplied with.
"""

import math
from typing import Any

import torch

from amp_core.record.observers.signals.saved_values import MAX_NODES, bound, saved

REDUCTIONS = ("_softmax", "_log_softmax", "logsumexp", "amax")
"""Operators that make NaN of such a row, or of what is subtracted from it, by name in the dispatcher."""
_SOFTMAX = ("SoftmaxBackward0", "LogSoftmaxBackward0")
_MAXIMA = ("LogsumexpBackward0", "AmaxBackward0")


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
    result = saved(node, "result")
    if result is None or not result.numel():
        return 0
    dim = node._saved_dim if name in _SOFTMAX else None
    bad = result.isnan().all(_signed(dim)) if dim is not None and result.dim() else result == float("-inf")
    count = int(bad.sum())
    return count if count and node.next_functions and bound(node.next_functions[0][0]) < math.inf else 0


def _signed(dim: int) -> int:
    """A dimension that torch stores as an unsigned number: 2^64 - 1 for -1."""
    return dim - 2**64 if dim >= 2**63 else dim
