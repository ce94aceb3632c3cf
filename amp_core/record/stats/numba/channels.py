# mypy: disable-error-code="attr-defined,call-arg,no-any-return,import-untyped,unreachable"
"""The numba kernel of `channel_largest` for CPU tensors: one pass, and nothing as large as the tensor is made.

The bits of positive floats have the same order as their values, and NaN stands above all: so the largest magnitude is
found among integers, as many at a time as the processor's vectors hold, whatever the float's width.
"""

from typing import Any

import numba
import numpy as np
import torch

from amp_core.record.stats.numba.compiled import kept, pointer


def channels_cpu(values: torch.Tensor, channels: int, inner: int, into: torch.Tensor | None = None) -> torch.Tensor:
    """The largest magnitude of each channel of a contiguous tensor whose shape ends in `channels` × `inner` values.

    With `into`, which has its dtype, the larger ones of these and of what that holds, in its place.
    """
    if into is None:
        into = torch.zeros(channels, dtype=values.dtype)
    if inner * channels:
        largest = largest_of_halves if values.dtype.itemsize == 2 else largest_of_singles
        largest(values.data_ptr(), values.numel() // (channels * inner), channels, inner, into.data_ptr())
    return into


@kept
def largest_of_halves(address: Any, outer: Any, channels: Any, inner: Any, into: Any) -> None:
    """`channels_cpu` for 16 bits, with addresses for tensors."""
    values = numba.carray(pointer(address), (outer * channels * inner,), np.int16)
    _largest(values, outer, channels, inner, numba.carray(pointer(into), (channels,), np.int16), np.int16(0x7FFF))


@kept
def largest_of_singles(address: Any, outer: Any, channels: Any, inner: Any, into: Any) -> None:
    """The same for 32 bits."""
    values = numba.carray(pointer(address), (outer * channels * inner,), np.int32)
    _largest(values, outer, channels, inner, numba.carray(pointer(into), (channels,), np.int32), np.int32(0x7FFFFFFF))


@numba.njit(nogil=True)
def _largest(values: Any, outer: int, channels: int, inner: int, maxima: Any, magnitude: Any) -> None:
    """Signed integers do for magnitudes, whose highest bit is never set."""
    if inner == 1:
        for o in range(outer):
            row = values[o * channels : (o + 1) * channels]
            for c in range(channels):
                a = row[c] & magnitude
                maxima[c] = a if a > maxima[c] else maxima[c]
        return
    for o in range(outer):
        for c in range(channels):
            start = (o * channels + c) * inner
            row = values[start : start + inner]
            top = maxima[c]
            for i in range(inner):
                a = row[i] & magnitude
                top = a if a > top else top
            maxima[c] = top
