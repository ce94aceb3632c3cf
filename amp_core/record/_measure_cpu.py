# mypy: disable-error-code="attr-defined,call-arg,unreachable,no-any-return"
"""The numba kernel of `measure` for CPU tensors: one pass over memory, work shared between threads.

Blocks of a few thousand values are read twice while they are in the cache: once for the exponent histogram, which no
compiler vectorises, and once for sums and extremes, which it does. Zeros, subnormals, infinities and NaNs are told
apart afterwards, only in blocks that hold any.

Threads are plain Python threads over kernels that release the GIL: numba's own `parallel=True` starts an OpenMP pool
that a forked DataLoader worker cannot survive.
"""

import itertools
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numba
import numpy as np
import numpy.typing as npt
import torch
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LEADING = 7
BLOCK = 8192
"""Values a block: 32 KiB of float32, about a core's first-level cache."""
CHUNK = 1 << 18
"""Values a task: large enough that handing it to a thread costs nothing, small enough to share work evenly."""
ALONE = 1 << 17
"""Below so many values in all, threads cost more than they save."""

_pool: tuple[int, int, ThreadPoolExecutor] | None = None  # process, threads, pool: a forked child makes its own


def measure_cpu(flat: Sequence[torch.Tensor], low: Sequence[int], bins: Sequence[int]) -> list[torch.Tensor]:
    """Measure contiguous float32 or float64 CPU tensors.

    `low[i]` is the lowest exponent counted for tensor i and `bins[i]` how many from there; a tensor widened from
    float16 has no others. Returns packed vectors as `amp_core.record.measure` describes them.
    """
    sizes = [LEADING + n for n in bins]
    ends = list(itertools.accumulate(sizes))
    packed = np.zeros(ends[-1] if ends else 0)
    into = packed.ctypes.data
    small: list[_Task] = []
    large: list[_Task] = []
    merges: list[tuple[int, npt.NDArray[np.float64]]] = []
    for i, tensor in enumerate(flat):
        n, address, double = tensor.numel(), tensor.data_ptr(), tensor.dtype == torch.float64
        if n <= CHUNK:
            small.append(_Task(address, n, double, low[i], into + 8 * (ends[i] - sizes[i])))
            continue
        parts = np.zeros((-(-n // CHUNK), sizes[i]))
        step = CHUNK * (8 if double else 4)
        for k in range(len(parts)):
            row = parts.ctypes.data + k * parts.strides[0]
            large.append(_Task(address + k * step, min(CHUNK, n - k * CHUNK), double, low[i], row))
        merges.append((i, parts))
    _share(large + small)
    for i, parts in merges:
        whole = packed[ends[i] - sizes[i] : ends[i]]
        whole += parts.sum(axis=0)
        whole[3] = parts[:, 3].max()
        smallest = np.where(parts[:, 4] > 0, parts[:, 4], np.inf).min()
        whole[4] = smallest if smallest < np.inf else 0.0
    return list(torch.from_numpy(packed).split(sizes))


class _Task(NamedTuple):
    """A stretch of values and the address of the packed vector they are measured into."""

    address: int
    length: int
    double: bool
    low: int
    out: int


def _share(tasks: list[_Task]) -> None:
    """Run the tasks, on as many threads as torch uses where there is enough to do."""
    threads = min(torch.get_num_threads(), len(tasks))
    if threads < 2 or sum(task.length for task in tasks) < ALONE:
        _run(tasks)
        return
    futures = [_threads(threads - 1).submit(_run, tasks[k::threads]) for k in range(1, threads)]
    _run(tasks[::threads])
    for future in futures:
        future.result()


def _run(tasks: list[_Task]) -> None:
    for double, kernel, lowest in ((False, _measure32, -149), (True, _measure64, -1074)):
        part = [task for task in tasks if task.double is double]
        if part:
            columns = zip(*((t.address, t.length, t.low - lowest, t.out) for t in part), strict=True)
            kernel(*(np.array(column, dtype=np.int64) for column in columns))


def _threads(count: int) -> ThreadPoolExecutor:
    global _pool
    if _pool is None or _pool[:2] != (os.getpid(), count):
        if _pool is not None and _pool[0] == os.getpid():
            _pool[2].shutdown(wait=False)
        _pool = (os.getpid(), count, ThreadPoolExecutor(count, thread_name_prefix="ampscope-measure"))
    return _pool[2]


@intrinsic
def _pointer(typingctx: Any, address: Any) -> Any:
    """An int64 as a pointer, so that one call can take any number of tensors."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), codegen


def _kernel(uint: Any, real: Any, mantissa: int) -> Any:
    """The kernel for one width: `uint` and `real` are its NumPy types, `mantissa` its stored bits.

    It takes four int64 vectors: addresses, lengths, by how many exponents each packed vector begins above the lowest
    of this width, and addresses of the packed vectors. An exponent field f >= 1 stands `mantissa - 1 + f` above the
    lowest subnormal exponent.
    """
    fields = 256 if mantissa == 23 else 2048
    special = uint((fields - 1) << mantissa)  # the bits of infinity; everything above is NaN
    magnitude = uint((1 << (8 * uint().itemsize - 1)) - 1)
    field = uint(mantissa)
    one = uint(1)
    none = np.int64(-1)

    @numba.njit(nogil=True, cache=True, fastmath={"reassoc", "nsz"})
    def kernel(where: Any, count: Any, skip: Any, out: Any) -> None:
        for k in range(where.size):
            n = count[k]
            bits = numba.carray(_pointer(where[k]), (n,), uint)
            values = numba.carray(_pointer(where[k]), (n,), real)
            row = numba.carray(_pointer(out[k]), (LEADING + fields + mantissa,), np.float64)
            first = LEADING - skip[k]  # where the lowest exponent of this width would be counted
            h = np.zeros((4, fields), np.int64)
            top, bottom = uint(0), ~uint(0)
            total, squares = 0.0, 0.0
            for start in range(0, n, BLOCK):
                stop = min(n, start + BLOCK)
                even = start + ((stop - start) // 4) * 4
                for i in range(start, even, 4):  # four histograms, so that equal neighbours do not wait for each other
                    h[0, (bits[i] & magnitude) >> field] += 1
                    h[1, (bits[i + 1] & magnitude) >> field] += 1
                    h[2, (bits[i + 2] & magnitude) >> field] += 1
                    h[3, (bits[i + 3] & magnitude) >> field] += 1
                for i in range(even, stop):
                    h[0, (bits[i] & magnitude) >> field] += 1
                block_top, block_bottom = uint(0), ~uint(0)
                block_total, block_squares = 0.0, 0.0
                for i in range(start, stop):
                    a = bits[i] & magnitude
                    block_top = max(block_top, a)
                    block_bottom = min(block_bottom, uint(a - one))  # zero wraps round and never is the smallest
                    v = abs(np.float64(values[i]))
                    block_total += v
                    block_squares += v * v
                if block_top >= special:  # infinities or NaNs: once more, without them
                    block_top, block_bottom = uint(0), ~uint(0)
                    block_total, block_squares = 0.0, 0.0
                    for i in range(start, stop):
                        a = bits[i] & magnitude
                        if a == special:
                            row[1] += 1
                        elif a > special:
                            row[2] += 1
                        else:
                            block_top = max(block_top, a)
                            block_bottom = min(block_bottom, uint(a - one))
                            v = abs(np.float64(values[i]))
                            block_total += v
                            block_squares += v * v
                top, bottom = max(top, block_top), min(bottom, block_bottom)
                total += block_total
                squares += block_squares
            for j in range(1, fields - 1):
                found = h[0, j] + h[1, j] + h[2, j] + h[3, j]
                if found > 0:
                    row[first + mantissa - 1 + j] = found
            low = h[0, 0] + h[1, 0] + h[2, 0] + h[3, 0]
            if low > 0:  # zeros and subnormals share the field 0
                zeros = 0
                for i in range(n):
                    zeros += (bits[i] & magnitude) == 0
                row[0] = zeros
                if zeros < low:
                    for i in range(n):
                        a = bits[i] & magnitude
                        if a != 0 and (a >> field) == 0:
                            exponent = none
                            while a != 0:
                                a >>= one
                                exponent += 1
                            row[first + exponent] += 1
            row[3] = _as_real(top)
            row[4] = _as_real(uint(bottom + one)) if bottom != ~uint(0) else 0.0
            row[5] = total
            row[6] = squares

    @numba.njit(nogil=True, cache=True)
    def _as_real(pattern: Any) -> Any:
        cell = np.empty(1, uint)
        cell[0] = pattern
        return np.float64(cell.view(real)[0])

    return kernel


_measure32 = _kernel(np.uint32, np.float32, 23)
_measure64 = _kernel(np.uint64, np.float64, 52)
