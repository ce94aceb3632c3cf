"""Observer of FP32 weights that the loop replaces, between two steps, by values that were rounded to 16 bits.

    for master, p in zip(masters, model.parameters()):
        master.copy_(p)          # the wrong way round: what the step added to the master is rounded away

A weight is compared with what the last step made of it. If it was not exactly representable in a 16-bit dtype then,
and all of its elements are rounded to that dtype now, it was overwritten. Weights that are averaged, clipped, masked,
merged, or swapped and restored differ from that. Other values that are all exactly representable in 16 bits were stored
in them: those of an average, or of an earlier step.
"""

import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from amp_core.record.model.narrow_dtypes import NARROW
from amp_core.record.model.parameters import has_values, named_parameters, unwrapped
from amp_core.record.observer import Observer
from amp_core.record.stats.host_transfer import HostTransfer
from amp_core.record.stats.layout import dtype_name
from amp_core.record.torch_internals.captures import capturing
from amp_core.record.torch_internals.optimizer_steps import Handle, after_step, before_step
from amp_core.record.updates.comparison import is_master_of
from amp_core.record.updates.held import local, spaced
from amp_core.store.writer import RunWriter

MAX_ELEMENTS = 1024
"""Elements of a weight that are compared, evenly spaced."""
MIN_ELEMENTS = 16
"""Fewest elements that have to lose bits; of smaller tensors, half of the elements."""
MAX_TIME_FRAC = 0.002
MIN_STEPS = 16
"""Steps that are compared even if that takes more of the time."""
PROBE = "overwritten"
"""Key of a weight's values in the host transfer of a step."""
MIN_OTHER_ELEMENTS = 8
"""Elements by which other values than the weight's own show that they had 16 bits: each has them by chance with a
probability of 2^-13 (float16)."""
MIN_OTHER_STEPS = 3
"""Steps in which such values have to be copied: a checkpoint in 16 bits is loaded once."""
BATCH = 16
"""Comparisons whose numbers are copied to the host together."""


@dataclass
class _Weight:
    """One FP32 weight of an optimizer: its elements around a step."""

    place: int
    """Its number among the weights of the optimizer."""
    before: torch.Tensor | None
    """None on other devices than the CPU as long as nothing seems to write to weights between steps."""
    after: torch.Tensor | None = None
    """Likewise."""
    version: int = -1
    """That after the step; -1 before it."""
    address: int = 0


@dataclass(frozen=True)
class _Compared:
    step: int
    name: str
    numel: int


class Overwriting(Observer):
    """Compares one FP32 weight of each optimizer per step, in turn, with what the step before made of it.

    A loop may overwrite weights in each step, or after an evaluation now and then, so every step is compared as far as
    `MAX_TIME_FRAC` of the time allows. On a CPU a weight that is as before costs a few microseconds. Other devices have
    nothing to do for it until the version or address of a weight shows that it was written to between steps, or, for
    what is written through `.data`, some of its values at the beginning of a step are exactly representable in 16 bits.
    """

    def __init__(self, writer: RunWriter, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._writer = writer
        self._model = unwrapped(model)
        self._optimizers = optimizers
        self._handles: list[Handle] = []
        self._held: dict[int, _Weight] = {}
        self._narrow: set[int] = set()  # optimizers that update no FP32 weight, not even in their state
        self._masters: dict[tuple[int, int], str] = {}  # of narrow weights: the state that is their master
        self._compared: list[tuple[_Compared, torch.Tensor]] = []
        self._sent: list[tuple[list[_Compared], HostTransfer]] = []
        self._probes: list[HostTransfer] = []  # with values of a weight at the beginning of a step
        self._is_written = False  # whether the loop seems to write to weights between steps
        self._step = 0
        self._steps = self._hits = 0
        self._lost = self._mass = 0.0
        self._last = 0  # step of the last hit
        self._largest = _Compared(0, "", 0)  # of the weights that were hit, and to which dtype
        self._others: list[tuple[_Compared, str]] = []  # weights that got other 16-bit values, and their dtype
        self._dtype = ""
        self._written = 0
        self._began = time.perf_counter()
        self._spent_s = 0.0
        self._attach()

    def optimizer_found(self, index: int, optimizer: Any) -> None:
        self._detach()
        self._attach()
        self._narrow.discard(index)

    def step_began(self, step: int) -> None:
        self._step = step
        self.awake = not self._is_written and any(not p.is_cpu for o in self._optimizers for p in _first(o))

    def step_ended(self, step: int) -> None:
        """The step's numbers travel when the next one begins: a few values of a weight join them as they are then."""
        transfer, held = self.transfer(), next(iter(self._held.items()), None)
        weight = self._weight(held[0], self._optimizers[held[0]], held[1].place) if held is not None else None
        if transfer is not None and weight is not None and weight.is_contiguous() and not weight.is_cpu:
            transfer.put(PROBE, weight.reshape(-1)[:MIN_ELEMENTS])
            self._probes.append(transfer)

    def close(self) -> None:
        self._detach()
        self._send()
        self._read(wait=True)
        if self._hits > self._written:
            self._write()
        both = self._hits + len(self._others)
        # In each step: stochastic rounding by hand, which rounds a small weight as `to` does now and then.
        if len(self._others) > self._hits and MIN_OTHER_STEPS <= both < self._steps:
            last, dtype = self._others[-1]
            more: dict[str, Any] = {"dtype": dtype, "detail": "others", "count": both}
            name = max((c for c, _ in self._others), key=lambda c: c.numel).name
            self._writer.event("overwritten weights", name, step=last.step, limit=float(self._steps), **more)

    def _attach(self) -> None:
        for index, optimizer in enumerate(self._optimizers):
            before, after = (functools.partial(work, index) for work in (self._before, self._after))
            self._handles += [before_step(before, optimizer), after_step(after, optimizer)]

    def _detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._held = [], {}

    def _before(self, index: int, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Compare the weight that was held after the last step, and hold another."""
        begun = time.perf_counter()
        affordable = self._spent_s <= MAX_TIME_FRAC * (begun - self._began)
        held = self._held.pop(index, None)
        if capturing() or index in self._narrow or not (affordable or self._steps < MIN_STEPS):
            return
        with self.watching(), torch.no_grad():
            if held is not None and held.version >= 0:
                self._compare(index, held)
            place = held.place + 1 if held is not None else 0
            chosen = self._next(index, optimizer, place)
            if chosen is not None:
                place, weight = chosen
                known = weight.is_cpu or self._is_written
                self._held[index] = _Weight(place, _elements(weight).clone() if known else None)
            elif optimizer.state:
                self._narrow.add(index)
            if len(self._compared) >= BATCH:
                self._send()
            self._read(wait=False)
        self._spent_s += time.perf_counter() - begun

    def _after(self, index: int, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        held = self._held.get(index)
        if held is None or held.version >= 0 or capturing():
            return
        begun = time.perf_counter()
        with self.watching(), torch.no_grad():
            weight = self._weight(index, optimizer, held.place)
            if weight is not None and (held.before is None or _elements(weight).shape == held.before.shape):
                held.version, held.address = weight._version, weight.data_ptr()
                held.after = _elements(weight).clone() if held.before is not None else None
        self._spent_s += time.perf_counter() - begun

    def _compare(self, index: int, held: _Weight) -> None:
        weight, after = self._weight(index, self._optimizers[index], held.place), held.after
        if weight is None:
            return
        self._steps += 1
        if held.before is None or after is None:
            self._is_written |= weight._version != held.version or weight.data_ptr() != held.address
            return
        now = _elements(weight)
        if now.shape != after.shape or now.device != after.device or (now.is_cpu and torch.equal(now, after)):
            return
        compared = _Compared(self._step, self._name(index, held.place), weight.numel())
        self._compared.append((compared, _sums(held.before, after, now)))

    def _next(self, index: int, optimizer: torch.optim.Optimizer, place: int) -> tuple[int, torch.Tensor] | None:
        """The first FP32 weight of an optimizer from this place on, and its place; from the start after the last."""
        number = sum(len(group["params"]) for group in optimizer.param_groups)
        for i in range(number):
            weight = self._weight(index, optimizer, (place + i) % number)
            if weight is not None:
                return (place + i) % number, weight
        return None

    def _weight(self, index: int, optimizer: torch.optim.Optimizer, place: int) -> torch.Tensor | None:
        """What the optimizer updates in FP32: the parameter, or the master in its state. None for other parameters."""
        parameter = _parameter(optimizer, place)
        if parameter is None or not parameter.is_floating_point() or not has_values(parameter):
            return None
        weight: torch.Tensor | None = parameter
        if parameter.element_size() < 4:
            weight = self._master(index, optimizer, place, parameter)
        own = local(weight) if weight is not None else None
        return own if own is not None and own.dtype is torch.float32 and own.numel() else None

    def _master(
        self, index: int, optimizer: torch.optim.Optimizer, place: int, parameter: torch.Tensor
    ) -> torch.Tensor | None:
        state = optimizer.state.get(parameter, {})
        key = self._masters.get((index, place))
        if key is None and state:
            named = ((k, v) for k, v in state.items() if isinstance(v, torch.Tensor) and v.dtype is torch.float32)
            key = next((k for k, v in named if v.shape == parameter.shape and is_master_of(v, parameter)), "")
            self._masters[index, place] = key
        master = state.get(key) if key else None
        return master if isinstance(master, torch.Tensor) else None

    def _name(self, index: int, place: int) -> str:
        """The name of a weight; of a master that the model does not hold, that of the parameter in its place."""
        parameters = [p for group in self._optimizers[index].param_groups for p in group["params"]]
        named = list(named_parameters(self._model))
        name = next((n for n, p in named if p is parameters[place]), None)
        if name is None:
            trained = [(n, p) for n, p in named if p.requires_grad]
            alike = [p.shape for p in parameters] == [p.shape for _, p in trained]
            name = trained[place][0] if alike else f"parameter {place}"
        return name

    def _send(self) -> None:
        if self._compared:
            transfer = HostTransfer()
            device = self._compared[0][1].device
            transfer.put("sums", torch.stack([sums.to(device) for _, sums in self._compared]))
            transfer.send()
            self._sent.append(([compared for compared, _ in self._compared], transfer))
            self._compared = []

    def _read(self, *, wait: bool) -> None:
        while self._probes and self._probes[0].ready(wait):
            values = self._probes.pop(0).values(PROBE).astype(np.float32).view(np.uint32)
            informative = ((values & 0x7FFFFF) != 0).sum() * 2 >= MIN_ELEMENTS  # zeros and ones are exact anyway
            if informative and (((values & 0xFFFF) == 0).all() or ((values & 0x1FFF) == 0).all()):
                self._is_written = True  # the last bits of a bfloat16, or of a float16
        while self._sent and self._sent[0][1].ready(wait):
            weights, transfer = self._sent.pop(0)
            rows = transfer.values("sums").reshape(len(weights), -1).tolist()
            for compared, (mass, lost, *rounded) in zip(weights, rows, strict=True):
                own, others = rounded[: len(NARROW)], rounded[len(NARROW) :]
                dtype = next((d for d, hit in zip(NARROW, own, strict=True) if hit), None)
                exact = [d for d, hit in zip(NARROW, others, strict=True) if hit]
                if exact and dtype is None:  # float16 holds most of bfloat16's values
                    self._others.append((compared, dtype_name(max(exact, key=lambda d: torch.finfo(d).eps))))
                if dtype is not None:
                    self._hits += 1
                    self._mass, self._lost = self._mass + mass, self._lost + lost
                    self._last, self._dtype = compared.step, dtype_name(dtype)
                    self._largest = max(self._largest, compared, key=lambda c: c.numel)
            if self._hits >= 2 * self._written and self._hits > self._written:
                self._write()

    def _write(self) -> None:
        """What is known so far; the last of these events tells all. Nothing where other values are more frequent."""
        if self._hits <= len(self._others):
            return
        self._writer.event(
            "overwritten weights",
            self._largest.name,
            step=self._last,
            dtype=self._dtype,
            value=min(self._lost / self._mass, 1.0) if self._mass else None,
            count=self._hits,
            limit=float(self._steps),
        )
        self._written = self._hits


def _first(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"][:1]]


def _parameter(optimizer: torch.optim.Optimizer, place: int) -> torch.Tensor | None:
    for group in optimizer.param_groups:
        parameters: list[torch.Tensor] = group["params"]
        if place < len(parameters):
            return parameters[place]
        place -= len(parameters)
    return None


def _elements(weight: torch.Tensor) -> torch.Tensor:
    return spaced(weight, min(weight.numel(), MAX_ELEMENTS)).reshape(-1)


def _sums(before: torch.Tensor, after: torch.Tensor, now: torch.Tensor) -> torch.Tensor:
    """The size of the update, what of it is no longer there, for each 16-bit dtype whether all is rounded to it, and
    for each whether all are other values that are exactly representable in it."""
    enough = min(MIN_ELEMENTS, (after.numel() + 1) // 2)
    rounded = [after.to(dtype).to(after.dtype) for dtype in NARROW]
    own = [(now == r).all() & ((r != after).sum() >= enough) for r in rounded]
    informative = (now.view(torch.int32) & 0x7FFFFF != 0).sum() >= max(enough, MIN_OTHER_ELEMENTS)  # not zeros and ones
    others = [
        (now == now.to(dtype).to(now.dtype)).all() & informative & ((r != after).sum() >= enough) & (now != r).any()
        for dtype, r in zip(NARROW, rounded, strict=True)
    ]
    hits = [*own, *others]
    sums = [(after - before).abs().sum(), (now - after).abs().sum()]
    return torch.stack([*sums, *(hit.to(after.dtype) for hit in hits)])
