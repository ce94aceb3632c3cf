"""Reads the contents of a user's module without running user code.

    >>> parameter(module, "weight")          # None for a weight that a parametrization computes
    >>> dict(named_parameters(model))

`module.weight` may be a property: that of `torch.nn.utils.parametrizations.spectral_norm` runs a power iteration, so
reading it would change the training. Methods such as `parameters` may be overridden, and `__getattr__` may provide
missing attributes. So modules are read through their `__dict__`.
"""

from collections.abc import Iterator
from typing import Any

import torch

without_torch_function = torch._C.DisableTorchFunctionSubclass
"""A context in which a tensor is read without running the `__torch_function__` of its class."""


def attributes(thing: Any) -> dict[str, Any]:
    """The instance attributes of any object; empty if it only has slots."""
    try:
        attributes: dict[str, Any] = object.__getattribute__(thing, "__dict__")
    except AttributeError:
        return {}
    return attributes


def held(thing: Any, name: str) -> Any:
    """The instance attribute `name` of any object; None if it has none of that name."""
    return attributes(thing).get(name)


def _table(module: torch.nn.Module, name: str) -> Any:
    return held(module, name) or {}


def parameter(module: torch.nn.Module, name: str) -> torch.Tensor | None:
    """The parameter that is registered in `module` under `name`; None if there is none."""
    table = _table(module, "_parameters")
    if type(table) is dict:  # another class may define its own `get`
        return table.get(name)
    return next((p for n, p in table.items() if n == name), None)


def child(module: torch.nn.Module, name: str) -> torch.nn.Module | None:
    """The child that is registered in `module` under `name`; None if there is none."""
    return next((c for n, c in _table(module, "_modules").items() if n == name), None)


def named_children(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """The distinct children of `module`, as `module.named_children()` gives them."""
    seen: set[int] = set()
    for name, inner in _table(module, "_modules").items():
        if inner is not None and id(inner) not in seen:
            seen.add(id(inner))
            yield name, inner


def named_modules(
    module: torch.nn.Module, prefix: str = "", seen: set[int] | None = None, *, remove_duplicate: bool = True
) -> Iterator[tuple[str, torch.nn.Module]]:
    """`module` and all modules in it, in the order and under the names of `Module.named_modules()`."""
    seen = set() if seen is None else seen
    if remove_duplicate and id(module) in seen:
        return
    seen.add(id(module))
    yield prefix, module
    for name, inner in _table(module, "_modules").items():
        if inner is not None:
            within = f"{prefix}.{name}" if prefix else name
            yield from named_modules(inner, within, seen, remove_duplicate=remove_duplicate)


def named_parameters(
    module: torch.nn.Module, *, recurse: bool = True, remove_duplicate: bool = True
) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Parameters in the order and under the names of `Module.named_parameters()`."""
    return _members(module, "_parameters", recurse, remove_duplicate)


def named_buffers(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Buffers in the order and under the names of `Module.named_buffers()`."""
    return _members(module, "_buffers", True, True)


def _members(module: torch.nn.Module, table: str, recurse: bool, remove_duplicate: bool) -> Iterator[tuple[str, Any]]:
    seen: set[int] = set()
    owners = named_modules(module, remove_duplicate=remove_duplicate) if recurse else [("", module)]
    for prefix, owner in owners:
        for name, member in _table(owner, table).items():
            if member is None or (remove_duplicate and id(member) in seen):
                continue
            seen.add(id(member))
            yield (f"{prefix}.{name}" if prefix else name), member


def modules(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """`module` and all modules in it, each once."""
    return (inner for _, inner in named_modules(module))


def children(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The distinct children of `module`."""
    return (inner for _, inner in named_children(module))


def parameters(module: torch.nn.Module, *, recurse: bool = True) -> Iterator[torch.nn.Parameter]:
    """The distinct parameters of `module`; without `recurse`, those that are its own."""
    return (p for _, p in named_parameters(module, recurse=recurse))


def buffers(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """The distinct buffers of `module`."""
    return (b for _, b in named_buffers(module))
