"""The dtype that a loss was computed in, which may differ from the dtype of the tensor that backward is called on.

    >>> loss_dtype(scaler.scale(out.half().square().sum()))    # the scale is FP32, and so is the product
    torch.float16

A loss that overflowed in 16 bits stays infinite when it is scaled, divided or cast, in any dtype.
"""

import math

import torch

from amp_core.record.model.narrow_dtypes import NARROW

MAX_NODES = 64
"""Operators between single numbers that are inspected: a sum of a few losses, their weights, a scale."""


def loss_dtype(root: torch.Tensor) -> torch.dtype:
    """The 16-bit dtype of `root`, or of the nearest single number that it was computed from; else that of `root`."""
    if root.dtype in NARROW or root.grad_fn is None:
        return root.dtype
    waiting, seen = [root.grad_fn], {root.grad_fn}
    while waiting and len(seen) <= MAX_NODES:
        node = waiting.pop(0)
        # One entry for each output of the operator; parameters (leaves) are not computed, so they do not count.
        outputs = getattr(node, "_input_metadata", ())
        if not outputs or not node.next_functions or any(math.prod(o.shape) != 1 for o in outputs):
            continue
        narrow: torch.dtype | None = next((o.dtype for o in outputs if o.dtype in NARROW), None)
        if narrow is not None:
            return narrow
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return root.dtype
