# mypy: disable-error-code="attr-defined,call-arg,unreachable,no-any-return,import-untyped"
"""Shared by the numba kernels: a compilation cache, pointers from integers, and an atomic counter that hands parts of a
job to threads.

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
    """Compile at the first call, and cache the code for other processes if a folder for it can be written."""
    try:
        compiled = numba.njit(nogil=True, cache=True)(function)
    except RuntimeError:  # neither beside this file nor in the home folder can be written
        return numba.njit(nogil=True)(function)
    compiled._cache = _BestEffort(compiled._cache)
    return compiled


class _BestEffort:
    """numba's cache, without its errors: on a full disk, or for a file that a power cut left empty, there is no cached
    code."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def load_overload(self, *of: Any) -> Any:
        try:
            return self._cache.load_overload(*of)
        except Exception:  # unpickling a damaged file may raise any error
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
    """Atomically add 1 to the int64 at an address; returns the old value."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        number = ir.IntType(64)
        at = builder.inttoptr(args[0], number.as_pointer())
        return builder.atomic_rmw("add", at, ir.Constant(number, 1), "seq_cst")

    return types.int64(types.int64), codegen
