# mypy: disable-error-code="attr-defined,call-arg,unreachable,no-any-return,import-untyped"
"""Shared by the numba kernels: a compilation cache, pointers from integers, prefetches, and an atomic counter that
hands parts of a job to threads.

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
def _prefetch_line(typingctx: Any, address: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        int32 = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, int32, int32, int32])
        prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        read, keep, data = ir.Constant(int32, 0), ir.Constant(int32, 3), ir.Constant(int32, 1)
        builder.call(prefetch, [builder.inttoptr(args[0], cgutils.voidptr_t), read, keep, data])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@numba.njit(nogil=True)
def prefetch(address: int, size: int) -> None:
    """Ask the processor to load so many bytes into its caches, without waiting for them.

    Tensors of a few pages lie anywhere in memory. The processor's own prefetching begins anew at each page, so a kernel
    that reads 500 of them would wait for memory half of its time.
    """
    for at in range(address, address + size, _LINE):
        _prefetch_line(at)


_LINE = 64
"""Bytes of a cache line."""


@intrinsic
def taken(typingctx: Any, address: Any) -> Any:
    """Atomically add 1 to the int64 at an address; returns the old value."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        number = ir.IntType(64)
        at = builder.inttoptr(args[0], number.as_pointer())
        return builder.atomic_rmw("add", at, ir.Constant(number, 1), "seq_cst")

    return types.int64(types.int64), codegen
