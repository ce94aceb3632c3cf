"""Reading a GradScaler without waiting for the device and without disturbing it.

The names with an underscore are PyTorch's own, unchanged from 2.3 to 2.13 (torch/amp/grad_scaler.py); there is no
public way to detect a skipped step. `found_inf` is valid between `step()` and `update()`: `update()` adds the flags of
all optimizers in place and then discards them, so it is read and cloned in between. What is returned here is the
scaler's own memory, which it changes in place.
"""

from typing import Any

import torch


def is_active(scaler: Any) -> bool:
    """Whether there is a scaler and it is enabled."""
    return scaler is not None and bool(scaler.is_enabled())


def scale(scaler: Any) -> torch.Tensor | None:
    """The loss scale, on the scaler's device; None before the first `scale()`."""
    held = getattr(scaler, "_scale", None)
    return held if isinstance(held, torch.Tensor) else None


def growth_tracker(scaler: Any) -> torch.Tensor | None:
    """The number of clean steps since the loss scale last changed."""
    held = getattr(scaler, "_growth_tracker", None)
    return held if isinstance(held, torch.Tensor) else None


def found_inf(scaler: Any, optimizer: torch.optim.Optimizer) -> torch.Tensor | None:
    """The number of devices with a non-finite gradient of `optimizer` since the last `update()`; None if not known
    yet."""
    state = scaler._per_optimizer_states.get(id(optimizer))
    flags = list(state["found_inf_per_device"].values()) if state is not None else []
    if not flags:
        return None
    total: torch.Tensor = flags[0]
    for flag in flags[1:]:
        total = total + flag.to(total.device, non_blocking=True)
    return total


def still_scaled(scaler: Any, optimizer: torch.optim.Optimizer) -> bool:
    """Whether the gradients of `optimizer` are multiplied by the loss scale at this moment."""
    if not is_active(scaler) or getattr(scaler, "_scale", None) is None:
        return False
    state = scaler._per_optimizer_states.get(id(optimizer))  # .get: reading must not create an entry
    return state is None or state["stage"].name == "READY"


def settings(scaler: Any) -> dict[str, Any] | None:
    """The settings of a scaler for the head of the run; None if there is none."""
    if scaler is None:
        return None
    if not scaler.is_enabled():
        return {"enabled": False}
    return {
        "enabled": True,
        "init_scale": scaler._init_scale if scaler._scale is None else None,
        "growth_factor": scaler.get_growth_factor(),
        "backoff_factor": scaler.get_backoff_factor(),
        "growth_interval": scaler.get_growth_interval(),
    }
