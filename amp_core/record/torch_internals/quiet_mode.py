"""A `TorchDispatchMode` that only observes: operators under it run as they would without it.

    class Counting(QuietMode):
        def on_op(self, func, args, kwargs, out):
            self.count += 1

Any other mode changes two things. Compiled functions run uncompiled under it, and are compiled again afterwards. And an
operator of `torch.library.custom_op` calls other operators with autocast off, since all dispatch keys before the mode's
are excluded within it.

Some of torch's own operators check whether a mode is active and then take another code path. Among the sample inputs of
torch 2.13's operator tests (2,414 calls and 1,449 backward passes on a CPU, under autocast) these differ, most in the
last bits: `pinv`, `lstsq`, singular values or eigenvalues without vectors, and the gradients of `prod` and
of the value of `masked_fill`.
"""

import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import CodeType
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from amp_core.hardware.autocast_ops import policy
from amp_core.record.backends import BACKENDS
from amp_core.record.torch_internals.compiling import within_compiled

_AUTOCAST = {kind: getattr(torch._C.DispatchKey, f"Autocast{kind.upper()}") for kind in BACKENDS}
_ABOVE_BILINEAR = tuple(kind for kind in BACKENDS if policy("bilinear", kind) is None)
"""Device types whose autocast lists lack `bilinear`, but have the operators that it calls."""
_TORCHS_OWN = ("aten", "prim", "prims", "c10d", "_c10d_functional", "higher_order", "fsdp")
"""Operator libraries whose operators run below autocast."""
_CALLING_OTHERS = (torch.ops.aten._transformer_encoder_layer_fwd.default,
                   torch.ops.aten._native_multi_head_attention.default)  # fmt: skip
"""Torch's own operators that call others, which autocast handles: what encoders run in an evaluation."""


class QuietMode(TorchDispatchMode):
    """Hands every operator to `on_op` after it has run."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._in_inference_mode = False
        self._thread = 0

    def __enter__(self) -> Self:
        self._in_inference_mode = torch.is_inference_mode_enabled()
        self._thread = threading.get_ident()
        return super().__enter__()  # type: ignore[no-any-return, no-untyped-call]

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled functions stay compiled."""
        return True

    def leave(self) -> bool:
        """Leave the mode if that is safe and lasting. Otherwise it stays, and False means to try again later.

        A mode that was entered since would be left in its place; and autograd and compiled code restore, when they
        return, the modes that were active when they began. At the end of an inference mode, and of a compiled function
        that runs in eager mode, torch restores the dispatch keys of its beginning: with the key of a mode that is not
        there any more, operators fail. Each thread has its own modes.
        """
        if threading.get_ident() != self._thread:
            return False
        if torch._C._current_graph_task_id() != -1 or within_compiled() or _calls_compiled():
            return False
        if torch.is_inference_mode_enabled() != self._in_inference_mode:
            return False
        stack = _get_current_dispatch_mode_stack()
        if stack and stack[-1] is not self:
            return False
        if stack:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        return True

    def on_op(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        """Called with each operator after it has run."""
        raise NotImplementedError

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        own = getattr(func, "namespace", "aten") in _TORCHS_OWN and func not in _CALLING_OTHERS
        kinds = () if own else tuple(_AUTOCAST)
        if func is torch.ops.aten._trilinear.default:
            kinds = _ABOVE_BILINEAR
        if kinds:
            with _autocast_of_the_caller(kinds):
                out = func(*args, **kwargs)
        else:
            out = func(*args, **kwargs)
        self.on_op(func, args, kwargs, out)
        return out


def _calls_compiled() -> bool:
    """Whether a function that `torch.compile` returned is among the callers.

    Functions that `torch.compiler.disable` returned are none: they restore no dispatch keys. Once something was
    compiled in a process, torch disables the steps of some optimizers, such as LBFGS.
    """
    dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")
    frame = sys._getframe(1) if dynamo is not None else None
    compiled = () if frame is None else dynamo._TorchDynamoContext.__call__.__code__.co_consts
    wrappers = {id(code) for code in compiled if isinstance(code, CodeType)}
    while frame is not None and id(frame.f_code) not in wrappers:
        frame = frame.f_back
    return frame is not None


def _leave_in_child() -> None:
    """A forked process, such as a worker that loads data, observes nothing: nobody would leave the modes there."""
    while (stack := _get_current_dispatch_mode_stack()) and isinstance(stack[-1], QuietMode):
        stack[-1].__exit__(None, None, None)  # type: ignore[no-untyped-call]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_in_child)


@contextmanager
def _autocast_of_the_caller(kinds: Sequence[str]) -> Iterator[None]:
    """Enable autocast for these device types as it was when Python called the present operator."""
    with torch._C._RestorePythonTLSSnapshot():  # type: ignore[attr-defined]
        on = [kind for kind in kinds if not torch._C._dispatch_tls_is_dispatch_key_excluded(_AUTOCAST[kind])]
    for kind in on:  # torch._C's name: the public one is patched while a step is traced
        torch._C.set_autocast_enabled(kind, True)
    try:
        yield
    finally:
        for kind in on:
            torch._C.set_autocast_enabled(kind, False)
