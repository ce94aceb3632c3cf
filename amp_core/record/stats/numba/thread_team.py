# mypy: disable-error-code="import-untyped"
"""Compiled functions on the threads that torch itself computes with.

    >>> together(measure_singles, address, 2)   # two threads run measure_singles(address), this one among them

torch's threads spin for a while after each operation, waiting for the next. Other threads would compete with them for
the cores, which costs as much as they gain on anything shorter than a millisecond; torch's own start at once.
`GOMP_parallel`, the entry point that compilers use, reaches them in both GNU's and LLVM's OpenMP. Plain Python threads
replace them if torch was built without OpenMP (on Windows and macOS), and in a forked process, which does not inherit
them; the compiled functions release the GIL.
"""

import ctypes
import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from numba import types

_SIGNATURE = types.none(types.int64)
_live_steps: tuple[int, int, ThreadPoolExecutor] | None = None  # process, threads, pool: a forked child needs its own


def together(function: Any, address: int, threads: int) -> None:
    """Call a `kept` function of a single int64 on that many threads; returns when all are done."""
    team = _team(os.getpid())
    if team is not None:
        team(_entry(function), address, threads, 0)
        return
    others = [_threads(threads - 1).submit(function, address) for _ in range(threads - 1)]
    function(address)
    for other in others:
        other.result()


@functools.cache
def _team(process: int) -> Callable[[int, int, int, int], None] | None:
    """The function that runs the code at an address, with a pointer, on several threads; looked up once per process."""
    if process != _HERE:
        return None
    try:
        parallel: Any = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")).GOMP_parallel
    except (OSError, AttributeError):  # the library or the function is missing
        return None
    parallel.argtypes, parallel.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None
    return parallel  # type: ignore[no-any-return]


_HERE = os.getpid()


@functools.cache
def _entry(function: Any) -> int:
    """The address of a compiled function, for C."""
    compiled = function.get_compile_result(_SIGNATURE)
    return int(compiled.library.get_pointer_to_function(compiled.fndesc.llvm_cfunc_wrapper_name))


def _threads(count: int) -> ThreadPoolExecutor:
    global _live_steps
    if _live_steps is None or _live_steps[:2] != (os.getpid(), count):
        if _live_steps is not None and _live_steps[0] == os.getpid():
            _live_steps[2].shutdown(wait=False)
        _live_steps = (os.getpid(), count, ThreadPoolExecutor(count, thread_name_prefix="ampscope-measure"))
    return _live_steps[2]
