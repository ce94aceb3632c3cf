# mypy: disable-error-code="attr-defined,call-arg,unreachable,no-any-return,import-untyped"
"""What our numba kernels share: compiled code that is kept for the next process, numbers taken as addresses,
and parts of a job that are taken by one thread each.

>>> @kept
... def first(address):
...     return numba.carray(pointer(address), (1,), np.float32)[0]
"""

import contextlib
import pickle
from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic


def kept(function: Any) -> Any:
    """Compile when first called, and keep the code for other processes where a folder can be written for that."""
    try:
        compiled = numba.njit(nogil=True, cache=True)(function)
    except RuntimeError:  # neither beside this file nor in the home folder
        return numba.njit(nogil=True)(function)
    compiled._cache = _BestEffort(compiled._cache)
    return compiled


class _BestEffort:
    """A cache that does without, where numba's raises: on a full disk, or over a file that a power cut left empty."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def load_overload(self, *of: Any) -> Any:
        try:
            return self._cache.load_overload(*of)
        except Exception:  # whatever unpickling a damaged file may raise
            return None

    def save_overload(self, *of: Any) -> None:
        with contextlib.suppress(OSError, EOFError, pickle.PickleError):
            self._cache.save_overload(*of)


@intrinsic
def pointer(typingctx: Any, address: Any) -> Any:
    """An int64 as a pointer, so that one call can take any number of tensors."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), codegen


@intrinsic
def taken(typingctx: Any, address: Any) -> Any:
    """Add 1 to the int64 at an address, as no other thread can at the same time; returns what it was."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        number = ir.IntType(64)
        at = builder.inttoptr(args[0], number.as_pointer())
        return builder.atomic_rmw("add", at, ir.Constant(number, 1), "seq_cst")

    return types.int64(types.int64), codegen
