"""User hooks, one of each type that torch has; each counts its calls in `READS`."""

from collections import Counter
from typing import Any

import torch
from torch import nn

READS: Counter[str] = Counter()
"""Reads of attributes that run the user's code, and calls of the user's hooks, since the training began."""


def on_forward(module: nn.Module, args: Any, output: Any) -> None:
    READS["forward hook"] += 1


def on_forward_pre(module: nn.Module, args: Any, kwargs: Any) -> Any:
    READS["forward pre-hook"] += 1
    return args, kwargs


def on_forward_always(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    READS["always-called hook"] += 1


def on_forward_doubling(module: nn.Module, args: Any, output: Any) -> Any:
    return output * 2


def on_backward(module: nn.Module, grad_input: Any, grad_output: Any) -> Any:
    READS["backward hook"] += 1


def on_backward_pre(module: nn.Module, grad_output: Any) -> Any:
    READS["backward pre-hook"] += 1


def on_state_dict(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    READS["state_dict hook"] += 1
    state[f"{prefix}added"] = torch.ones(1)


def on_state_dict_pre(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    READS["state_dict pre-hook"] += 1


def on_load(module: nn.Module, keys: Any) -> None:
    READS["load_state_dict hook"] += 1
    keys.unexpected_keys[:] = [key for key in keys.unexpected_keys if not key.endswith("added")]


def on_weight_grad(grad: torch.Tensor) -> torch.Tensor:
    READS["weight hook"] += 1
    return grad * 1.5


def on_accumulated(parameter: torch.Tensor) -> None:
    READS["post-accumulate hook"] += 1
    parameter.grad.mul_(0.9)


def attach_hooks(module: nn.Module) -> list[Any]:
    """Attach one user hook of each type; the returned handles detach them."""
    handles = [
        module.register_forward_hook(on_forward),
        module.register_forward_hook(on_forward_doubling, prepend=True),
        module.register_forward_hook(on_forward_always, with_kwargs=True, always_call=True),
        module.register_forward_pre_hook(on_forward_pre, with_kwargs=True),
        module.register_full_backward_hook(on_backward),
        module.register_full_backward_pre_hook(on_backward_pre),
        module.register_state_dict_pre_hook(on_state_dict_pre),
        module.register_state_dict_post_hook(on_state_dict),
        module.register_load_state_dict_post_hook(on_load),
    ]
    for parameter in list(module.parameters())[:1]:
        handles += [
            parameter.register_hook(on_weight_grad),
            parameter.register_post_accumulate_grad_hook(on_accumulated),
        ]
    return handles
