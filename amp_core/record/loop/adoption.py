"""Optimizers that `watch` was not given and that step parameters of the watched model: which of them become the run's.

    adoption = Adoption(model, optimizers)
    adoption.given_stepped(optimizers[0], backwards=7)      # an optimizer of the run has stepped
    adoption.wanted(other, backwards=8, stepping=True)      # another is about to: whether the run adopts it

A loop may build a new optimizer in mid-run: each stage or epoch, after unfreezing. One is adopted where

- it holds parameters of the model, or of an optimizer that `watch` was given (FP32 master weights are not the model's),
- no optimizer of the run has stepped since the last backward, and
- it is new: it holds all parameters of an optimizer of the run; or some of them, and first stepped after the run's had;
  or none, and first stepped after the run's had stepped `NEW_AFTER_STEPS` times. One that is not new, because it
  stepped beside the run's optimizers from the start, is adopted once those no longer step: for `MIN_STEPS_ALONE` of its
  steps, and for more than twice as many as ever came between two of theirs.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch

NEW_AFTER_STEPS = 2
"""Steps of the run's optimizers after which one that shares no parameter with them counts as new."""
MIN_STEPS_ALONE = 5
"""Consecutive steps, without a step of the run's optimizers, after which one that is not new is adopted."""


@dataclass
class _Seen:
    """State of an optimizer that is not the run's."""

    first: int
    """Steps that the run's optimizers had made when it was first seen."""
    last: int
    """The same when it was seen last."""
    row: int = 0
    """Its steps since then."""
    beside: bool = False
    """Whether the optimizer that it replaced stepped again soon after."""
    size: int = -1
    """Number of parameters that it held when `owned` was determined."""
    owned: bool = False


class Adoption:
    """Decides which optimizers one run adopts. `optimizers` is its list of optimizers, which the owner changes in
    place."""

    def __init__(self, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._model = model
        self._optimizers = optimizers
        self._original = weakref.WeakSet(optimizers)
        self._masters = {id(p) for o in optimizers for p in _parameters(o)}
        self._seen: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Seen] = weakref.WeakKeyDictionary()
        self._adopted: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        self._steps = 0
        self._backwards = -1
        self._longest_row = 0

    def given_stepped(self, optimizer: torch.optim.Optimizer, backwards: int) -> None:
        """An optimizer of the run has stepped, after that number of backward passes."""
        self._steps += 1
        self._backwards = backwards
        if optimizer in self._adopted:
            self._adopted[optimizer] += 1

    def wanted(self, optimizer: torch.optim.Optimizer, backwards: int, *, stepping: bool) -> bool:
        """Whether `optimizer`, which is not the run's, becomes so. `stepping`: it is about to step, else to unscale."""
        seen = self._seen.setdefault(optimizer, _Seen(self._steps, self._steps))
        size = sum(len(group["params"]) for group in optimizer.param_groups)
        if seen.size != size:
            seen.size, seen.owned = size, self._owns(optimizer)
        if not seen.owned:
            return False
        if seen.last != self._steps:
            self._longest_row = max(self._longest_row, seen.row)
            seen.last, seen.row = self._steps, 0
        seen.row += stepping
        if optimizer in self._original:
            self._mark_beside(optimizer)
            return True
        if self._backwards == backwards:
            seen.beside = seen.beside or stepping
            return False
        if seen.row > max(MIN_STEPS_ALONE, 2 * self._longest_row):
            return True
        return not seen.beside and seen.first >= self._needed(optimizer)

    def adopted(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer is among the run's now."""
        self._adopted[optimizer] = 0

    def place(self, optimizer: torch.optim.Optimizer) -> int:
        """The index of the first of the run's optimizers that shares a parameter with it; else one past the last."""
        shared = (i for i, other in enumerate(self._optimizers) if share(optimizer, other))
        return next(shared, len(self._optimizers))

    def _owns(self, optimizer: torch.optim.Optimizer) -> bool:
        ours = self._masters | {id(p) for p in self._model.parameters()}
        return not ours.isdisjoint(map(id, _parameters(optimizer)))

    def _needed(self, optimizer: torch.optim.Optimizer) -> int:
        """Number of steps of the run's optimizers before its first own step from which on it counts as new."""
        held = set(map(id, _parameters(optimizer)))
        shares = [(held & theirs, theirs) for o in self._optimizers if (theirs := set(map(id, _parameters(o))))]
        if any(shared == theirs for shared, theirs in shares):
            return 0
        return 1 if any(shared for shared, _ in shares) else NEW_AFTER_STEPS

    def _mark_beside(self, original: torch.optim.Optimizer) -> None:
        """An optimizer that `watch` was given steps again: one that stepped in its place only briefly does not replace
        it."""
        for other, steps in self._adopted.items():
            if steps < MIN_STEPS_ALONE and other in self._seen and share(original, other):
                self._seen[other].beside = True


def share(one: torch.optim.Optimizer, other: torch.optim.Optimizer) -> bool:
    """Whether two optimizers hold a parameter in common."""
    return not set(map(id, _parameters(one))).isdisjoint(map(id, _parameters(other)))


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]
