"""Hooks on optimizer steps that leave nothing in the optimizer.

    handle = before_step(hook, of=optimizer)   # as `optimizer.register_step_pre_hook(hook)`
    handle = before_step(hook)                 # of every optimizer in the program
    handle.remove()

The hooks that torch keeps in an optimizer go where its `__dict__` goes: into copies and pickles. So one pair of torch's
hooks for all optimizers calls those that are meant. They run before an optimizer's own hooks where a step begins, and
after them where it ends.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from amp_core.record.model.own import without_torch_function
from amp_core.record.torch_internals.compiling import untraced

Hook = Callable[[torch.optim.Optimizer, Any, Any], Any]


class Handle:
    """Removes its hook. Twice is harmless."""

    def __init__(self, hooks: "_Hooks", hook: Hook, of: torch.optim.Optimizer | None) -> None:
        self._hooks = hooks
        self.hook = hook
        self.of = of

    def remove(self) -> None:
        """No longer call the hook."""
        self._hooks.remove(self)


class _Hooks:
    """All hooks on the beginning of steps, or all on their end."""

    def __init__(self, register: Callable[[Hook], Any]) -> None:
        self._register = register
        self._handles: list[Handle] = []
        self._torch_handle: Any = None

    def add(self, hook: Hook, of: torch.optim.Optimizer | None) -> Handle:
        handle = Handle(self, hook, of)
        self._handles.append(handle)
        if self._torch_handle is None:
            self._torch_handle = self._register(self._call)
        return handle

    def remove(self, handle: Handle) -> None:
        if handle in self._handles:
            self._handles.remove(handle)
        if not self._handles and self._torch_handle is not None:
            self._torch_handle.remove()
            self._torch_handle = None

    @untraced
    def _call(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        changed = None
        called: set[int] = set()
        with without_torch_function():
            # A hook may add others: those of an optimizer that is met for the first time see this very step.
            while handle := next((h for h in self._handles if id(h) not in called and h.of in (None, optimizer)), None):
                called.add(id(handle))
                result = handle.hook(optimizer, args, kwargs)
                if result is not None:
                    changed = args, kwargs = result
        return changed


_before = _Hooks(register_optimizer_step_pre_hook)
_after = _Hooks(register_optimizer_step_post_hook)


def before_step(hook: Hook, of: torch.optim.Optimizer | None = None) -> Handle:
    """Call `hook(optimizer, args, kwargs)` before each step of `of`, or of every optimizer.

    What it returns, if anything, are the new arguments of the step.
    """
    return _before.add(hook, of)


def after_step(hook: Hook, of: torch.optim.Optimizer | None = None) -> Handle:
    """Call `hook(optimizer, args, kwargs)` after each step of `of`, or of every optimizer."""
    return _after.add(hook, of)
