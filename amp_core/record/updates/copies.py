"""Averaged copies of a model's parameters (EMA, SWA), found among the variables of the training loop.

    >>> for tensors in reachable_copies(named, sys._getframe(1)):
    ...     tensors["head.weight"]

A copy is a module with parameters of the same names and shapes, a dictionary of tensors by those names, a list of
tensors of the same shapes, or an object that holds one of these as timm, diffusers, torch_ema and Lightning do.
"""

from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import torch

from amp_core.record.model.frames import local_variables
from amp_core.record.model.own import attributes, child, held
from amp_core.record.model.parameters import named_parameters

HOLDERS = ("module", "ema", "ema_model", "averaged_model", "_average_model", "shadow", "shadow_params")
"""Attributes under which helpers keep the averaged copy."""
MAX_DEPTH = 2


def reachable_copies(named: Mapping[str, torch.Tensor], frame: FrameType | None) -> list[dict[str, torch.Tensor]]:
    """Copies of the parameters `named` that are reachable from a loop at `frame`: from a local variable of it or of its
    callers, a global, or an attribute of a caller's `self`. Each by names of the parameters."""
    if not named:
        return []
    copies: dict[int, dict[str, torch.Tensor]] = {}
    seen: dict[int, Any] = {}  # kept alive, so that ids are not reused
    while frame is not None:
        variables = local_variables(frame)
        for names in (variables, frame.f_globals, attributes(variables.get("self"))):
            if id(names) not in seen:
                seen[id(names)] = names
                for value in list(names.values()):
                    copy = _as_copy(value, named, seen, MAX_DEPTH)
                    if copy is not None:
                        copies[id(next(iter(copy.values())))] = copy
        frame = frame.f_back
    return list(copies.values())


def _as_copy(
    value: Any, named: Mapping[str, torch.Tensor], seen: dict[int, Any], depth: int
) -> dict[str, torch.Tensor] | None:
    if id(value) in seen or isinstance(value, type) or not depth:
        return None
    tensors = dict(_tensors(value, named))
    if named.keys() <= tensors.keys() and all(_copies(tensors[name], named[name]) for name in named):
        return {name: tensors[name] for name in named}
    if isinstance(value, torch.Tensor | Mapping | Sequence):
        return None
    if issubclass(type(value), torch.nn.Module):
        inner = [child(value, name) for name in HOLDERS]
    else:
        inner = [held(value, name) for name in HOLDERS]
    return next((c for i in inner if i is not None if (c := _as_copy(i, named, seen, depth - 1)) is not None), None)


def _tensors(value: Any, named: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, Any]]:
    if issubclass(type(value), torch.nn.Module):
        for name, parameter in named_parameters(value):
            yield name.removeprefix("module."), parameter
    elif type(value) is dict:
        yield from ((name, value[name]) for name in named if name in value)
    elif type(value) is list and len(value) == len(named):
        yield from zip(named, value, strict=True)


def _copies(tensor: Any, parameter: torch.Tensor) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor is not parameter and tensor.shape == parameter.shape
