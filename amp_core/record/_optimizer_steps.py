"""Hooks on the steps of one optimizer that leave nothing in the optimizer.

    handle = before_step(optimizer, hook)      # as `optimizer.register_step_pre_hook(hook)`
    handle.remove()

The hooks that torch keeps in an optimizer go where its `__dict__` goes. Those that torch keeps for all optimizers are
nobody's, so each asks whose step it is. They come before an optimizer's own hooks, and after them where a step ends.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from amp_core.record._own import without_torch_function
from amp_core.record.compiling import untraced

Hook = Callable[[torch.optim.Optimizer, Any, Any], Any]


def before_step(optimizer: torch.optim.Optimizer, hook: Hook) -> Any:
    """Call `hook(optimizer, args, kwargs)` before each step; what it returns, if anything, are the new arguments."""
    return register_optimizer_step_pre_hook(_only(optimizer, hook))


def after_step(optimizer: torch.optim.Optimizer, hook: Hook) -> Any:
    """Call `hook(optimizer, args, kwargs)` after each step."""
    return register_optimizer_step_post_hook(_only(optimizer, hook))


def _only(whose: torch.optim.Optimizer, hook: Hook) -> Hook:
    @untraced
    def only(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        if optimizer is not whose:
            return None
        with without_torch_function():
            return hook(optimizer, args, kwargs)

    return only
