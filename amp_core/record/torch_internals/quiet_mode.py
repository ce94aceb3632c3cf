"""A `TorchDispatchMode` that only looks: what runs under it runs as it would without.

    class Counting(QuietMode):
        def saw(self, func, args, kwargs, out):
            self.count += 1

Any other mode changes two things. What `torch.compile` has compiled is run uncompiled under it, and compiled again
afterwards. And an operator of `torch.library.custom_op` that calls others from inside calls them with autocast off,
since all that comes before a mode in torch's dispatcher is switched off within it.

Some of torch's own operators ask whether a mode is active and then take another way to the same result. Of the samples
that torch 2.13 tests its operators by (2,414 calls and 1,449 backward passes on a CPU, under autocast) these differ,
most in the last bits: `pinv`, `lstsq`, singular values or eigenvalues without vectors, and the gradients of `prod` and
of the value of `masked_fill`.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from amp_core.hardware.autocast_ops import policy
from amp_core.record.backends import BACKENDS
from amp_core.record.torch_internals.compiling import within_compiled

_AUTOCAST = {kind: getattr(torch._C.DispatchKey, f"Autocast{kind.upper()}") for kind in BACKENDS}
_ABOVE_BILINEAR = tuple(kind for kind in BACKENDS if policy("bilinear", kind) is None)
"""Device types whose list has not `bilinear`, but what it does its work with."""
_TORCHS_OWN = ("aten", "prim", "prims", "c10d", "_c10d_functional", "higher_order", "fsdp")
"""Libraries of operators that do their work below autocast."""


class QuietMode(TorchDispatchMode):
    """Hands every operator to `on_op` after it has run."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let what is compiled stay compiled."""
        return True

    def leave(self) -> bool:
        """Leave the mode where that ends no other and lasts. Otherwise it stays, and False says to come again later.

        A mode entered since would be ended in its place, and autograd and compiled code put back, when they are done,
        the modes that were active when they began.
        """
        if torch._C._current_graph_task_id() != -1 or within_compiled():
            return False
        stack = _get_current_dispatch_mode_stack()
        if stack and stack[-1] is not self:
            return False
        if stack:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        return True

    def on_op(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        """Take note of an operator that has run."""
        raise NotImplementedError

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kinds = () if getattr(func, "namespace", "aten") in _TORCHS_OWN else tuple(_AUTOCAST)
        if func is torch.ops.aten._trilinear.default:
            kinds = _ABOVE_BILINEAR
        if kinds:
            with _autocast_of_the_caller(kinds):
                out = func(*args, **kwargs)
        else:
            out = func(*args, **kwargs)
        self.on_op(func, args, kwargs, out)
        return out


@contextmanager
def _autocast_of_the_caller(kinds: Sequence[str]) -> Iterator[None]:
    """Autocast on devices of these types as it was when Python called the operator at hand."""
    with torch._C._RestorePythonTLSSnapshot():  # type: ignore[attr-defined]
        on = [kind for kind in kinds if not torch._C._dispatch_tls_is_dispatch_key_excluded(_AUTOCAST[kind])]
    for kind in on:  # by its first name: the other is wrapped while a step is traced
        torch._C.set_autocast_enabled(kind, True)
    try:
        yield
    finally:
        for kind in on:
            torch._C.set_autocast_enabled(kind, False)
