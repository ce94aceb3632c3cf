# mypy: disable-error-code="attr-defined,call-arg,unreachable,no-any-return,import-untyped"
"""The numba kernel of `casts.cast.losses_plain`, for CPU tensors: one pass over the values before and after a cast.

Squares and squared errors go into buffers that torch adds up, so that the sums are torch's own to the last bit.
"""

from typing import Any

import numba
import numpy as np
import torch

from amp_core.record.stats.host_buffers import host_buffer
from amp_core.record.stats.layout import addresses_of
from amp_core.record.stats.numba.compiled import kept, pointer

CHUNK = 1 << 12
"""Values that are counted together, while they are in the cache, in 32 bits and in any order."""
LARGEST = np.float32(np.finfo(np.float32).max)
CEILING = np.float32(1 + 2.0**-20)


def losses_cpu(values: torch.Tensor, held: torch.Tensor, data: torch.Tensor | None, top: float) -> torch.Tensor:
    """`losses_plain`."""
    tensors = [t.detach().to(torch.float32).contiguous() for t in (values, held, held if data is None else data)]
    squares, errors = host_buffer(2 * values.numel()).view(2, -1).unbind()
    counts = np.zeros(6)
    addresses = [counts.ctypes.data, *addresses_of((*tensors, squares, errors))]
    job = np.array([values.numel(), *addresses], np.int64)
    count_losses(job.ctypes.data, top)
    if data is None:
        counts[[2, 4, 5]] = np.nan
    return torch.cat([torch.from_numpy(counts), torch.stack([squares.sum(), errors.sum()])])


@kept
def count_losses(address: int, top: float) -> None:
    """Count nonzero, lost and saturated values, and write squares and squared errors."""
    job = numba.carray(pointer(address), (7,), np.int64)
    size = job[0]
    counts = numba.carray(pointer(job[1]), (6,), np.float64)
    values = numba.carray(pointer(job[2]), (size,), np.float32)
    held = numba.carray(pointer(job[3]), (size,), np.float32)
    data = numba.carray(pointer(job[4]), (size,), np.float32)
    squares = numba.carray(pointer(job[5]), (size,), np.float64)
    errors = numba.carray(pointer(job[6]), (size,), np.float64)
    for start in range(0, size, CHUNK):
        end = min(start + CHUNK, size)
        _write_squares(values[start:end], held[start:end], squares[start:end], errors[start:end])
        part = _count(values[start:end], held[start:end], data[start:end], np.float32(top))
        counts[0] = max(counts[0], part[0])
        for k in range(1, 6):
            counts[k] += part[k]


@numba.njit(nogil=True)
def _write_squares(values: Any, held: Any, squares: Any, errors: Any) -> None:
    """Squares and squared errors of finite values, 0 for others."""
    for i in range(values.size):
        finite = abs(values[i]) <= LARGEST
        before = np.float64(values[i]) if finite else 0.0
        error = np.float64(held[i]) - before if finite else 0.0
        squares[i] = before * before
        errors[i] = error * error


@numba.njit(nogil=True, fastmath={"reassoc", "nsz"})
def _count(values: Any, held: Any, data: Any, top: Any) -> Any:
    """Largest magnitude; nonzero and lost values; mass of all and of lost ones; saturated values."""
    highest, nonzero, lost, saturated = np.int32(0), np.int32(0), np.int32(0), np.int32(0)
    mass, lost_mass = np.float64(0.0), np.float64(0.0)
    bits = values.view(np.int32)
    for i in range(values.size):  # finite magnitudes are ordered as their bits are
        magnitude = bits[i] & np.int32(0x7FFFFFFF)
        magnitude = magnitude if magnitude < np.int32(0x7F800000) else np.int32(0)
        highest = max(highest, magnitude)
        nonzero += np.int32(magnitude > 0)
        lost += np.int32((magnitude > 0) & (held[i] == 0))
    for i in range(values.size):
        magnitude = abs(values[i])
        after = abs(held[i])
        saturated += np.int32(
            (after > 0) & (abs(data[i]) >= top) & (magnitude > after * CEILING) & (magnitude <= LARGEST)
        )
    for i in range(values.size):
        wide = np.float64(abs(values[i]))
        wide = wide if wide <= LARGEST else np.float64(0.0)
        mass += wide
        lost_mass += wide if held[i] == 0 else np.float64(0.0)
    amax = np.array([highest], np.int32).view(np.float32)[0]
    return np.float64(amax), np.float64(nonzero), np.float64(lost), mass, lost_mass, np.float64(saturated)
