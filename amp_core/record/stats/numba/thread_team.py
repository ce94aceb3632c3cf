# mypy: disable-error-code="import-untyped"
"""Compiled functions on the threads that torch itself computes with.

    >>> together(measure_singles, address, 2)   # measure_singles(address) is run by two threads, this one among them

torch's threads wait busily for a while after each operation, in the hope of another. Threads of our own would have to
take the cores from them, which costs as much as is won on anything below a millisecond; torch's own begin at once. They
are reached as compilers reach them: through `GOMP_parallel`, which GNU's OpenMP and LLVM's both have. Where torch was
built without (on Windows and macOS), and in a process forked from one in which they ran, where they are gone, plain
Python threads do, as the compiled functions let go of the GIL.
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
_live_steps: tuple[int, int, ThreadPoolExecutor] | None = None  # process, threads, pool: a forked child makes its own


def together(function: Any, address: int, threads: int) -> None:
    """Call a `kept` function of one int64, and of nothing else, on so many threads; returns when all are done."""
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
    """Runs the code at an address with a pointer, on a number of threads; looked for once in a process."""
    if process != _HERE:
        return None
    try:
        parallel: Any = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")).GOMP_parallel
    except (OSError, AttributeError):  # no such library, or no such function in it
        return None
    parallel.argtypes, parallel.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None
    return parallel  # type: ignore[no-any-return]


_HERE = os.getpid()


@functools.cache
def _entry(function: Any) -> int:
    """The address at which C finds a compiled function."""
    compiled = function.get_compile_result(_SIGNATURE)
    return int(compiled.library.get_pointer_to_function(compiled.fndesc.llvm_cfunc_wrapper_name))


def _threads(count: int) -> ThreadPoolExecutor:
    global _live_steps
    if _live_steps is None or _live_steps[:2] != (os.getpid(), count):
        if _live_steps is not None and _live_steps[0] == os.getpid():
            _live_steps[2].shutdown(wait=False)
        _live_steps = (os.getpid(), count, ThreadPoolExecutor(count, thread_name_prefix="ampscope-measure"))
    return _live_steps[2]
