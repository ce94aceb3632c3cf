"""Optimizers and scalers as frameworks wrap them: what is inside, what comes with it, what was asked for.

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    watch(model, optimizer, into="runs/a")           # the scaler is the optimizer's own

Nothing of a framework is imported here: Accelerate's `AcceleratedOptimizer` (also inside of the Transformers Trainer),
the wrappers of Lightning and its Fabric, and the scaler of timm are known by what they carry.
"""

import inspect
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler

from amp_core.formats import FORMATS
from amp_core.record.model.frames import local_variables
from amp_core.record.model.own import attributes, held


def unwrap_optimizer(optimizer: Any) -> Any:
    """The torch optimizer in the wrapper of a framework; what is no such wrapper is returned as it is.

    One's own optimizer that holds another stays whole: that is what its loop gives to `scaler.step`.
    """
    # Those of Accelerate and of Lightning's Fabric are of the class of what they hold.
    marks = {"accelerator_state", "_strategy"}
    while not marks.isdisjoint(own := attributes(optimizer)) or not isinstance(optimizer, torch.optim.Optimizer):
        inner = own.get("optimizer", own.get("_optimizer"))  # Lightning's have a property `optimizer`
        if not isinstance(inner, torch.optim.Optimizer):
            break
        optimizer = inner
    return optimizer


def unwrap_scaler(scaler: Any) -> Any:
    """The GradScaler in timm's `NativeScaler` and its like (DeiT, MAE, Swin); what is none is returned as it is."""
    inner = held(scaler, "_scaler")
    return inner if isinstance(inner, GradScaler) else scaler


def scaler_of(optimizers: Iterable[Any]) -> Any:
    """The GradScaler that Accelerate or Fabric hands to its optimizers; None where there is none."""
    found = (held(o, "scaler") if held(o, "accelerator_state") is not None else _of_fabric(o) for o in optimizers)
    return next((scaler for scaler in found if scaler is not None), None)


def _of_fabric(optimizer: Any) -> Any:
    return getattr(getattr(held(optimizer, "_strategy"), "precision", None), "scaler", None)


def scaler_in_sight(frame: FrameType | None) -> Any:
    """The one enabled GradScaler that a loop at `frame` could mean: its own variable, one of the functions that called
    it, a global of theirs, or an attribute of the `self` of one. None where there is none, or more than one."""
    found = {id(scaler): scaler for scaler in _scalers(frame) if scaler.is_enabled()}
    return next(iter(found.values())) if len(found) == 1 else None


def _scalers(frame: FrameType | None) -> Iterator[GradScaler]:
    seen: dict[int, Any] = {}  # held, so that no other gets the id of one
    while frame is not None:
        variables = local_variables(frame)
        for names in (variables, frame.f_globals, attributes(variables.get("self"))):
            if id(names) not in seen:
                seen[id(names)] = names
                for value in list(names.values()):
                    # A strange object is asked nothing: its type is looked at, and not `__class__`.
                    inner = inspect.getattr_static(value, "_scaler", None)
                    yield from (one for one in (value, inner) if issubclass(type(one), GradScaler))
        frame = frame.f_back


def requested_precision(optimizers: Iterable[Any]) -> str | None:
    """What `Accelerator(mixed_precision=…)` or `TrainingArguments` asked for, e.g. `fp16`; None where nothing did.

    That is what the user believes in: on a CPU both take `fp16`, and train in FP32 without a word.
    """
    states = (held(o, "accelerator_state") for o in optimizers)
    asked = (str(state.mixed_precision) for state in states if state is not None)
    return next((word for word in asked if word in FORMATS), None)
