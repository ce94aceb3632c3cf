"""Detects normalization layers that divide each row by its own norm in 16 bits, however the norm is spelled.

    norms = RowNorms()
    norms.check("linalg_vector_norm", args, out)    # after each operator
    norms.check("div", args, out)
    norms.check("mul", args, out)                   # (rows, dtype) at the gain of a norm in 16 bits

The learned gain for each channel tells a normalization layer from unit vectors, whose dot products average rounding
errors out: cosine similarity and contrastive losses are not reported.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch

from amp_core.record.model.narrow_dtypes import NARROW

MIN_TERMS = 16
NORMS = ("linalg_vector_norm", "norm", "frobenius_norm")
ROOTS = ("rsqrt", "sqrt")
SUMS = ("sum", "bmm")
"""Reductions whose root is a norm: `einsum("...d,...d->...", x, x)` runs as `bmm`."""


class RowNorms:
    """The operators of one step, in their order. Rows are identified by their number and their length."""

    def __init__(self) -> None:
        self._sums: set[int] = set()  # numbers of rows
        self._norms: dict[int, torch.dtype] = {}
        self._divided: dict[tuple[int, ...], torch.dtype] = {}  # shapes of normalized inputs

    def check(self, op: str, args: Sequence[Any], out: Any) -> tuple[int, torch.dtype] | None:
        """Inspect an operator. Where it applies the gain of a norm in 16 bits: the number of rows, and the dtype."""
        if not isinstance(out, torch.Tensor) or not args or not isinstance(args[0], torch.Tensor):
            return None
        name = op.rstrip("_")
        if name in SUMS or name in NORMS:
            terms = args[0].shape[-1] if name == "bmm" else args[0].numel() // max(1, out.numel())
            if out.dtype in NARROW and terms >= MIN_TERMS:
                if name in NORMS:
                    self._norms[out.numel()] = out.dtype
                else:
                    self._sums.add(out.numel())
        elif is_root(name, args):
            if out.dtype in NARROW and out.numel() in self._sums:
                self._norms[out.numel()] = out.dtype
        elif name in ("div", "mul") and len(args) > 1 and isinstance(args[1], torch.Tensor):
            return self._check_quotient(args[0], args[1], out)
        return None

    def _check_quotient(self, x: torch.Tensor, y: torch.Tensor, out: torch.Tensor) -> tuple[int, torch.dtype] | None:
        if x.dim() < y.dim() or x.numel() < y.numel():
            x, y = y, x
        length = x.shape[-1] if x.dim() > 1 else 0
        if length < MIN_TERMS:
            return None
        rows = x.numel() // length
        if y.shape == (length,):
            dtype = self._divided.pop(tuple(x.shape), None)
            return (rows, dtype) if dtype is not None else None
        if rows > 1 and y.dim() == x.dim() and (y.shape[-1] == 1 or y.stride(-1) == 0):
            distinct = math.prod(n for n, stride in zip(y.shape, y.stride(), strict=True) if stride or n == 1)
            if distinct == rows and rows in self._norms:
                self._divided[tuple(out.shape)] = self._norms.pop(rows)
        return None


def is_root(name: str, args: Sequence[Any]) -> bool:
    """Whether an operator is a square root or its reciprocal."""
    exponent = args[1] if name == "pow" and len(args) > 1 else None
    return name in ROOTS or (isinstance(exponent, float) and abs(exponent) == 0.5)
