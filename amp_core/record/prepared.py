"""Optimizers as frameworks wrap them: the torch optimizer inside, the scaler that comes with it, what was asked for.

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    watch(model, optimizer, into="runs/a")           # the scaler is the optimizer's own

Nothing of a framework is imported here: Accelerate's `AcceleratedOptimizer` (also inside of the Transformers Trainer)
and Lightning's `LightningOptimizer` are known by what they carry.
"""

from collections.abc import Iterable
from typing import Any

import torch

from amp_core.formats import FORMATS


def bare(optimizer: Any) -> Any:
    """The torch optimizer in the wrapper of a framework; what is no such wrapper is returned as it is.

    One's own optimizer that holds another stays whole: that is what its loop gives to `scaler.step`.
    """
    while hasattr(optimizer, "accelerator_state") or not isinstance(optimizer, torch.optim.Optimizer):
        inner = getattr(optimizer, "optimizer", None)
        if not isinstance(inner, torch.optim.Optimizer):
            break
        optimizer = inner
    return optimizer


def scaler_of(optimizers: Iterable[Any]) -> Any:
    """The GradScaler that Accelerate hands to its optimizers; None where there is none."""
    held = (getattr(o, "scaler", None) for o in optimizers if hasattr(o, "accelerator_state"))
    return next((scaler for scaler in held if scaler is not None), None)


def requested_precision(optimizers: Iterable[Any]) -> str | None:
    """What `Accelerator(mixed_precision=…)` or `TrainingArguments` asked for, e.g. `fp16`; None where nothing did.

    That is what the user believes in: on a CPU both take `fp16`, and train in FP32 without a word.
    """
    asked = (str(o.accelerator_state.mixed_precision) for o in optimizers if hasattr(o, "accelerator_state"))
    return next((word for word in asked if word in FORMATS), None)
