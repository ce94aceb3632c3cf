# mypy: disable-error-code="attr-defined,call-arg,no-any-return,import-untyped,unreachable"
"""The numba kernel of `channel_largest` for CPU tensors: one pass, without a temporary as large as the tensor.

The bits of positive floats sort like their values, with NaN above all. So the largest magnitude is the largest integer,
compared with vector instructions whatever the float's width.
"""

from typing import Any

import numba
import numpy as np
import torch

from amp_core.record.stats.layout import addresses_of
from amp_core.record.stats.numba.compiled import kept, pointer


def channels_cpu(values: torch.Tensor, channels: int, inner: int, into: torch.Tensor | None = None) -> torch.Tensor:
    """The largest magnitude of each channel of a contiguous tensor whose shape ends in `channels` × `inner` values.

    With `into`, of the same dtype, the elementwise maximum of it and the new values, in place.
    """
    if into is None:
        into = torch.zeros(channels, dtype=values.dtype, device="cpu")
    if inner * channels:
        largest = largest_of_halves if values.dtype.itemsize == 2 else largest_of_singles
        address, target = addresses_of((values, into))
        largest(address, values.numel() // (channels * inner), channels, inner, target)
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
    """Magnitudes never have the sign bit set, so signed integers compare correctly."""
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
