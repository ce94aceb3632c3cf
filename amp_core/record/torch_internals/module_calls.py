"""Hooks on the calls of modules that leave the modules themselves unchanged.

    handles = [before_call(module, began), after_call(module, ended)]    # began(module, args, kwargs)
    handles[0].remove()                                                  # ended(module, args, kwargs, output)

torch stores hooks in the module itself: they are copied and pickled with it, `torch.jit.script` compiles them, and a
`TransformerEncoderLayer` with hooks takes another code path in evaluation. So none is registered. `Module.__call__`
looks up `_compiled_call_impl`, a class attribute that is None except in modules compiled by `module.compile()`. While
modules of a class have listeners, a descriptor replaces it in that class: it returns None for every module without
listeners. Calls of modules of other classes cost nothing. In a module that `module.compile()` compiled before, the
attribute is its own: there it is replaced in the module, whose copies and pickles leave it out.

Listeners are notified of ordinary calls only, not of calls that `torch.compile`, `torch.export`, `torch.jit.trace` or
`torch.fx` trace. A listener that raises is dropped with a warning.
"""

import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import repeat
from operator import attrgetter, contains, is_
from typing import Any, Protocol

import torch
from torch._C._dynamo import eval_frame
from torch.compiler import is_compiling
from torch.fx import _symbolic_trace

from amp_core.record.model.own import without_torch_function
from amp_core.record.step_phases import called, calling
from amp_core.record.torch_internals.compiling import not_compiled
from amp_core.record.torch_internals.patches import Patches

Before = Callable[[torch.nn.Module, Any, Any], None]
After = Callable[[torch.nn.Module, Any, Any, Any], None]
Listeners = tuple[tuple[After, bool], ...]
"""Each with whether it is called after a call that raised too."""


class QuickAfter(Protocol):
    """A listener of `Switches` that handles most outputs by itself."""

    def quick(self, output: Any) -> bool:
        """Handle the output of a call, and count the time. False where `__call__` has to be called."""

    def __call__(self, module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None: ...


_ATTRIBUTE = "_compiled_call_impl"
_module, _before, _after = map(attrgetter, ("module", "before", "after"))

_listened: dict[int, "_Listened"] = {}
_patched: dict[type, tuple[Patches, list[int]]] = {}
"""By class: its patch, and how many modules with listeners need it."""


class Handle:
    """Removes its listener. A second call does nothing."""

    def __init__(self, listened: "_Listened", listener: Any, always: bool | None) -> None:
        self._listened: _Listened | None = listened
        self._listener = listener
        self._always = always  # None for a listener before the call

    def remove(self) -> None:
        """No longer call the listener."""
        listened, self._listened = self._listened, None
        if listened is not None:
            listened.drop(self._listener, self._always)


def before_call(module: torch.nn.Module, listener: Before, *, first: bool = False) -> Handle:
    """Call `listener(module, args, kwargs)` before each call of `module`; with `first`, before the other listeners."""
    listened = _of(module)
    listened.before = (listener, *listened.before) if first else (*listened.before, listener)
    return Handle(listened, listener, None)


def after_call(module: torch.nn.Module, listener: After, *, always: bool = False) -> Handle:
    """Call `listener(module, args, kwargs, output)` after each call of `module`.

    With `always`, also after a call that raised; `output` is None then.
    """
    listened = _of(module)
    listened.after = (*listened.after, (listener, always))
    return Handle(listened, listener, always)


class Switches:
    """Listeners to the calls of many modules that are turned on and off every few steps.

    After the first time it allocates no objects, unless the modules have other listeners too: the objects for a
    thousand modules in ten steps would make Python's garbage collector traverse all objects of the process.
    """

    def __init__(self, listeners: Iterable[tuple[torch.nn.Module, After | QuickAfter]]) -> None:
        self._entries: list[tuple[int, _Listened, Listeners]] = []
        for module, listener in listeners:
            own: Listeners = ((listener, False),)
            quick = getattr(listener, "quick", None)
            alone = _Listened(module) if quick is None else _ListenedQuickly(module, own, quick)
            alone.after = own
            self._entries.append((id(module), alone, own))
        self._keys = [key for key, _, _ in self._entries]
        self._alone = [alone for _, alone, _ in self._entries]
        self._own = [own for _, _, own in self._entries]
        self._classes = Counter(kind for alone in self._alone for kind in alone.classes)
        self._once = len(set(self._keys)) == len(self._keys)

    def __len__(self) -> int:
        return len(self._entries)

    def on(self, which: Iterable[int] | None = None) -> None:
        """Call listeners after each call of their modules, behind other listeners: all, or those with the indices
        `which`. They must be off."""
        if which is None and self._once and self._unchanged() and _listened.keys().isdisjoint(self._keys):
            _listened.update(zip(self._keys, self._alone, strict=True))
            for kind, number in self._classes.items():
                _patch(kind, number)
            return
        for key, alone, own in self._chosen(which):
            present = _listened.get(key)
            if present is None:
                alone.after = own
                _add(alone)
            else:
                present.after += own

    def off(self, which: Iterable[int] | None = None) -> None:
        """Stop calling them; likewise."""
        if which is None and self._once and self._unchanged() and self._all_alone():
            for key in self._keys:
                del _listened[key]
            for kind, number in self._classes.items():
                _unpatch(kind, number)
            return
        for key, alone, own in self._chosen(which):
            present = _listened.get(key)
            if present is None:
                continue  # a listener that failed is already removed
            if present is alone and alone.after is own and not alone.before:
                _discard(alone)
            else:
                present.drop(*own[0])

    def _unchanged(self) -> bool:
        """Whether no module has other listeners or was compiled: then all are turned on or off together, which for a
        thousand modules takes a third of the time."""
        return (
            all(map(is_, map(_after, self._alone), self._own))
            and not any(map(_before, self._alone))
            and not any(map(contains, map(vars, map(_module, self._alone)), repeat(_ATTRIBUTE)))
        )

    def _all_alone(self) -> bool:
        return all(map(is_, map(_listened.get, self._keys), self._alone))

    def _chosen(self, which: Iterable[int] | None) -> "Iterable[tuple[int, _Listened, Listeners]]":
        return self._entries if which is None else [self._entries[i] for i in which]


def listeners(module: torch.nn.Module) -> list[Any]:
    """The present listeners of `module`."""
    present = _listened.get(id(module))
    return [*present.before, *(listener for listener, _ in present.after)] if present is not None else []


class _Listened:
    """Calls a module and its listeners."""

    __slots__ = ("after", "before", "classes", "compiled", "module")

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module  # held, so that no other module gets its id
        self.classes = _classes_of(module)
        self.before: tuple[Before, ...] = ()
        self.after: Listeners = ()
        self.compiled: Any = None
        """What `module.compile()` made of the module; None for others."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module
        run = self.compiled or module._call_impl
        if not _is_ordinary():
            return run(*args, **kwargs)
        if self.before:
            begun = calling()
            with without_torch_function():
                for before in self.before:
                    try:
                        before(module, args, kwargs)
                    except Exception as error:
                        self._fail(before, None, error)
            called(begun)
        try:
            output = run(*args, **kwargs)
        except BaseException:  # Ctrl-C too: a notebook continues after it
            self._raised(module, args, kwargs)
            raise
        self._returned(module, args, kwargs, output)
        return output

    def _returned(self, module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        begun = calling()
        with without_torch_function():
            for after, always in self.after:
                try:
                    after(module, args, kwargs, output)
                except Exception as error:
                    self._fail(after, always, error)
        called(begun)

    def _raised(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        begun = calling()
        with without_torch_function():
            for after, always in self.after:
                if always:
                    try:
                        after(module, args, kwargs, None)
                    except Exception as error:
                        self._fail(after, always, error)
        called(begun)

    def _fail(self, listener: Any, always: bool | None, error: Exception) -> None:
        self.drop(listener, always)
        message = f"AMPscope no longer listens to {type(self.module).__name__}: {error!r}"
        warnings.warn(message, RuntimeWarning, stacklevel=4)

    def drop(self, listener: Any, always: bool | None) -> None:
        """Remove one listener; with the last one of a class, the descriptor is removed too."""
        if always is None:
            self.before = _without(self.before, listener)
        elif len(self.after) == 1 and self.after[0][0] == listener and self.after[0][1] == always:
            self.after = ()
        else:
            self.after = _without(self.after, (listener, always))
        if not self.before and not self.after and _listened.get(id(self.module)) is self:
            _discard(self)


class _ListenedQuickly(_Listened):
    """Calls a module whose only listener is mostly a `QuickAfter`."""

    __slots__ = ("alone", "quick")

    def __init__(self, module: torch.nn.Module, alone: Listeners, quick: Callable[[Any], bool]) -> None:
        super().__init__(module)
        self.alone = alone
        self.quick = quick

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.after is not self.alone or self.before or not _is_ordinary():
            return super().__call__(*args, **kwargs)
        module = self.module
        try:
            output = (self.compiled or module._call_impl)(*args, **kwargs)
        except BaseException:  # Ctrl-C too: a notebook continues after it
            self._raised(module, args, kwargs)
            raise
        try:
            if self.after is self.alone and self.quick(output):
                return output
        except Exception as error:
            self._fail(*self.alone[0], error)
            return output
        self._returned(module, args, kwargs, output)
        return output


class _Descriptor:
    """Replaces `_compiled_call_impl` of a class. It has no `__set__`, so `module.compile()` still sets its own."""

    def __get__(self, module: torch.nn.Module | None, owner: type | None = None) -> _Listened | None:
        if is_compiling():
            return None
        return _listened.get(id(module))

    def __reduce__(self) -> Any:
        return type(None), ()  # a class that is pickled by value has torch's own None


_DESCRIPTOR = _Descriptor()  # always the same object, so that guards of compiled graphs on it still match


def _of(module: torch.nn.Module) -> _Listened:
    """The entry of the module; a new one if it has none."""
    present = _listened.get(id(module))
    if present is None:
        present = _Listened(module)
        _add(present)
    return present


def _classes_of(module: torch.nn.Module) -> tuple[type, ...]:
    """The class of a module, and the one that a lazy module gets in its first call."""
    later = getattr(type(module), "cls_to_become", None)
    return (type(module), later) if isinstance(later, type) else (type(module),)


def _add(listened: _Listened) -> None:
    _listened[id(listened.module)] = listened
    own = vars(listened.module)
    if (compiled := own.get(_ATTRIBUTE)) is not None:
        listened.compiled, own[_ATTRIBUTE] = compiled, listened
    for kind in listened.classes:
        _patch(kind, 1)


def _discard(listened: _Listened) -> None:
    del _listened[id(listened.module)]
    own = vars(listened.module)
    if own.get(_ATTRIBUTE) is listened:
        own[_ATTRIBUTE] = listened.compiled
    listened.compiled = None
    for kind in listened.classes:
        _unpatch(kind, 1)


def _patch(kind: type, number: int) -> None:
    """That number of modules more need the patch of a class."""
    if kind not in _patched:
        patches = Patches()
        patches.wrap(kind, _ATTRIBUTE, lambda _: _DESCRIPTOR)
        _patched[kind] = patches, [0]
    _patched[kind][1][0] += number


def _unpatch(kind: type, number: int) -> None:
    """That number of modules no longer need it."""
    patches, count = _patched[kind]
    count[0] -= number
    if not count[0]:
        del _patched[kind]
        patches.restore()


def _without(among: tuple[Any, ...], one: Any) -> tuple[Any, ...]:
    if one not in among:
        return among
    place = among.index(one)
    return among[:place] + among[place + 1 :]


_read_fx_tracing: Callable[[], bool] | None = getattr(_symbolic_trace, "_get_is_fx_tracing", None)
"""In torch 2.15 torch.fx has a variable per thread, which this function reads; up to 2.13 it is one variable."""
_tracing_state = torch._C._get_tracing_state


def _is_ordinary() -> bool:
    """Whether modules are called to compute, not to be traced."""
    traces: Any = _symbolic_trace._is_fx_tracing_flag if _read_fx_tracing is None else _read_fx_tracing()
    if traces or _tracing_state() is not None:
        return False
    if "torch._dynamo.eval_frame" not in sys.modules:
        return True
    compiler = eval_frame.set_eval_frame(None)
    if compiler is None:
        return True
    eval_frame.set_eval_frame(compiler)  # after a graph break, code runs as Python, and functions it calls are compiled
    return False


for _function in (_Listened.__call__, _ListenedQuickly.__call__, _Descriptor.__get__, _is_ordinary):
    not_compiled(_function)
