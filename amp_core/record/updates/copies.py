"""Averaged copies of a model's parameters (EMA, SWA), found among the variables of the training loop.

    >>> for copy in reachable_copies(named, sys._getframe(1)):
    ...     copy.tensors(named)["head.weight"]

A copy is a module with parameters or buffers of the same names and shapes, a dictionary of tensors by those names, a
list of tensors of the same shapes, an object with one of these as an attribute, or a function that encloses one. A
module may also be a copy of a part of the model: the target of a critic, the momentum encoder of an encoder.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType, CellType, FrameType, FunctionType, ModuleType, NoneType
from typing import Any

import torch

from amp_core.record.model.frames import reachable_values
from amp_core.record.model.own import attributes, child, children, without_torch_function
from amp_core.record.model.parameters import named_buffers, named_parameters

HOLDERS = ("module", "ema", "ema_model", "averaged_model", "_average_model", "shadow", "shadow_params")
"""Names under which a module keeps the averaged copy of another."""
MAX_DEPTH = 2
MAX_PARTS = 16
"""Submodules whose copies are looked for."""
MIN_OF_PART = 2
"""Parameters that a submodule has to have: single layers are too alike."""

_LEAVES = frozenset({NoneType, bool, int, float, str, bytes, type, ModuleType, BuiltinFunctionType, torch.dtype})
"""Types of values that hold no tensors, by name."""


@dataclass(frozen=True)
class Copy:
    """A copy of the parameters where the loop keeps it: in a module, a dictionary or a list."""

    holder: Any
    part: str = ""
    """The submodule whose parameters it is a copy of, such as `critic`; empty for the whole model."""

    def tensors(self, named: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Its tensors now, by names of the parameters `named`; empty if it is no copy of them."""
        if not self.part:
            return _tensors(self.holder, named)
        start = f"{self.part}."
        of_part = {name.removeprefix(start): p for name, p in named.items() if name.startswith(start)}
        return {start + name: tensor for name, tensor in _tensors(self.holder, of_part).items()}


def reachable_copies(named: Mapping[str, torch.Tensor], frame: FrameType | None) -> list[Copy]:
    """Copies of the parameters `named` that are reachable from a loop at `frame`: from a local variable of it or of its
    callers, a global, or an attribute of a caller's `self`, directly, as an attribute of an object there, or as a
    variable that a function there encloses."""
    if not named:
        return []
    copies: dict[tuple[int, str], Copy] = {}
    parts = _parts(named)
    with without_torch_function():
        for value in reachable_values(frame):
            whole = _as_copy(value, named, MAX_DEPTH)
            for copy in [whole] if whole is not None else _copies_of_parts(value, named, parts):
                copies[id(next(iter(copy.tensors(named).values()))), copy.part] = copy
    return list(copies.values())


def _parts(named: Mapping[str, torch.Tensor]) -> list[str]:
    """The outermost submodules, of which a loop may keep an averaged copy: a target of the critic, or of the
    encoder."""
    numbers = Counter(name.partition(".")[0] for name in named)
    return [part for part, number in numbers.items() if MIN_OF_PART <= number < len(named)][:MAX_PARTS]


def _copies_of_parts(value: Any, named: Mapping[str, torch.Tensor], parts: Sequence[str]) -> list[Copy]:
    """A module outside of the model, or modules in it that are not trained, with parameters as those of parts. Of parts
    that are alike, it is a copy of one, which its values have to show."""
    if not parts or not issubclass(type(value), torch.nn.Module):
        return []
    trained = {id(p) for p in named.values()}
    holders = [m for m in (value, *children(value)) if not any(id(p) in trained for _, p in named_parameters(m))]
    return [copy for m in holders for part in parts if (copy := Copy(m, part)).tensors(named)]


def _as_copy(value: Any, named: Mapping[str, torch.Tensor], depth: int) -> Copy | None:
    kind = type(value)
    if not depth or kind in _LEAVES or issubclass(kind, type):  # of a thousand globals, nearly all
        return None
    if issubclass(kind, torch.nn.Module | dict | list | tuple):
        copy = Copy(value)
        if copy.tensors(named):
            return copy
    if issubclass(kind, torch.Tensor | Mapping | Sequence | torch.optim.Optimizer):
        return None
    inner: list[Any]
    if issubclass(kind, torch.nn.Module):
        inner = [child(value, name) for name in HOLDERS]
    elif kind is FunctionType:
        inner = [cell.cell_contents for cell in _decorated(value).__closure__ or () if cell != CellType()]
    else:
        inner = list(attributes(value).values())
    return next((c for i in inner if i is not None if (c := _as_copy(i, named, depth - 1)) is not None), None)


def _decorated(function: FunctionType) -> FunctionType:
    """The function within its decorators, such as `@torch.no_grad()`."""
    within = vars(function).get("__wrapped__")
    return _decorated(within) if type(within) is FunctionType and within is not function else function


def _tensors(value: Any, named: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The tensors of `value`, by name, if they are copies of `named`; else empty."""
    tensors: dict[str, Any] = {}
    if issubclass(type(value), torch.nn.Module):
        tensors = _tensors_of_module(value, named)
    elif issubclass(type(value), dict):
        first = next(iter(named.items()), None)
        if first and first[0] in value and _copies(value[first[0]], first[1]):  # most hold nothing of the model
            tensors = {name: value[name] for name in named if name in value}
    elif type(value) in (list, tuple) and len(value) == len(named):
        tensors = dict(zip(named, value, strict=True))
    return tensors if len(tensors) == len(named) and all(_copies(tensors[n], p) for n, p in named.items()) else {}


def _tensors_of_module(module: torch.nn.Module, named: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Parameters and buffers by the names of `named`; empty for the model itself, which most often is the module."""
    tensors: dict[str, torch.Tensor] = {}
    for of_module, parameter in named_parameters(module):
        name = of_module.removeprefix("module.")
        if parameter is named.get(name):
            return {}
        if name in named:
            tensors[name] = parameter
    buffers = {_letters(name): buffer for name, buffer in named_buffers(module)}
    return tensors | {name: buffers[key] for name in named if buffers and (key := _letters(name)) in buffers}


def _letters(name: str) -> str:
    """The name of a parameter as a helper registers a buffer for it, which may have no dots."""
    return name.replace(".", "").replace("_", "")


def _copies(tensor: Any, parameter: torch.Tensor) -> bool:
    return issubclass(type(tensor), torch.Tensor) and tensor is not parameter and tensor.shape == parameter.shape
