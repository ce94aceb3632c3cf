# mypy: disable-error-code="attr-defined,call-arg,unreachable,no-any-return,import-untyped"
"""The numba kernel of `gradients.norms` for FP32 tensors on a CPU: all of them in one call.

torch takes 2 µs or more per norm, most of it overhead for small gradients. Squares are summed in FP64, as in `measure`,
so a norm is infinite only if a value is, not if a square exceeds the range of FP32.
"""

from array import array
from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
import torch

from amp_core.record.stats.layout import addresses_of
from amp_core.record.stats.numba.compiled import kept, pointer, prefetch, taken
from amp_core.record.stats.numba.thread_team import together

SHARE = 1 << 17
"""A thread is given no fewer values than this, some 15 µs of work."""

PAGE = 1024
"""Values that are prefetched while as many are squared."""

NEXT, PARTS, COUNT, SUMS, ENTRIES = range(5)
"""EntryPoints of a job: the next part to be taken, of how many; the number of tensors; the address of their sums, those
of one part after those of the one before. After them come the address and the number of values of each tensor."""


def norms_cpu(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The 2-norm of each tensor, as FP64. They are FP32, contiguous and on the CPU."""
    job = array("q", (0, 0, len(tensors), 0))
    job.extend(addresses_of(tensors))
    job.extend(map(torch.Tensor.numel, tensors))
    parts = max(1, min(torch.get_num_threads(), sum(job[ENTRIES + len(tensors) :]) // SHARE))
    sums = np.zeros((parts, len(tensors)))
    job[PARTS], job[SUMS] = parts, sums.ctypes.data
    address = job.buffer_info()[0]
    if parts == 1:
        _add_squares(address)
    else:
        together(_add_squares, address, parts)
    return torch.from_numpy(np.sqrt(sums[0] if parts == 1 else sums.sum(0)))


@kept
def _add_squares(address: Any) -> None:
    """Take parts of the job at `address`, stretches of memory of equal length, until none is left."""
    job = numba.carray(pointer(address), (ENTRIES,), np.int64)
    parts, count = job[PARTS], job[COUNT]
    at = numba.carray(pointer(address + 8 * ENTRIES), (2 * count,), np.int64)
    sums = numba.carray(pointer(job[SUMS]), (parts * count,), np.float64)
    total = at[count:].sum()
    while True:
        part = taken(address)
        if part >= parts:
            return
        begin, end, first = total * part // parts, total * (part + 1) // parts, 0
        for k in range(count):
            low, high = max(begin - first, 0), min(end - first, at[count + k])
            first += at[count + k]
            squares = 0.0
            for start in range(low, high, PAGE):
                stop = min(start + PAGE, high)
                if stop < high:
                    prefetch(at[k] + 4 * stop, 4 * min(PAGE, high - stop))
                elif k + 1 < count and first < end:
                    prefetch(at[k + 1], 4 * min(PAGE, at[count + k + 1], end - first))
                squares += _squares_of(numba.carray(pointer(at[k] + 4 * start), (stop - start,), np.float32))
            if low < high:
                sums[part * count + k] = squares


@numba.njit(nogil=True, fastmath={"reassoc", "nsz"})
def _squares_of(values: Any) -> float:
    total = 0.0
    for i in range(values.size):
        v = np.float64(values[i])
        total += v * v
    return total
