"""Listen to all calls of a torch function or of a method in the program.

    >>> backward = Shared(torch.autograd, "backward")
    >>> backward.listen(before)          # before(args, kwargs), at each call in the program
    >>> backward.unlisten(before)
    >>> update = method_of(scaler, "update")
    >>> update.listen(before, of=scaler)           # at each call on this scaler; args[0] is the scaler

The function is patched while it has listeners, and restored when the last one is removed. A listener that raises is
dropped with a warning; the exception is not propagated into the training.

A method is patched in the class that defines it. The object itself does not change, so copies and pickles of it have no
listeners.
"""

import copy
import functools
import sys
import types
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.nn.utils import clip_grad
from torch.optim import lr_scheduler

from amp_core.record.model import own
from amp_core.record.step_phases import called, calling
from amp_core.record.torch_internals.compiling import not_compiled, untraced
from amp_core.record.torch_internals.patches import Patches

Listener = Callable[[tuple[Any, ...], dict[str, Any]], None]
Afterwards = Callable[[tuple[Any, ...], dict[str, Any], Any], None]

_ANY = object()


class Shared:
    """One function of a module, or one method of a class, that several recorders may listen to."""

    def __init__(self, owner: Any, name: str) -> None:
        self._owner = owner
        self._name = name
        self._listeners: list[tuple[Any, Any]] = []  # with the object whose calls they listen to
        self._afterwards: list[tuple[Any, Any]] = []
        self._failures: list[tuple[Any, Any]] = []
        self._patches = Patches()

    def listen(self, listener: Listener, of: Any = _ANY) -> None:
        """Call `listener(args, kwargs)` before each call from now on; with `of`, only before those on that object."""
        self._listeners.append((listener, of))
        self._patch()

    def listen_after(self, listener: Afterwards, of: Any = _ANY) -> None:
        """Call `listener(args, kwargs, result)` after each call that begins from now on and does not raise."""
        self._afterwards.append((listener, of))
        self._patch()

    def listen_failed(self, listener: Listener, of: Any = _ANY) -> None:
        """Call `listener(args, kwargs)` after each call that raised."""
        self._failures.append((listener, of))
        self._patch()

    def _patch(self) -> None:
        if len(self._patches) == 0 and hasattr(self._owner, self._name):
            self._patches.wrap(self._owner, self._name, self._around)

    def unlisten(self, *gone: Listener | Afterwards) -> None:
        """Stop calling these listeners; removing the last one restores torch."""
        for listeners in (self._listeners, self._afterwards, self._failures):
            listeners[:] = [(listener, of) for listener, of in listeners if listener not in gone]
        self._restore_if_unused()

    def _restore_if_unused(self) -> None:
        if not self._listeners and not self._afterwards and not self._failures:
            self._patches.restore()
            if _methods.get(key := (id(self._owner), self._name)) is self:
                del _methods[key]

    def _around(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @not_compiled
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            afterwards = self._begin(args, kwargs)
            result = original(*args, **kwargs)
            self._end(afterwards, args, kwargs, result)
            return result

        @not_compiled
        @functools.wraps(original)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            afterwards = self._begin(args, kwargs)
            try:
                result = original(*args, **kwargs)
            except BaseException:
                self._fail(args, kwargs)
                raise
            self._end(afterwards, args, kwargs, result)
            return result

        # dynamo cannot break a graph within `try`, so only a function with `listen_failed` is called within one.
        return guarded if self._failures else call

    @untraced
    def _begin(self, *of: Any) -> tuple[tuple[Any, Any], ...]:
        afterwards = tuple(self._afterwards)  # a listener that is added within the call is not notified of its end
        self._notify(self._listeners, tuple(self._listeners), of)
        return afterwards

    @untraced
    def _end(self, afterwards: tuple[tuple[Any, Any], ...] | None, *of: Any) -> None:
        self._notify(self._afterwards, afterwards or (), of)

    @untraced
    def _fail(self, *of: Any) -> None:
        self._notify(self._failures, tuple(self._failures), of)

    def _notify(
        self, present: list[tuple[Any, Any]], entries: tuple[tuple[Any, Any], ...], of: tuple[Any, ...]
    ) -> None:
        args = of[0]
        begun = calling()
        with own.without_torch_function():
            for entry in entries:
                listener, whose = entry
                if (whose is not _ANY and not (args and args[0] is whose)) or entry not in present:
                    continue
                try:
                    listener(*of)
                except Exception as error:
                    if entry in present:
                        present.remove(entry)
                    self._restore_if_unused()
                    message = f"AMPscope no longer listens to {self._name}: {error!r}"
                    warnings.warn(message, RuntimeWarning, stacklevel=5)
        called(begun)


class _OwnMethod(Shared):
    """A method that is an attribute of the object itself, or that its `__getattr__` returns."""

    def _around(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def unbound(owner: Any, *args: Any, **kwargs: Any) -> Any:
            return original(*args, **kwargs)

        return _Proxy(original, functools.partial(super()._around(unbound), self._owner))


class _Proxy:
    """Replaces a callable in an object's `__dict__`. A copy of the object gets the original callable."""

    def __init__(self, original: Callable[..., Any], call: Callable[..., Any]) -> None:
        self._original = original
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __copy__(self) -> Any:
        return self._original

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._original, memo)

    def __reduce__(self) -> Any:
        return functools.partial, (self._original,)  # from the standard library, so that it loads without AMPscope


_methods: dict[tuple[int, str], Shared] = {}
"""Patched methods, by the class that defines them or the object that holds them."""


def method_of_class(kind: type, name: str) -> Shared:
    """A method that the class itself defines, for all objects of the class."""
    return _methods.setdefault((id(kind), name), Shared(kind, name))


def method_of(thing: Any, name: str) -> Shared:
    """The method `name` of an object. Listen to it with `of=thing`: other objects of the class share it."""
    if own.held(thing, name) is None:
        for kind in type(thing).__mro__:
            if isinstance(vars(kind).get(name), types.FunctionType):
                return method_of_class(kind, name)
            if name in vars(kind):
                break
    return _methods.setdefault((id(thing), name), _OwnMethod(thing, name))


def argument(args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
    """The first argument of a method after `self`, positional or by keyword."""
    return args[1] if len(args) > 1 else kwargs.get(name)


backward = Shared(torch.autograd, "backward")
"""`loss.backward()` calls it by name."""
grad = Shared(torch.autograd, "grad")
cleared_cache = Shared(torch, "clear_autocast_cache")
"""The outermost autocast region calls it by name as it ends."""
reduced = Shared(torch.distributed, "all_reduce")
"""As loops, DDP's communication hooks and DeepSpeed call it. What DDP itself reduces does not come by here."""
reduced_to_one = Shared(torch.distributed, "reduce")
reduce_scattered = Shared(torch.distributed, "reduce_scatter_tensor")
reduce_scattered_single = Shared(torch.distributed, "reduce_scatter_single")
"""As FSDP2 calls it in newer versions of torch; up to 2.12 it calls `reduce_scatter_tensor`."""
scheduled = Shared(lr_scheduler.LRScheduler, "step")
"""All schedulers of torch except `ReduceLROnPlateau`; composed ones call it once for each part."""
scheduled_on_plateau = Shared(lr_scheduler.ReduceLROnPlateau, "step")
clipped_by_norm = Shared(clip_grad, "_clip_grads_with_norm_")
"""`clip_grad_norm_` calls it by name to clip, under whatever name it was imported itself. A loop without a scaler clips
between `backward()` and `optimizer.step()`: at the step, gradients are already clipped."""
grouped_for_clipping = Shared(clip_grad, "_group_tensors_by_device_and_dtype")
"""`clip_grad_value_` calls it by name, under whatever name it was imported itself; clipping by norm calls it too."""


def clips_by_value() -> bool:
    """Whether `clip_grad_value_` made the current call; for listeners of `grouped_for_clipping`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != clip_grad.__name__:
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name == "clip_grad_value_"
