"""Hooks that stay behind when a module is copied or pickled.

    handle = module.register_forward_hook(Hook(self._after))
    copy.deepcopy(module)           # an EMA of the model: nothing of the recorder is in it
    torch.save(module, "model.pt")  # can be loaded where there is no AMPscope

torch keeps hooks in the module itself, so whatever copies the module copies them too: with a plain function the copy
would tell of its forwards as the model's, and a bound method would take its owner along, files, locks and all.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any


class Hook(functools.partial[Any]):
    """A hook of ours. In a copy of its module its place is taken by one that takes any arguments and does nothing."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        # Of the standard library, so that a file with it loads anywhere.
        return getattr, (contextlib.nullcontext(), "__exit__")


class Switch:
    """A forward hook that is put on and taken off every few steps, which makes no objects after its first time.

    A handle of torch's is several objects for Python's garbage collector to look through. Of a thousand modules, those
    of some ten steps are enough for it to look through all objects of the process.
    """

    def __init__(self, module: Any, hook: Hook, *, with_kwargs: bool = False) -> None:
        self._module = module
        self._hook = hook
        self._with_kwargs = with_kwargs
        self._key: int | None = None

    def on(self) -> None:
        """Put the hook on, behind those that are there."""
        if self._key is None:
            self._key = self._module.register_forward_hook(self._hook, with_kwargs=self._with_kwargs).id
            return
        self._module._forward_hooks[self._key] = self._hook
        if self._with_kwargs:
            self._module._forward_hooks_with_kwargs[self._key] = True

    def off(self) -> None:
        """Take it off. Twice is harmless."""
        self._module._forward_hooks.pop(self._key, None)
        self._module._forward_hooks_with_kwargs.pop(self._key, None)
