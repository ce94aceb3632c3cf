"""Observer that fills the table `updates`: which updates of weights, and how much weight decay, are lost to rounding.

Before a step of the optimizer it copies weights, gradients and state; after it, it repeats the step on the copies in
float64 and compares. Where the step is code of the program's own, it only counts elements that do not change. Where a
closure computes the gradients within the step, it copies after the closure's first call.
The host never waits for the device: sums are copied asynchronously.
"""

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from amp_core.record.model.own import without_torch_function
from amp_core.record.model.parameters import named_parameters, unwrapped
from amp_core.record.observer import Observer
from amp_core.record.torch_internals.optimizer_steps import Handle, after_step, before_step
from amp_core.record.updates.comparison import Comparison
from amp_core.record.updates.held import Part, local, part_of, parts_of
from amp_core.record.updates.replay import Replay, ReplayError, is_own_code
from amp_core.record.updates.standing import Standing, may_stand
from amp_core.store.writer import RunWriter
from amp_core.text.errors import in_one_line

MAX_ELEMENTS = 2**22
"""Elements that are compared per step. Models of up to that many are compared whole; of larger ones every tensor has
the same number of elements taken, of which a share is known within 0.5 / sqrt(number), one standard deviation."""
MAX_ELEMENTS_UNASKED = 2**20
"""The same if `updates=True` was not given to `watch`: a tenth of a second of one processor."""
MAX_ELEMENTS_AT_FIRST = 2**16
"""The same in the first `MIN_STEPS`, which are compared before it is known what share of the time that takes."""
MAX_WHOLE = 2**18
"""Largest number of elements of an optimizer that is compared completely even then."""
MAX_ELEMENTS_AT_ONCE = 2**18
"""Elements whose float64 copies exist at the same time. Larger tensors are compared by themselves."""
MAX_TIME_FRAC = 0.01
"""Share of the time of training that the ledger takes unless all weights are requested."""
MIN_STEPS = 3
"""Steps that are compared even if that takes more, with fewer elements."""


class UpdateLedger(Observer):
    """Compares updates with the same step in float64, on steps that are multiples of `every`.

    Without `all_weights` only weights of less than 32 bits are compared, and not while that has taken more than
    `MAX_TIME_FRAC` of the time so far. Sums are copied asynchronously: the host never waits for the device.
    """

    def __init__(
        self,
        writer: RunWriter,
        model: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        every: int,
        *,
        all_weights: bool,
    ) -> None:
        self._writer = writer
        self._model = unwrapped(model)
        self._optimizers = optimizers
        self._every = every
        self._all_weights = all_weights
        self._names: dict[int, str] = {}
        self._handles: list[Handle] = []
        self._replays: dict[int, Replay] = {}
        self._before: dict[int, list[Part]] = {}
        self._observed: dict[int, list[Part]] = {}  # of optimizers whose steps are not repeated
        self._sent: list[Comparison | Standing] = []
        self._refused: set[str] = set()  # optimizers' classes, and tensors
        self._stopped: set[str] = set()  # optimizers' classes that are not observed any more
        self._unasked: set[str] = set()  # optimizers' classes whose code is not run
        self._step = 0
        self._position = 0
        self._compared = 0  # steps so far
        self._began = time.perf_counter()
        self._spent_s = 0.0

    def optimizer_found(self, index: int, optimizer: Any) -> None:
        self._replays.pop(index, None)
        if self._handles:
            self._detach()
            self._attach()

    def step_began(self, step: int) -> None:
        self._detach()  # not at the end of the step, which may be notified before the hooks after the optimizer's step
        self._step = step
        begun = time.perf_counter()
        affordable = self._spent_s <= MAX_TIME_FRAC * (begun - self._began)
        if step % self._every == 0 and (self._all_weights or affordable or self._compared < MIN_STEPS):
            self._attach()
            self._spent_s += time.perf_counter() - begun
        self.awake = bool(self._handles or self._sent)

    def _most_elements(self, optimizer: torch.optim.Optimizer) -> int:
        """How many elements to compare in the present step."""
        if self._all_weights:
            return MAX_ELEMENTS
        if self._compared >= MIN_STEPS or sum(local(p).numel() for p in _parameters(optimizer)) <= MAX_WHOLE:
            return MAX_ELEMENTS_UNASKED
        return MAX_ELEMENTS_AT_FIRST

    def called(self, what: str, optimizer: int | None) -> None:
        if what == "optimizer.step" and optimizer is not None and self._handles:
            self._call(self._hold, optimizer, self._optimizers[optimizer])

    def closure_repeated(self, optimizer: int) -> None:
        if self._before.pop(optimizer, None) is not None:
            self._refuse(self._optimizers[optimizer], "calls its closure more than once")

    def step_ended(self, step: int) -> None:
        self._write(wait=False)

    def close(self) -> None:
        self._detach()
        self._write(wait=True)

    def _attach(self) -> None:
        if not (self._all_weights or any(_is_narrow(p) for o in self._optimizers for p in _parameters(o))):
            return
        self._names = {id(p): n for n, p in named_parameters(self._model)}
        for index, optimizer in enumerate(self._optimizers):
            if type(optimizer).__name__ not in self._stopped:
                self._handles += [
                    before_step(functools.partial(self._call, self._before_step, index), optimizer),
                    after_step(functools.partial(self._call, self._after_step, index), optimizer),
                ]

    def _detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._before, self._observed = [], {}, {}

    def _call(self, work: Callable[..., None], index: int, optimizer: Any, args: Any = (), kwargs: Any = None) -> None:
        if type(optimizer).__name__ in self._stopped:
            return
        begun = time.perf_counter()
        try:
            with torch.no_grad(), without_torch_function():
                work(index, *args, **(kwargs or {}))
        except ReplayError as error:
            self._refuse(optimizer, str(error))
        except Exception as error:
            self._detach()
            self._stopped.add(type(optimizer).__name__)
            self._refuse(optimizer, f"stopped with {in_one_line(error)}")
        self._spent_s += time.perf_counter() - begun

    def _refuse(self, optimizer: torch.optim.Optimizer, why: str, tensor: str = "") -> None:
        """Say once that the updates of an optimizer, or of one of its tensors, are not compared."""
        kind = type(optimizer).__name__
        if {kind, f"{kind} {tensor}"}.isdisjoint(self._refused):
            self._refused.add(f"{kind} {tensor}" if tensor else kind)
            detail = f"updates: the step of {kind} {why}"
            self._writer.event("warning", name="not recorded", detail=detail, step=self._step)

    def _report_unasked(self, optimizer: torch.optim.Optimizer) -> None:
        """Repeating the step of the program's own optimizer runs its code, which the user has to request."""
        kind = type(optimizer).__name__
        if kind not in self._unasked:
            self._unasked.add(kind)
            detail = f"those of {kind} are compared with watch(…, updates=True), which runs its step on copies"
            self._writer.event("phase change", name="updates", detail=detail, step=self._step)

    def _before_step(self, index: int, *given: Any, **named: Any) -> None:
        """For a step that `called` did not report, because a proxy of its optimizer was given to the scaler."""
        if index not in self._before and index not in self._observed and not _has_closure(given, named):
            self._hold(index)

    def _hold(self, index: int) -> None:
        """Copy what the coming step of an optimizer starts from: it is about to begin, or its closure has returned."""
        self._before.pop(index, None)
        optimizer = self._optimizers[index]
        most = self._most_elements(optimizer)
        refused = type(optimizer).__name__ in self._refused
        parts = list(parts_of(optimizer, self._names, most, narrow_only=refused or not self._all_weights))
        if refused or (parts and not self._all_weights and is_own_code(optimizer)):
            if not refused:
                self._report_unasked(optimizer)
            if self._compared:  # before its first step an optimizer has no state that shows a cure
                self._observed[index] = [part for part in parts if may_stand(part, optimizer)]
            return
        replay = self._replays.setdefault(index, Replay(optimizer))
        apart = [part for part in parts if part.whole or replay.treats_elements_alone(part)]
        together = [part for part in parts if not any(part is other for other in apart)]
        self._before[index] = apart + list(self._by_turns(optimizer, together, most))

    def _by_turns(self, optimizer: torch.optim.Optimizer, parts: list[Part], most: int) -> Iterator[Part]:
        """Of tensors whose elements move together, whole ones, at least one and as many as a step may compare; others
        the next time."""
        left = most
        largest = MAX_ELEMENTS if self._all_weights else MAX_ELEMENTS_UNASKED
        for _ in range(len(parts)):
            part = parts[self._position % len(parts)]
            numel = part.parameter.numel()
            if local(part.parameter).numel() < numel or numel > largest:
                why = f"cannot be repeated for {part.name}: its {numel:,} elements move together and are "
                why += "too many to copy" if numel > largest else "sharded over processes"
                self._refuse(optimizer, why, part.name)
            elif numel > left and left < most:
                return
            else:
                left -= numel
                yield part_of(optimizer, part.name, part.parameter, part.group, numel)
            self._position += 1

    def _after_step(self, index: int, *given: Any, **named: Any) -> None:
        optimizer = self._optimizers[index]
        held = self._before.pop(index, [])
        written = any(part.version != part.parameter._version for part in held)  # of torch's own, fused ones hide it
        if held and not written and _has_closure(given, named) and is_own_code(optimizer):
            raise ReplayError("writes no weight after its closure, or writes to `.data`")
        found_inf = getattr(optimizer, "found_inf", None)  # a fused optimizer's: it leaves the step out itself
        if observed := self._observed.pop(index, []):
            self._sent.append(Standing(self._step, index, observed))
        for parts in _batches(held):
            compared = Comparison(self._step, index, optimizer, parts)
            compared.send(self._replays[index], found_inf)
            self._sent.append(compared)
        self._compared += index == 0

    def _write(self, *, wait: bool) -> None:
        begun = time.perf_counter()
        rows: list[dict[str, Any]] = []
        while self._sent and self._sent[0].transfer.ready(wait):
            compared = self._sent.pop(0)
            if isinstance(compared, Standing):
                compared.write(self._writer)
                continue
            try:
                rows += compared.rows()
            except ReplayError as error:
                self._refuse(self._optimizers[compared.optimizer], str(error))
        if rows:
            self._writer.append("updates", {key: [row[key] for row in rows] for key in rows[0]})
        self._spent_s += time.perf_counter() - begun


def _has_closure(given: Sequence[Any], named: dict[str, Any]) -> bool:
    """Whether the arguments of a step, the optimizer first, hold a closure."""
    return any(callable(value) for value in (*given[1:], *named.values()))


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    return (p for group in optimizer.param_groups for p in group["params"])


def _is_narrow(parameter: torch.Tensor) -> bool:
    return parameter.element_size() < 4


def _batches(parts: list[Part]) -> Iterator[list[Part]]:
    """Parts that can be compared together: of one device, dtype and kind of state, and not too many elements."""
    alike: dict[Any, list[list[Part]]] = {}
    for part in parts:
        batches = alike.setdefault((part.weight.device, part.weight.dtype, part.group, tuple(part.state)), [[]])
        if batches[-1] and sum(p.taken for p in batches[-1]) + part.taken > MAX_ELEMENTS_AT_ONCE:
            batches.append([])
        batches[-1].append(part)
    yield from (batch for batches in alike.values() for batch in batches)
