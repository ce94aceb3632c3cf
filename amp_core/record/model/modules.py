"""Reads modules: whether they compute, their classes, the tensors in their outputs."""

import contextlib
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from amp_core.record.model import own
from amp_core.record.model.parameters import written_class


def layer_class(module: torch.nn.Module) -> str:
    """The name of the nearest class that torch defines: `LSTM` for a user's subclass of it; else its own name."""
    known = (
        c for c in type(module).__mro__ if c.__module__.startswith("torch.nn.modules") and c is not torch.nn.Module
    )
    return next(known, written_class(module)).__name__


def is_linear(module: torch.nn.Module) -> bool:
    """Whether it multiplies with a matrix of weights: `Linear`, its subclasses, and GPT-2's `Conv1D`."""
    return isinstance(module, torch.nn.Linear) or type(module).__name__ == "Conv1D"


def is_layer(module: torch.nn.Module) -> bool:
    """Whether it is a single layer whose class torch defines, so that its name says what it computes."""
    return type(module).__module__.startswith("torch.nn.modules.") and not any(True for _ in own.children(module))


def computes(module: torch.nn.Module) -> bool:
    """Whether a module computes itself: it has own parameters, or no children."""
    return not any(True for _ in own.children(module)) or any(True for _ in own.parameters(module, recurse=False))


def tensors_in(output: Any) -> Iterator[torch.Tensor]:
    """The tensors in a module's output, however it is built; dataclasses, which pytree leaves alone, included."""
    if isinstance(output, torch.Tensor):  # the most frequent case, and pytree is slow
        return iter((output,))
    fields = getattr(type(output), "__dataclass_fields__", None)
    if fields is not None and not isinstance(output, Mapping):
        output = [_field(output, name) for name in fields]
    return (leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor))


def _field(output: Any, name: str) -> Any:
    """A field of a dataclass; None for one that is computed on access."""
    value = own.held(output, name)
    slot = inspect.getattr_static(type(output), name, None)
    if value is None and inspect.ismemberdescriptor(slot):
        with contextlib.suppress(AttributeError):  # a slot that was never filled
            return slot.__get__(output)
    return value


def is_compiled(model: torch.nn.Module) -> bool:
    """Whether the model, or a part of it, runs as a compiled graph, where listeners are not called."""
    return any(
        own.child(m, "_orig_mod") is not None or own.held(m, "_compiled_call_impl") is not None
        for m in own.modules(model)
    )
