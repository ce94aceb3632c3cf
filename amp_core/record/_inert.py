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
