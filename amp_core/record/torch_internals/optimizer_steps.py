"""Hooks on optimizer steps that are not stored in the optimizer.

    handle = before_step(hook, of=optimizer)   # like `optimizer.register_step_pre_hook(hook)`
    handle = before_step(hook)                 # for every optimizer in the program
    handle.remove()

Hooks registered on an optimizer are part of its `__dict__`, hence of copies and pickles. So one pair of torch's global
optimizer hooks calls those of the optimizer that steps. At the beginning of a step they run before the optimizer's own
hooks, at its end after them.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from amp_core.record.model.own import without_torch_function
from amp_core.record.step_phases import called, calling
from amp_core.record.torch_internals.compiling import untraced

Hook = Callable[[torch.optim.Optimizer, Any, Any], Any]


class Handle:
    """Removes its hook. A second call does nothing."""

    def __init__(self, hooks: "_Hooks", hook: Hook, of: torch.optim.Optimizer | None) -> None:
        self._hooks = hooks
        self.hook = hook
        self.of = of

    def remove(self) -> None:
        """No longer call the hook."""
        self._hooks.remove(self)


class _Hooks:
    """All hooks before steps, or all hooks after them."""

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
        done: set[int] = set()
        begun = calling()
        with without_torch_function():
            # A hook may add others: hooks of an optimizer that is adopted in this step already run in it.
            while handle := next((h for h in self._handles if id(h) not in done and h.of in (None, optimizer)), None):
                done.add(id(handle))
                result = handle.hook(optimizer, args, kwargs)
                if result is not None:
                    changed = args, kwargs = result
        called(begun)
        return changed


_before = _Hooks(register_optimizer_step_pre_hook)
_after = _Hooks(register_optimizer_step_post_hook)


def before_step(hook: Hook, of: torch.optim.Optimizer | None = None) -> Handle:
    """Call `hook(optimizer, args, kwargs)` before each step of `of`, or of every optimizer.

    If it returns a value, that is `(args, kwargs)` for the step.
    """
    return _before.add(hook, of)


def after_step(hook: Hook, of: torch.optim.Optimizer | None = None) -> Handle:
    """Call `hook(optimizer, args, kwargs)` after each step of `of`, or of every optimizer."""
    return _after.add(hook, of)
