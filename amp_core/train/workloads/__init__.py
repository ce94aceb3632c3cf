"""Workloads: a model, its batches in an order that depends on the seed alone, and its loss.

    >>> workload = build(TrainConfig(workload="text-gpt").resolved())
    >>> batches = iter(workload.batches)
    >>> loss = workload.loss_fn(workload.model, next(batches))

A built-in workload is a module here with a function `build(config)`. A user's workload is `FILE.py:FUNCTION`, see
`own`.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch

from amp_core.settings.training import TrainConfig


@dataclass
class Workload:
    """A model with its data and loss. All on the CPU and in FP32: the engine moves and casts."""

    model: torch.nn.Module
    batches: Iterable[Any]
    """Training batches, iterated again after their end. Any nesting of tensors in tuples, lists and dicts."""
    loss_fn: Callable[[torch.nn.Module, Any], torch.Tensor]
    """`loss_fn(model, batch)` returns the scalar mean loss of a batch."""
    held_out: Iterable[Any] = ()
    """Batches for the evaluation at the end, never trained on; empty for none."""
    accuracy_fn: Callable[[torch.nn.Module, Any], torch.Tensor] | None = None
    """`accuracy_fn(model, batch)` returns the share of correct predictions, 0 to 1."""
    samples: Callable[[Any], int] = field(default=lambda batch: samples_of(batch))
    """Number of samples in a batch."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """Description of the data: `name`, `sha256` and sizes, recorded with the run."""


def build(config: TrainConfig) -> Workload:
    """The workload that `config` names, with its model's initial weights drawn from `config.seed`."""
    torch.manual_seed(config.seed)
    if config.own is not None:
        from amp_core.train.workloads import own

        config.check_file()
        return own.load(*config.own)
    module = import_module(f"amp_core.train.workloads.{config.workload.replace('-', '_')}")
    workload: Workload = module.build(config)
    return workload


def samples_of(batch: Any) -> int:
    """Length of the first dimension of the first tensor in `batch`; 1 for a batch without one."""
    leaves = torch.utils._pytree.tree_leaves(batch)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.ndim > 0]
    return len(tensors[0]) if tensors else 1


class ShuffledBatches:
    """Endless batches over `count` samples, reshuffled each time all have been seen, in an order that depends on
    `seed`.

    The order is one stream of samples cut into batches. The batch size changes the cuts, never the order of
    samples: two micro-batches of 4 hold the samples of one batch of 8.
    """

    def __init__(
        self, count: int, batch_size: int, seed: int, collate: Callable[[torch.Tensor], tuple[torch.Tensor, ...]]
    ) -> None:
        self.count, self.batch_size, self.seed, self.collate = count, batch_size, seed, collate

    def __iter__(self) -> "_Stream":
        return _Stream(self)


class _Stream:
    def __init__(self, batches: ShuffledBatches) -> None:
        self._batches = batches
        self._generator = torch.Generator().manual_seed(batches.seed)
        self._order = torch.empty(0, dtype=torch.int64)

    def __iter__(self) -> "_Stream":
        return self

    def __next__(self) -> tuple[torch.Tensor, ...]:
        while len(self._order) < self._batches.batch_size:
            again = torch.randperm(self._batches.count, generator=self._generator)
            self._order = torch.cat([self._order, again])
        chosen, self._order = self._order[: self._batches.batch_size], self._order[self._batches.batch_size :]
        return self._batches.collate(chosen)
