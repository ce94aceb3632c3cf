"""Unwraps optimizers and scalers of frameworks, and reads the precision that was requested.

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    watch(model, optimizer, into="runs/a")           # the scaler is the optimizer's own

No framework is imported here: Accelerate's `AcceleratedOptimizer` (also inside the Transformers Trainer), the wrappers
of Lightning and its Fabric, and timm's scaler are recognized by their attributes.
"""

import inspect
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler

from amp_core.formats import FORMATS
from amp_core.record.model.frames import reachable_values
from amp_core.record.model.own import attributes, held


def unwrap_optimizer(optimizer: Any) -> Any:
    """The torch optimizer in a framework's wrapper; anything else is returned as it is.

    A user's own optimizer that holds another is not unwrapped: its loop passes it to `scaler.step`.
    """
    # The wrappers of Accelerate and of Lightning's Fabric have the class of what they wrap.
    marks = {"accelerator_state", "_strategy"}
    while not marks.isdisjoint(own := attributes(optimizer)) or not isinstance(optimizer, torch.optim.Optimizer):
        inner = own.get("optimizer", own.get("_optimizer"))  # Lightning's have a property `optimizer`
        if not isinstance(inner, torch.optim.Optimizer):
            break
        optimizer = inner
    return optimizer


def unwrap_scaler(scaler: Any) -> Any:
    """The GradScaler in timm's `NativeScaler` and similar wrappers (DeiT, MAE, Swin); anything else is returned as it
    is."""
    inner = held(scaler, "_scaler")
    return inner if isinstance(inner, GradScaler) else scaler


def scaler_of(optimizers: Iterable[Any]) -> Any:
    """The GradScaler that Accelerate or Fabric attaches to its optimizers; None without one."""
    scalers = (held(o, "scaler") if held(o, "accelerator_state") is not None else _of_fabric(o) for o in optimizers)
    return next((scaler for scaler in scalers if scaler is not None), None)


def _of_fabric(optimizer: Any) -> Any:
    return getattr(getattr(held(optimizer, "_strategy"), "precision", None), "scaler", None)


def fabric_precision(optimizers: Iterable[Any]) -> str | None:
    """The precision requested by `Fabric(precision=…)`, e.g. `bf16-mixed`; None without Fabric."""
    strategies = (held(o, "_strategy") for o in optimizers)
    asked = (getattr(getattr(strategy, "precision", None), "precision", None) for strategy in strategies)
    return next((word for word in asked if isinstance(word, str)), None)


def reachable_scaler(frame: FrameType | None) -> Any:
    """The only enabled GradScaler that is reachable from a loop at `frame`: a local variable of it or of its callers, a
    global, or an attribute of a caller's `self`. None if there is none, or more than one."""
    enabled = {id(scaler): scaler for scaler in _scalers(frame) if scaler.is_enabled()}
    return next(iter(enabled.values())) if len(enabled) == 1 else None


def _scalers(frame: FrameType | None) -> Iterator[GradScaler]:
    for value in reachable_values(frame):
        inner = inspect.getattr_static(value, "_scaler", None)
        yield from (one for one in (value, inner) if issubclass(type(one), GradScaler))


def requested_precision(optimizers: Iterable[Any]) -> str | None:
    """The precision requested by `Accelerator(mixed_precision=…)` or `TrainingArguments`, e.g. `fp16`; None without
    one.

    The user expects it: on a CPU both accept `fp16`, and train in FP32 without a warning.
    """
    states = (held(o, "accelerator_state") for o in optimizers)
    asked = (str(state.mixed_precision) for state in states if state is not None)
    return next((word for word in asked if word in FORMATS), None)
