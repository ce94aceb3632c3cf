"""The module, the autocast region and the call site of an operator.

    modules, regions = Modules(model), Regions(("cpu",))
    modules.attach(), regions.attach()
    modules.here(), regions.now("cpu"), call_site()       # "blocks.0.fc", Region("bfloat16", False), CallSite(…)

Backward runs in C++, but each autograd node has a sequence number that increases with every node, so its module is the
one that was running when that number was assigned.
"""

import sys
import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.amp.autocast_mode import autocast

from amp_core.record.model import own
from amp_core.record.model.parameters import named_modules
from amp_core.record.stats.layout import dtype_name
from amp_core.record.torch_internals import patched_functions
from amp_core.record.torch_internals.module_calls import after_call, before_call
from amp_core.record.torch_internals.patches import Patches

_NOTHING: Callable[[], None] = lambda: None  # noqa: E731


class Modules:
    """Tracks the running module of each thread by hooks on every module. Names are those of `named_modules()`."""

    def __init__(self, model: torch.nn.Module, changed: Callable[[], None] = _NOTHING) -> None:
        self._model = model
        self._changed = changed
        self._names = {id(m): n for n, m in named_modules(model)}
        self._owners: dict[int, str] = {}
        for name, module in named_modules(model):
            for parameter in own.parameters(module, recurse=False):
                self._owners.setdefault(id(parameter), name)
        self._handles: list[Any] = []
        self._stacks: dict[int, list[str]] = {}
        self._marks: dict[int, tuple[list[int], list[str | None]]] = {}
        self._main = 0
        self._first = True

    def attach(self) -> None:
        """Track from now on: to be called before the model's forward, or in a hook on it that runs earlier."""
        self._main = threading.get_ident()
        self._stacks[self._main] = [""]
        self._first = True
        self._mark()
        for module in own.modules(self._model):
            self._handles += [
                before_call(module, self._enter),
                # A recomputed forward may end with an exception: checkpointing stops early on purpose.
                after_call(module, self._leave, always=True),
            ]

    def detach(self) -> None:
        """Detach from the modules."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def here(self) -> str | None:
        """The innermost running module on this thread; empty in the model's own forward, None outside of it."""
        stack = self._stacks.get(threading.get_ident())
        return stack[-1] if stack else None

    def of_node(self, node: Any) -> str | None:
        """The module whose forward made an autograd node, or that owns the parameter it accumulates into."""
        variable = getattr(node, "variable", None)
        if variable is not None:
            return self._owners.get(id(variable))
        number = node._sequence_nr()
        for thread in (self._main, threading.get_ident()):
            starts, names = self._marks.get(thread, ([], []))
            if starts and starts[0] <= number:
                return names[bisect_right(starts, number) - 1]
        return None

    def is_parameter(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` is a parameter of the model."""
        return id(tensor) in self._owners

    def _enter(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        name = self._names[id(module)]
        if name == "" and self._first:
            self._first = False
        else:
            self._stacks.setdefault(threading.get_ident(), []).append(name)
        self._mark()

    def _leave(self, module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if module is self._model:
            self._first = False
        stack = self._stacks.get(threading.get_ident())
        if stack:
            stack.pop()
        self._mark()

    def _mark(self) -> None:
        """Assign new autograd nodes to the running module from now on."""
        starts, names = self._marks.setdefault(threading.get_ident(), ([], []))
        starts.append(torch._C._autograd._get_sequence_nr())
        names.append(self.here())
        self._changed()


class Region(NamedTuple):
    """The autocast region around an operator."""

    dtype: str | None
    """Its dtype; None if autocast is off."""
    disabled: bool
    """Whether it is off inside a region that is on."""


class Regions:
    """Tracks the autocast regions of each thread. Inside an operator torch itself reports autocast as off."""

    def __init__(self, device_types: Sequence[str], cleared: Callable[[], None] = _NOTHING) -> None:
        self._types = tuple(dict.fromkeys(device_types))
        self._cleared = cleared
        self._stacks: dict[int, list[dict[str, str | None]]] = {}
        self._main = 0
        self._patches = Patches()
        self._entries = patched_functions.method_of_class(autocast, "__enter__")

    def attach(self) -> None:
        """Track from now on, starting with the current state."""
        self._main = threading.get_ident()
        self._stacks[self._main] = [self._read()]
        self._entries.listen(self._on_entry)
        self._patches.wrap(autocast, "__exit__", self._around_exit)
        # A region that was entered earlier does not call the patched `__exit__`, but it calls these by name.
        for name in ("set_autocast_enabled", "set_autocast_dtype"):
            self._patches.wrap(torch, name, self._around_setting)
        self._patches.wrap(torch, "clear_autocast_cache", self._around_clearing)

    def detach(self) -> None:
        """Restore torch's functions."""
        self._entries.unlisten(self._on_entry)
        self._patches.restore()

    def now(self, device_type: str) -> Region:
        """The region on this thread; an autograd thread has that of the thread that called backward."""
        stack = self._stack()
        dtype = stack[-1].get(device_type)
        return Region(dtype, dtype is None and any(outer.get(device_type) for outer in stack[:-1]))

    def _stack(self) -> list[dict[str, str | None]]:
        thread = threading.get_ident()
        if thread not in self._stacks:
            self._stacks[thread] = [self._stacks[self._main][-1]]
        return self._stacks[thread]

    def _read(self) -> dict[str, str | None]:
        return {
            kind: dtype_name(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else None
            for kind in self._types
        }

    def _on_entry(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        stack = self._stack()
        stack.append(stack[-1])

    def _around_exit(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def __exit__(region: Any, *args: Any) -> Any:  # noqa: N807
            result = original(region, *args)
            stack = self._stack()
            if len(stack) > 1:
                stack.pop()
            stack[-1] = self._read()
            return result

        return __exit__

    def _around_setting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def set_it(*args: Any) -> Any:
            result = original(*args)
            self._stack()[-1] = self._read()
            return result

        return set_it

    def _around_clearing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def clear_autocast_cache() -> Any:
            self._cleared()
            return original()

        return clear_autocast_cache


class CallSite(NamedTuple):
    """The line of Python that called an operator."""

    key: tuple[int, int]
    """Identifies a call: operators with the same key belong to one call of torch."""
    function: str | None
    """The function of `torch.nn.functional` that was called, where it is one written in Python."""
    phase: str | None
    """`optimizer` where the code is an optimizer's, a scaler's or a clipping function's, `backward` in autograd's."""
    engine: bool
    """Whether autograd's C++ engine called it, in backward."""
    module: str = ""
    """The Python module of that line, such as `torch.nn.modules.linear` for a layer; empty on an autograd thread."""


_PLUMBING = ("torch._dynamo.eval_frame", "torch._compile", "torch.utils._python_dispatch", __name__)
_OPTIMIZER = ("torch.optim.", "torch.nn.utils.clip_grad")
_SCALER = "torch.amp.grad_scaler"


def call_site(plumbing: Sequence[str] = ()) -> CallSite:
    """The call site of the present operator; frames of the modules in `plumbing` are skipped, as torch's own are."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (name := _module(frame)) in (*_PLUMBING, *plumbing):
        frame = frame.f_back
    if frame is None:  # an autograd thread, on which no Python runs
        return CallSite((0, 0), None, None, True)
    key, module = (id(frame), frame.f_lasti), _module(frame)
    engine = module == "torch.autograd.graph"
    function: str | None = None
    # Also outside of the engine, for example the gradient of the loss itself.
    phase = "backward" if module.startswith("torch.autograd") else None
    look_for_function = True
    while frame is not None:
        name = _module(frame)
        if not name.startswith("torch."):
            break
        if name.startswith(_OPTIMIZER) or (name == _SCALER and frame.f_code.co_name != "scale"):
            return CallSite(key, function, "optimizer", engine, module)
        look_for_function = look_for_function and not name.startswith("torch.nn.modules")
        if look_for_function and function is None and name == "torch.nn.functional":
            function = frame.f_code.co_name
        frame = frame.f_back
    return CallSite(key, function, phase, engine, module)


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))
