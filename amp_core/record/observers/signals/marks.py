"""Marks on tensors of a step, by which inspections of operators know later where a value came from.

>>> marks = Marks()
>>> marks.put(probabilities, "sigmoid in bfloat16")
>>> marks.of(probabilities[:, 0])
'sigmoid in bfloat16'

A `Follower` is such an inspection: it gets the operators of one step in their order, and returns what it has `Found`.
"""

from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef

T = TypeVar("T")


class Marks(Generic[T]):
    """Marks by memory: a view has that of its base. Memory with a mark keeps its address, so that no other tensor gets
    it. Only plain tensors have marks."""

    def __init__(self) -> None:
        self._marks: dict[int, tuple[StorageWeakRef, T]] = {}

    def put(self, tensor: Any, mark: T) -> None:
        """Mark a tensor, in place of an earlier mark."""
        if _is_plain(tensor):
            storage = StorageWeakRef(tensor.untyped_storage())
            self._marks[storage.cdata] = storage, mark

    def of(self, value: Any) -> T | None:
        """The mark of a tensor; None without one, and for anything else."""
        if not self._marks or not _is_plain(value):
            return None
        found = self._marks.get(StorageWeakRef(value.untyped_storage()).cdata)
        return found[1] if found is not None else None


class Found(NamedTuple):
    """What an event will tell if `value`, a tensor of one number, turns out to be above `limit`."""

    kind: str
    op: str
    dtype: torch.dtype
    value: torch.Tensor
    limit: float


class Follower(Protocol):
    """Inspects the operators of one step."""

    def check(self, op: str, args: Sequence[Any], out: Any) -> Found | None:
        """Inspect an operator that has run."""


def _is_plain(value: Any) -> bool:
    return type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided
