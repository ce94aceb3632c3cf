"""Observer of weight decay that the loop applies itself to 16-bit weights, outside of the optimizer's own.

    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1 - lr * decay)     # 1 in bfloat16 if lr * decay is below 2^-9

Between backward and the next forward, in steps of an optimizer of the program's own too, operators that write to
weights are repeated in float64: on the weights as they were, and on what the loop computed from them. A write is weight
decay if it multiplies all elements by one number below 1.
"""

import functools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from amp_core.record.model.narrow_dtypes import NARROW
from amp_core.record.model.parameters import has_values, in_backward, named_parameters, unwrapped
from amp_core.record.observer import Observer
from amp_core.record.stats.host_transfer import HostTransfer
from amp_core.record.stats.layout import dtype_name
from amp_core.record.torch_internals import patched_functions
from amp_core.record.torch_internals.captures import capturing
from amp_core.record.torch_internals.compiling import mode_would_uncompile, within_compiled
from amp_core.record.torch_internals.module_calls import before_call
from amp_core.record.torch_internals.optimizer_steps import after_step, before_step
from amp_core.record.torch_internals.quiet_mode import QuietMode
from amp_core.record.updates.held import local
from amp_core.record.updates.replay import is_own_code
from amp_core.store.writer import RunWriter

MAX_ELEMENTS = 2**18
"""Elements of all weights that are compared; small matrices first."""
MIN_TENSORS = 2
MAX_ELEMENTS_OF_ONE = 2**23
"""So many weights are compared even if they have more, but none that is larger than that."""
MAX_TIME_FRAC = 0.005
MIN_STEPS = 3
"""Steps that are inspected first, even if that takes more of the time."""
OPERATOR_S = 1e-5
"""What calling an operator takes longer under a mode."""
MAX_ERROR = 1e-3
"""Relative error with which a write has to multiply all elements by the same number, and tensors by that of others."""

_COPIES = frozenset({"_to_copy", "clone", "detach", "alias", "copy_", "_foreach_copy_"})
_BY_ELEMENT = frozenset(
    base + suffix
    for base in ("mul", "add", "sub", "rsub", "div", "neg", "lerp", "addcmul")
    for suffix in ("", "_")
    if (base, suffix) != ("rsub", "_")
)


@dataclass
class _Weight:
    """A 16-bit weight, and its values in float64 after the last operator that wrote to it."""

    name: str
    parameter: torch.Tensor
    storage: StorageWeakRef
    values: torch.Tensor


@dataclass
class _Decay:
    """What one write to a weight did: the sums of `_sums`."""

    weight: _Weight
    sums: torch.Tensor


class DecayByHand(Observer):
    """Inspects the first steps, and multiples of `every` as far as `MAX_TIME_FRAC` of the time allows."""

    def __init__(
        self, writer: RunWriter, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], every: int
    ) -> None:
        self._writer = writer
        self._model = unwrapped(model)
        self._optimizers = optimizers
        self._every = every
        self._handles: list[Any] = []
        self._mode: _Writes | None = None
        self._decays: list[_Decay] = []
        self._sent: list[tuple[int, list[_Weight], HostTransfer]] = []
        self._stepping = False  # within a step of torch's own optimizers
        self._step = self._inspected = 0
        self._began = time.perf_counter()
        self._spent_s = 0.0

    def step_began(self, step: int) -> None:
        self._finish()
        self._step = step
        affordable = self._spent_s <= MAX_TIME_FRAC * (time.perf_counter() - self._began)
        due = (step % self._every == 0 or step < MIN_STEPS) and (affordable or self._inspected < MIN_STEPS)
        if due and any(p.dtype in NARROW for o in self._optimizers for p in _parameters(o)):
            self._inspected += 1
            self._attach()
        self.awake = bool(self._handles or self._sent or self._mode)

    def called(self, what: str, optimizer: int | None) -> None:
        if what == "optimizer.step" and optimizer is not None and not is_own_code(self._optimizers[optimizer]):
            self._stop()

    def step_ended(self, step: int) -> None:
        self._write(wait=False)

    def close(self) -> None:
        self._finish()
        self._write(wait=True)

    def _attach(self) -> None:
        patched_functions.backward.listen_after(self._after_backward)
        self._handles.append(before_call(self._model, self._on_forward))
        for optimizer in self._optimizers:
            own = is_own_code(optimizer)
            self._handles += [
                before_step(functools.partial(self._before_step, own), optimizer),
                after_step(self._after_step, optimizer),
            ]

    def _finish(self) -> None:
        """The step is over: inspect no more, and start the copy of what was found."""
        if self._handles:
            patched_functions.backward.unlisten(self._after_backward)
            for handle in self._handles:
                handle.remove()
            self._handles, self._stepping = [], False
        self._stop()
        if self._decays:
            transfer = HostTransfer()
            device = self._decays[0].sums.device
            transfer.put("sums", torch.stack([decay.sums.to(device) for decay in self._decays]))
            transfer.send()
            self._sent.append((self._step, [decay.weight for decay in self._decays], transfer))
            self._decays = []

    def _on_forward(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        self._stop()

    def _after_backward(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if not (self._stepping or self.at_own_work() or in_backward()):
            self._start()

    def _before_step(self, own: bool, optimizer: Any, args: Any, kwargs: Any) -> None:
        if own:
            self._start()
        else:
            self._stepping = True
            self._stop()

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._stepping = False
        self._start()

    def _start(self) -> None:
        if self._mode is not None and self._mode.paused:
            self._stop()
        # A mode of the program's own might end before this one does.
        apart = within_compiled() or mode_would_uncompile() or _get_current_dispatch_mode_stack() or capturing()
        if self._mode is not None or apart:
            return
        begun = time.perf_counter()
        with self.watching(), torch.no_grad():
            weights = list(_held(self._model, self._optimizers))
            if weights:
                self._mode = _Writes(weights, self.at_own_work)
                self._mode.__enter__()  # type: ignore[no-untyped-call]
        self._spent_s += time.perf_counter() - begun

    def _stop(self) -> None:
        """Leave the mode if that is safe now; otherwise at the next opportunity."""
        if self._mode is None:
            return
        self._mode.paused = True
        if self._mode.leave():
            mode, self._mode = self._mode, None
            with self.watching(), torch.no_grad():
                mode.end()
                self._decays += mode.decays
            self._spent_s += mode.spent_s

    def _write(self, *, wait: bool) -> None:
        """One event for each step with weight decay of 16-bit weights: the factor that most weights have in common."""
        while self._sent and self._sent[0][2].ready(wait):
            step, weights, transfer = self._sent.pop(0)
            rows = transfer.values("sums").reshape(len(weights), -1).tolist()
            decays = [(w, rate, lost) for w, row in zip(weights, rows, strict=True) for rate, lost in _decay(*row)]
            groups = [[d for d in decays if math.isclose(d[1], rate, rel_tol=MAX_ERROR)] for _, rate, _ in decays]
            if not groups:
                continue
            most = max(groups, key=lambda group: len({weight.name for weight, *_ in group}))
            sizes = [weight.values.numel() for weight, *_ in most]
            largest, rate, _ = most[max(range(len(most)), key=sizes.__getitem__)]
            self._writer.event(
                "decay by hand",
                largest.name,
                step=step,
                dtype=dtype_name(largest.parameter.dtype),
                value=sum(lost * size for (*_, lost), size in zip(most, sizes, strict=True)) / sum(sizes),
                limit=rate,
                count=len({weight.name for weight, *_ in most}),
            )


class _Writes(QuietMode):
    """Repeats operators on the weights in float64, and on tensors that were computed from them by element."""

    def __init__(self, weights: Sequence[_Weight], at_own_work: Any) -> None:
        super().__init__()
        self._at_own_work = at_own_work
        self._weights = {weight.storage.cdata: weight for weight in weights}
        self._exact: dict[int, tuple[StorageWeakRef, torch.Tensor]] = {}  # of other tensors, by storage
        self.decays: list[_Decay] = []
        self.paused = False
        self.spent_s = 0.0

    def on_op(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        self.spent_s += OPERATOR_S
        if self.paused or self._at_own_work() or not any(self._is_known(t) for t in _tensors(args)):
            return
        begun = time.perf_counter()
        name = func.overloadpacket.__name__
        with torch.no_grad():
            if name.startswith("_foreach_"):
                for i in range(len(args[0])):
                    one = [[a[i]] if isinstance(a, list | tuple) and len(a) == len(args[0]) else a for a in args]
                    made = out[i] if isinstance(out, list | tuple) else None
                    self._follow(func, name.removeprefix("_foreach_"), one, kwargs, made)
            else:
                self._follow(func, name, args, kwargs, out)
        self.spent_s += time.perf_counter() - begun

    def end(self) -> None:
        """Compare weights that the loop gave new memory: `p.data = p.data * (1 - lr * decay)`."""
        for weight in self._weights.values():
            if _storage(weight.parameter).cdata != weight.storage.cdata:
                exact = self._value(weight.parameter)
                if exact is not None:
                    self._wrote(weight, exact, weight.parameter)

    def _follow(self, func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        """One operator, or what an operator on lists did to one entry of each."""
        given = list(_tensors(args))
        writes = func._schema.is_mutable
        target = given[0] if writes and given else out
        if not isinstance(target, torch.Tensor) or not any(map(self._is_known, given)):
            return
        exact = self._repeated(func, name, args, kwargs, given)
        exact = exact if exact is not None and exact.shape == local(target).shape else None
        weight = self._weights.get(_storage(target).cdata)
        if writes and weight is not None:
            self._wrote(weight, exact, target)
        elif not (writes and name == "copy_"):  # a copy of a weight elsewhere is a weight of its own
            storage = _storage(target)
            self._exact.pop(storage.cdata, None)
            if exact is not None and weight is None and local(target).is_contiguous():
                self._exact[storage.cdata] = storage, exact

    def _repeated(
        self, func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], given: Sequence[torch.Tensor]
    ) -> torch.Tensor | None:
        """The result in float64, from exact inputs; None where that is not known."""
        if name in _COPIES:
            return self._value(given[-1])
        if name not in _BY_ELEMENT or not all(self._is_plain(t) for t in given):
            return None
        wide = [_mapped(a, self._wide) for a in args]
        settings = {k: v for k, v in kwargs.items() if k in ("alpha", "value", "weight")}
        result = func(*wide, **settings)
        result = wide[0] if result is None else result
        result = result[0] if isinstance(result, list | tuple) else result
        return result if isinstance(result, torch.Tensor) else None

    def _wide(self, tensor: torch.Tensor) -> torch.Tensor:
        value = self._value(tensor)
        if value is not None:
            return value.clone()
        own = local(tensor)
        return own.to(torch.float64, copy=True) if own.is_floating_point() else own

    def _value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The exact value of a weight, or of a tensor that was computed from one; None for others, and for parts."""
        key = _storage(tensor).cdata
        weight = self._weights.get(key)
        value = weight.values if weight is not None else self._exact[key][1] if key in self._exact else None
        return value if value is not None and value.shape == local(tensor).shape else None

    def _is_known(self, tensor: torch.Tensor) -> bool:
        if not self._is_plain(tensor):
            return False
        key = _storage(tensor).cdata
        return key in self._weights or key in self._exact

    @staticmethod
    def _is_plain(tensor: torch.Tensor) -> bool:
        plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) or hasattr(tensor, "to_local")
        return plain and tensor.layout is torch.strided and not tensor.is_meta

    def _wrote(self, weight: _Weight, exact: torch.Tensor | None, target: torch.Tensor) -> None:
        now = local(target) if local(target).shape == weight.values.shape else local(weight.parameter)
        after = now.to(torch.float64, copy=True)
        if exact is not None and after.shape == exact.shape:
            self.decays.append(_Decay(weight, _sums(weight.values, exact, after)))
        weight.values = after


def _held(model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[_Weight]:
    """16-bit weights of the optimizers as they are now: small matrices first, other tensors after them."""
    names = {id(p): n for n, p in named_parameters(model)}
    given = {id(p): p for o in optimizers for p in _parameters(o) if p.dtype in NARROW and has_values(p)}
    plain = [p for p in given.values() if local(p).numel() and local(p).is_contiguous()]
    taken = elements = 0
    for p in sorted(plain, key=lambda p: (p.dim() < 2, local(p).numel())):
        size = local(p).numel()
        if size <= MAX_ELEMENTS_OF_ONE and (taken < MIN_TENSORS or elements + size <= MAX_ELEMENTS):
            taken, elements = taken + 1, elements + size
            yield _Weight(names.get(id(p), "parameter"), p, _storage(p), local(p).to(torch.float64))


def _sums(before: torch.Tensor, exact: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """Of a write: its mass, by what share it shrinks, the mass of what else it does, and what was made of it."""
    update = exact - before
    mass = update.abs().sum()
    rate = -(update * before).sum() / before.square().sum()
    return torch.stack([mass, rate, (update + rate * before).abs().sum(), ((after - before) * update.sign()).sum()])


def _decay(mass: float, rate: float, rest: float, made: float) -> Iterator[tuple[float, float]]:
    """Its rate and the share of it that was lost, if a write with these sums is weight decay."""
    if 0 < rate < 1 and 0 < mass < math.inf and rest <= MAX_ERROR * mass:
        yield rate, min(max(1 - made / mass, 0.0), 1.0)


def _storage(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(local(tensor).untyped_storage())


def _tensors(args: Sequence[Any]) -> Iterator[torch.Tensor]:
    for arg in args:
        for value in arg if isinstance(arg, list | tuple) else (arg,):
            if isinstance(value, torch.Tensor):
                yield value


def _mapped(arg: Any, change: Any) -> Any:
    if isinstance(arg, list | tuple):
        return [_mapped(value, change) for value in arg]
    return change(arg) if isinstance(arg, torch.Tensor) else arg


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    return (p for group in optimizer.param_groups for p in group["params"])
