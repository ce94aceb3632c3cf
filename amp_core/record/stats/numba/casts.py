# mypy: disable-error-code="attr-defined,call-arg,unreachable,no-any-return,import-untyped"
"""The numba kernel of `casts.cast.losses_plain`, for CPU tensors: one pass over the values before and after a cast.

Squares and squared errors go into buffers that torch adds up, so that the sums are torch's own to the last bit.
"""

import numba
import numpy as np
import torch

from amp_core.record.stats.numba.compiled import kept, pointer


def losses_cpu(values: torch.Tensor, held: torch.Tensor, data: torch.Tensor | None, top: float) -> torch.Tensor:
    """`losses_plain`."""
    tensors = [t.detach().to(torch.float32).contiguous() for t in (values, held, held if data is None else data)]
    squares, errors = torch.empty(2, values.numel(), dtype=torch.float64).unbind()
    counts = np.zeros(6)
    addresses = [counts.ctypes.data, *(t.data_ptr() for t in (*tensors, squares, errors))]
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
    nonzero, lost, saturated = 0, 0, 0
    amax, mass, lost_mass = np.float32(0), 0.0, 0.0
    ceiling = np.float32(1 + 2.0**-20)
    for i in range(size):
        value = values[i]
        if not np.isfinite(value):
            squares[i] = 0.0
            errors[i] = 0.0
            continue
        after = held[i]
        magnitude = abs(value)
        amax = max(amax, magnitude)
        wide = np.float64(value)
        error = np.float64(after) - wide
        squares[i] = wide * wide
        errors[i] = error * error
        mass += magnitude
        if magnitude > 0:
            nonzero += 1
            if after == 0:
                lost += 1
                lost_mass += magnitude
            elif abs(data[i]) >= top and magnitude > abs(after) * ceiling:
                saturated += 1
    counts[0], counts[1], counts[2] = amax, nonzero, lost
    counts[3], counts[4], counts[5] = mass, lost_mass, saturated
