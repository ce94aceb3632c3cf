"""Observer of FP32 masters beside a model that the loop steps and never copies back to the model's weights.

    masters = [p.detach().float() for p in model.parameters()]
    optimizer.step()                                  # on the masters
                                                      # and no `p.copy_(master)` after it

A weight and its master began alike. Later the weight is still what it was, bit for bit, backward gave it gradients, and
the master, rounded to the weight's dtype, is something else. Frozen weights, a learning rate of 0, skipped steps and
updates below half a unit in the last place leave the rounded master as it was.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from amp_core.record.model.own import without_torch_function
from amp_core.record.model.parameters import has_values, named_parameters, unwrapped
from amp_core.record.observer import Observer
from amp_core.record.stats.host_transfer import HostTransfer
from amp_core.record.stats.layout import dtype_name
from amp_core.record.torch_internals import patched_functions
from amp_core.record.torch_internals.captures import capturing
from amp_core.record.updates.held import spaced
from amp_core.store.writer import RunWriter

MAX_TENSORS = 64
"""Weights that are compared, the largest ones."""
MAX_ELEMENTS = 256
"""Elements of a weight that are compared, evenly spaced."""
CHECK_STEPS = 16
"""Steps until the first comparison; the others follow whenever as many have been made again. A loop may copy its
masters back now and then only."""
MIN_STEPS = 8
"""Steps of a shorter run that is compared at its end."""
MIN_APART_FRAC = 0.05
"""Share of the elements whose rounded masters differ from the weights."""


@dataclass
class _Pair:
    """A weight of the model and its master: `numel` elements of a tensor of the optimizer, from `start` on."""

    name: str
    weight: torch.Tensor
    master: torch.Tensor
    start: int
    before: torch.Tensor
    """Elements of the weight at the start."""
    alike: torch.Tensor
    """Whether they were those of the master, on the device."""
    reached: int = -1
    """The last step in which backward gave the weight a gradient."""

    grad: Callable[[], torch.Tensor | None] = lambda: None
    """A reference to that gradient."""
    version: int = -1

    def is_new(self, grad: torch.Tensor) -> bool:
        """Whether the gradient is another than before, or was added to: one of a model that is no longer used stays."""
        new = self.grad() is not grad or self.version != grad._version
        self.grad, self.version = weakref.ref(grad), grad._version
        return new

    def master_now(self) -> torch.Tensor:
        """The same elements of the master, rounded to the weight's dtype."""
        own = self.master.detach().reshape(-1)[self.start : self.start + self.weight.numel()]
        return _elements(own).to(self.before.device, self.before.dtype)


class UncopiedMasters(Observer):
    """Does nothing in a run whose optimizers hold the model's weights, nor once all weights have changed."""

    def __init__(self, writer: RunWriter, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._writer = writer
        self._model = unwrapped(model)
        self._optimizers = optimizers
        self._pairs: list[_Pair] = []
        self._sent: list[tuple[int, list[_Pair], HostTransfer]] = []
        self._first: int | None = None  # the step at which the weights were held
        self._next = 0  # the step of the next comparison
        self._step = 0
        self._written = False

    def optimizer_found(self, index: int, optimizer: Any) -> None:
        self._forget(self._pairs)
        self._first = None

    def step_began(self, step: int) -> None:
        self._step = step
        if self._first is None:
            self._first, self._next = step, step + CHECK_STEPS
            with torch.no_grad(), without_torch_function():
                self._pairs = _pairs(self._model, self._optimizers)
            if self._pairs:
                patched_functions.backward.listen_after(self._after_backward)
        elif self._pairs and step >= self._next and not capturing():
            self._next = step + (step - self._first)
            self._compare()
        if self._sent:
            self._read(wait=False)

    def close(self) -> None:
        if self._first is not None and self._step >= self._first + MIN_STEPS - 1:
            self._compare()
        self._read(wait=True)
        self._forget(self._pairs)

    def _forget(self, gone: Sequence[_Pair]) -> None:
        """Compare these no more; without others, detach from backward."""
        listening = bool(self._pairs)
        self._pairs = [pair for pair in self._pairs if not any(pair is other for other in gone)]
        if listening and not self._pairs:
            patched_functions.backward.unlisten(self._after_backward)

    def _after_backward(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if not self.at_own_work():
            for pair in self._pairs:
                if (grad := pair.weight.grad) is not None and pair.is_new(grad):
                    pair.reached = self._step

    def _compare(self) -> None:
        # A loop may have made another model, or another weight in the place of this one.
        held = {id(p) for _, p in named_parameters(self._model)}
        pairs = [pair for pair in self._pairs if pair.reached >= self._step - 1 and id(pair.weight) in held]
        if not pairs:
            return
        with torch.no_grad(), without_torch_function():
            shares = [_shares(pair) for pair in pairs]
        transfer = HostTransfer()
        transfer.put("shares", torch.stack([share.to(shares[0].device) for share in shares]))
        transfer.send()
        self._sent.append((self._step, pairs, transfer))

    def _read(self, *, wait: bool) -> None:
        while self._sent and self._sent[0][2].ready(wait):
            step, pairs, transfer = self._sent.pop(0)
            rows = list(zip(pairs, transfer.values("shares").reshape(len(pairs), -1).tolist(), strict=True))
            apart = [(pair, share) for pair, (unchanged, share) in rows if unchanged and share >= MIN_APART_FRAC]
            if apart or self._written:  # what was written is taken back where the weights have changed meanwhile
                self._write(step, apart, len(pairs))
            self._forget([pair for pair, (unchanged, _) in rows if not unchanged])

    def _write(self, step: int, apart: Sequence[tuple[_Pair, float]], compared: int) -> None:
        """What is known so far; the last of these events tells all."""
        self._written = True
        largest = max(apart, key=lambda item: item[0].weight.numel(), default=None)
        name, dtype = (largest[0].name, dtype_name(largest[0].weight.dtype)) if largest is not None else ("", "")
        share = float(largest[1]) if largest is not None else 0.0
        more: dict[str, Any] = {"count": len(apart), "limit": float(compared), "value": share, "dtype": dtype}
        self._writer.event("uncopied masters", name, step=step, **more)


def _elements(values: torch.Tensor) -> torch.Tensor:
    return spaced(values.detach().reshape(-1), min(values.numel(), MAX_ELEMENTS))


def _shares(pair: _Pair) -> torch.Tensor:
    """Whether weight and master began alike and the weight is as it was, and for which share of the elements the
    rounded master differs from it."""
    now = _elements(pair.weight)
    unchanged = pair.alike & (now == pair.before).all()
    return torch.stack([unchanged.to(torch.float64), (pair.master_now() != now).to(torch.float64).mean()])


def _pairs(model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> list[_Pair]:
    """Weights that no optimizer holds, with the tensors of optimizers that may be their masters: of the same shape, in
    order, or all of them in one flat tensor."""
    named = [(n, p) for n, p in named_parameters(model) if p.requires_grad and _is_plain(p)]
    given = [p for o in optimizers for group in o.param_groups for p in group["params"]]
    held, weights = {id(p) for p in given}, {id(p) for _, p in named}
    masters = [q for q in given if id(q) not in weights and _is_plain(q) and q.dtype is torch.float32]
    free = [(n, p) for n, p in named if id(p) not in held]
    if not masters or not free:
        return []
    matched = list(_matched(free, masters))
    matched = sorted(matched, key=lambda item: -item[1].numel())[:MAX_TENSORS]
    return [_pair(*item) for item in matched]


def _matched(
    free: Sequence[tuple[str, torch.Tensor]], masters: Sequence[torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor, int]]:
    if len(masters) == 1 and masters[0].numel() == sum(p.numel() for _, p in free):
        start = 0
        for name, p in free:
            yield name, p, masters[0], start
            start += p.numel()
        return
    waiting = list(masters)
    for name, p in free:
        place = next((i for i, q in enumerate(waiting) if q.shape == p.shape), None)
        if place is not None:
            yield name, p, waiting.pop(place), 0


def _pair(name: str, weight: torch.Tensor, master: torch.Tensor, start: int) -> _Pair:
    before = _elements(weight).clone()
    pair = _Pair(name, weight, master, start, before, before)
    pair.alike = (pair.master_now() == before).all()
    return pair


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether this process holds all values of a tensor."""
    return tensor.is_floating_point() and has_values(tensor) and not hasattr(tensor, "to_local") and tensor.numel() > 0
