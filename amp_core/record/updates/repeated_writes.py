"""A mode that repeats in float64 what a program does by hand to its 16-bit weights and gradients.

    with Writes(tensors, at_own_work) as mode:
        p.mul_(1 - lr * decay)
    mode.end()
    mode.writes                  # what each write should have changed, and what it did

Operators are repeated on the tensors as they were, and on what the program computed from them by element. Of other
16-bit tensors, those are noted that are multiplied by a number so close to 1 that none of their elements changes, and
those that something is added to.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from amp_core.record.model.narrow_dtypes import NARROW
from amp_core.record.torch_internals.quiet_mode import QuietMode
from amp_core.record.updates.held import local

OPERATOR_S = 1e-5
"""What calling an operator takes longer under a mode."""
MIN_ELEMENTS = 16
"""Elements of a tensor whose multiplication is noted."""

_COPIES = frozenset({"_to_copy", "clone", "detach", "alias", "copy_", "_foreach_copy_"})
_ADDITIONS = frozenset({"add_", "_foreach_add_", "index_add_", "scatter_add_", "addcmul_", "addcdiv_"})
_BY_ELEMENT = frozenset(
    base + suffix
    for base in ("mul", "add", "sub", "rsub", "div", "neg", "lerp", "addcmul")
    for suffix in ("", "_")
    if (base, suffix) != ("rsub", "_")
)


@dataclass
class Held:
    """A 16-bit weight or its gradient, and its values in float64 after the last operator that wrote to it."""

    name: str
    tensor: torch.Tensor
    storage: StorageWeakRef
    values: torch.Tensor
    weight: "Held | None" = None
    """Of a gradient: its weight."""


@dataclass
class Write:
    """One write to a tensor: the sums of `_sums`."""

    held: Held
    sums: torch.Tensor
    within_step: bool
    """Whether a step of an optimizer made it."""


@dataclass
class Shrunk:
    """A 16-bit tensor that was multiplied by `1 - rate`, which changed nothing."""

    tensor: torch.Tensor
    rate: float


@dataclass
class Sum:
    """A 16-bit tensor that was only ever added to."""

    storage: StorageWeakRef
    dtype: torch.dtype
    elements: int


class Writes(QuietMode):
    """Repeats operators until it is paused."""

    def __init__(self, tensors: Sequence[Held], at_own_work: Any, also: Any = None) -> None:
        super().__init__()
        self._at_own_work = at_own_work
        self._also = also
        self._held = {held.storage.cdata: held for held in tensors}
        self._exact: dict[int, tuple[StorageWeakRef, torch.Tensor]] = {}  # of other tensors, by storage
        self.writes: list[Write] = []
        self.shrunk: list[Shrunk] = []
        self.sums: dict[int, Sum] = {}  # by storage
        self.overwritten: dict[int, StorageWeakRef] = {}
        """Storages of 16-bit tensors that were written to in another way."""
        self.reloaded: list[tuple[Held, torch.Tensor]] = []
        """Weights, and the FP32 tensors of their shape that they were copied to."""
        self.within_step = False
        """Set while an optimizer of the program's own steps."""
        self.paused = False
        self.error: Exception | None = None
        """What made it pause by itself: nothing may be raised into the training."""
        self.spent_s = 0.0

    def on_op(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        self.spent_s += OPERATOR_S
        if self.paused or self._at_own_work():
            return
        if self._also is not None:
            self._also(func, args, kwargs, out)
        try:
            self._look(func, args, kwargs, out)
        except Exception as error:
            self.paused, self.error = True, error

    def _look(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        name = func.overloadpacket.__name__
        if name in ("mul_", "_foreach_mul_"):
            self._note_shrunk(args)
        if func._schema.is_mutable:
            self._note_sums(name, args)
        if not any(self._is_known(t) for t in _tensors(args)):
            return
        begun = time.perf_counter()
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
        for held in self._held.values():
            if storage_of(held.tensor).cdata != held.storage.cdata:
                exact = self._value(held.tensor)
                if exact is not None:
                    self._wrote(held, exact, held.tensor)

    def _note_shrunk(self, args: Sequence[Any]) -> None:
        targets, factors = (arg if isinstance(arg, list | tuple) else [arg] for arg in args[:2])
        for i, tensor in enumerate(targets):
            factor = factors[i] if len(factors) == len(targets) else factors[0]
            if isinstance(factor, torch.Tensor) and factor.is_cpu and not factor.dim():
                factor = float(local(factor))
            if isinstance(factor, float) and self._is_plain(tensor) and tensor.dtype in NARROW:
                unchanged = 0 < 1 - factor < torch.finfo(tensor.dtype).eps / 4
                if unchanged and tensor.numel() >= MIN_ELEMENTS and storage_of(tensor).cdata not in self._held:
                    self.shrunk.append(Shrunk(tensor.detach(), 1 - factor))

    def _note_sums(self, name: str, args: Sequence[Any]) -> None:
        for target in args[0] if args and isinstance(args[0], list | tuple) else args[:1]:
            if not isinstance(target, torch.Tensor) or target.dtype not in NARROW or not self._is_plain(target):
                continue
            storage = storage_of(target)
            if name in _ADDITIONS:
                elements = local(target).untyped_storage().nbytes() // target.dtype.itemsize
                self.sums.setdefault(storage.cdata, Sum(storage, target.dtype, elements))
            elif not (name == "copy_" and storage_of(args[1]).cdata == storage.cdata):  # as in counts[i] += 1
                self.overwritten[storage.cdata] = storage

    def _follow(self, func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        """One operator, or what an operator on lists did to one entry of each."""
        given = list(_tensors(args))
        writes = func._schema.is_mutable
        target = given[0] if writes and given else out
        if not isinstance(target, torch.Tensor) or not any(map(self._is_known, given)):
            return
        exact = self._repeated(func, name, args, kwargs, given)
        exact = exact if exact is not None and exact.shape == local(target).shape else None
        storage = storage_of(target)
        held = self._held.get(storage.cdata)
        if writes and held is not None:
            plain = all(t.shape == target.shape or not t.dim() for t in given)
            self._wrote(held, exact, target, plain=plain)
        elif writes and name == "copy_":  # a copy of a weight elsewhere is a weight of its own
            source = self._held.get(storage_of(given[-1]).cdata)
            if self.within_step and source is not None and target.dtype is torch.float32:
                self.reloaded.append((source, target))
        else:
            self._exact.pop(storage.cdata, None)
            if exact is not None and held is None and local(target).is_contiguous():
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
        """The exact value of a tensor that is held or was computed from one; None for others, and for parts."""
        key = storage_of(tensor).cdata
        held = self._held.get(key)
        value = held.values if held is not None else self._exact[key][1] if key in self._exact else None
        return value if value is not None and value.shape == local(tensor).shape else None

    def _is_known(self, tensor: torch.Tensor) -> bool:
        if not self._is_plain(tensor):
            return False
        key = storage_of(tensor).cdata
        return key in self._held or key in self._exact

    @staticmethod
    def _is_plain(tensor: torch.Tensor) -> bool:
        plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) or hasattr(tensor, "to_local")
        return plain and tensor.layout is torch.strided and not tensor.is_meta

    def _wrote(self, held: Held, exact: torch.Tensor | None, target: torch.Tensor, *, plain: bool = True) -> None:
        now = local(target) if local(target).shape == held.values.shape else local(held.tensor)
        after = now.to(torch.float64, copy=True)
        if exact is not None and after.shape == exact.shape and plain:
            along = held.values if held.weight is None else -held.weight.values
            self.writes.append(Write(held, _sums(held.values, exact, after, along), self.within_step))
        held.values = after


def _sums(before: torch.Tensor, exact: torch.Tensor, after: torch.Tensor, along: torch.Tensor) -> torch.Tensor:
    """Of a write: its mass, the share of `along` that it subtracts, the mass of what else it does, and what was made of
    it in its direction."""
    update = exact - before
    mass = update.abs().sum()
    rate = -(update * along).sum() / along.square().sum()
    return torch.stack([mass, rate, (update + rate * along).abs().sum(), ((after - before) * update.sign()).sum()])


def storage_of(tensor: torch.Tensor) -> StorageWeakRef:
    """Identifies the memory of a tensor, as long as the result is kept."""
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
