"""The most terms that an operator adds to one element, if it adds by index.

most_terms(args)     # of `scatter_add`, `index_add`, `scatter_reduce` or `index_put`: a tensor of one number
"""

from collections.abc import Sequence
from typing import Any

import torch

MAX_VALUES = 2**20
"""Elements of a tensor of integers that are counted, or compared with their copies in 16 bits."""


def most_terms(args: Sequence[Any]) -> torch.Tensor | None:
    """The most values that `scatter_add`, `index_add`, `scatter_reduce` or an accumulating `index_put` adds to one
    element: few sums of a graph or of experts may hold most of the terms. None if the tensors are too large to be
    counted, or values replace others."""
    into, dim, index = args[:3]
    if isinstance(dim, list | tuple):
        return _most_terms_at(into, dim, index) if len(args) > 3 and args[3] and index.numel() <= MAX_VALUES else None
    if not torch.is_tensor(index) or not index.numel() or max(index.numel(), into.numel()) > MAX_VALUES:
        return None
    whole_slices = index.dim() < into.dim()  # of index_add
    shape, axis = (into.shape[dim : dim + 1 or None], 0) if whole_slices else (into.shape, dim)
    terms = torch.zeros(shape, dtype=torch.int32, device=index.device)
    return terms.scatter_add_(axis, index, torch.ones_like(index, dtype=torch.int32)).amax()


def _most_terms_at(into: torch.Tensor, places: Sequence[Any], values: torch.Tensor) -> torch.Tensor | None:
    """The same of `index_put`, whose places are tensors."""
    if into.numel() > MAX_VALUES or not all(
        torch.is_tensor(p) and p.dtype in (torch.int32, torch.int64) for p in places
    ):
        return None
    terms = torch.zeros(into.shape, dtype=torch.int32, device=into.device)
    terms.index_put_(tuple(places), torch.ones_like(values, dtype=torch.int32), accumulate=True)
    return terms.amax()
