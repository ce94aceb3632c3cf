# mypy: disable-error-code="attr-defined,call-arg,unreachable,no-any-return,import-untyped"
"""The numba kernel of `blocks.distances_plain`, for CPU tensors: each row of the matrix at a time, while it is in the
cache.

What belongs to one distance lies side by side, so that LLVM adds it with one vector instruction. On one thread: it runs
inside of forward and backward, and the operands of most layers are small.
"""

from typing import Any

import numpy as np
import torch

from amp_core.quantization import BINS, EIGHTHS, FINE_OCTAVES, OCTAVES
from amp_core.record.stats.numba.compiled import kept

_SUMS = 4
_FINE = EIGHTHS * FINE_OCTAVES
_COARSE = _FINE - FINE_OCTAVES
_LAST = OCTAVES - 1


def distances_cpu(
    magnitude: torch.Tensor, factor: torch.Tensor, top: torch.Tensor, rows: int, columns: int, exponent: int
) -> torch.Tensor:
    """`blocks.distances_plain`."""
    sums = np.zeros((2, BINS + 1, _SUMS))
    arrays = [t.contiguous().numpy() for t in (magnitude, factor, top)]
    _add_distances(*arrays, rows, columns, exponent, sums)
    return torch.from_numpy(np.ascontiguousarray((sums[0] + sums[1])[:BINS].T))


@kept
def _add_distances(magnitude: Any, factor: Any, top: Any, rows: int, columns: int, exponent: int, sums: Any) -> None:
    """Add 1, the top and its square at the distance of each value, and ties by octave. Neighbours alternate between
    two tables, so that one addition need not wait for the one before."""
    height, width = magnitude.shape
    scaled = np.empty(width, np.float32)
    bits = scaled.view(np.int32)
    places = np.empty(width, np.int32)
    highest = np.int32(((exponent + 127) << 3) | 7)
    last = np.int32(_LAST)
    for i in range(height):
        values, factors, tops = magnitude[i], factor[i // rows], top[i // rows]
        if columns == 1:
            for j in range(width):
                scaled[j] = values[j] * factors[j]
        else:
            for b in range(factors.size):
                f = factors[b]
                for j in range(b * columns, min((b + 1) * columns, width)):
                    scaled[j] = values[j] * f
        ties = 0
        for j in range(width):
            eighths = highest - (bits[j] >> np.int32(20))
            octave = min(eighths >> np.int32(3), last)
            place = max(eighths if eighths < _FINE else octave + np.int32(_COARSE), np.int32(0))
            places[j] = place if values[j] > 0 else np.int32(BINS)
            ties += (bits[j] & np.int32(0x7FFFFF)) == 0 and values[j] > 0
        for j in range(width):
            t = tops[j // columns]
            side, place = j & 1, places[j]
            sums[side, place, 0] += 1.0
            sums[side, place, 1] += t
            sums[side, place, 2] += t * t
        if ties:
            for j in range(width):
                if (bits[j] & np.int32(0x7FFFFF)) == 0 and values[j] > 0:
                    octave = (highest - (bits[j] >> np.int32(20))) >> np.int32(3)
                    sums[0, max(min(octave, last), np.int32(0)), 3] += 1.0
