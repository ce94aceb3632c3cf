"""Being told of calls that belong to nobody's object: functions of torch's modules and methods of its classes.

    >>> backward = Shared(torch.autograd, "backward")
    >>> backward.listen(before)          # before(args, kwargs), at each call in the program
    >>> backward.unlisten(before)

The function is wrapped while anybody listens and put back when the last one goes. It is called as before; what a
listener raises goes no further than a warning would, because training must not end for it.
"""

import functools
import sys
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.nn.utils import clip_grad
from torch.optim import lr_scheduler

from amp_core.record._patch import Patches
from amp_core.record.compiling import untraced

Listener = Callable[[tuple[Any, ...], dict[str, Any]], None]
Afterwards = Callable[[tuple[Any, ...], dict[str, Any], Any], None]


class Shared:
    """One function of a module, or one method of a class, that several recorders may listen to."""

    def __init__(self, owner: Any, name: str) -> None:
        self._owner = owner
        self._name = name
        self._listeners: list[Listener] = []
        self._afterwards: list[Afterwards] = []
        self._patches = Patches()

    def listen(self, listener: Listener) -> None:
        """Call `listener(args, kwargs)` before each call from now on."""
        self._listeners.append(listener)
        self._wrap()

    def listen_after(self, listener: Afterwards) -> None:
        """Call `listener(args, kwargs, result)` after each call that raised nothing."""
        self._afterwards.append(listener)
        self._wrap()

    def _wrap(self) -> None:
        if len(self._patches) == 0 and hasattr(self._owner, self._name):
            self._patches.wrap(self._owner, self._name, self._around)

    def unlisten(self, listener: Listener | Afterwards) -> None:
        """Stop calling `listener`; the last one to go restores torch."""
        lists: tuple[list[Any], ...] = (self._listeners, self._afterwards)
        for listeners in lists:
            if listener in listeners:
                listeners.remove(listener)
        if not self._listeners and not self._afterwards:
            self._patches.restore()

    def _around(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._tell(self._listeners, args, kwargs)
            result = original(*args, **kwargs)
            self._tell(self._afterwards, args, kwargs, result)
            return result

        return call

    @untraced
    def _tell(self, listeners: list[Any], *of: Any) -> None:
        for listener in tuple(listeners):
            try:
                listener(*of)
            except Exception as error:
                listeners.remove(listener)
                said = f"AMPscope no longer listens to {self._name}: {error!r}"
                warnings.warn(said, RuntimeWarning, stacklevel=4)


backward = Shared(torch.autograd, "backward")
"""`loss.backward()` calls it by name."""
grad = Shared(torch.autograd, "grad")
scheduled = Shared(lr_scheduler.LRScheduler, "step")
"""Every scheduler of torch but the one on plateaus; those made of others call it once for each."""
scheduled_on_plateau = Shared(lr_scheduler.ReduceLROnPlateau, "step")
grouped_for_clipping = Shared(clip_grad, "_group_tensors_by_device_and_dtype")
"""What `clip_grad_value_` calls by name, whatever name it was imported under; clipping by norm calls it too."""


def clips_by_value() -> bool:
    """Asked by who listens to `grouped_for_clipping`: whether it is `clip_grad_value_` that calls it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != clip_grad.__name__:
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name == "clip_grad_value_"
