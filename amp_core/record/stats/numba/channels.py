# mypy: disable-error-code="attr-defined,call-arg,no-any-return,import-untyped,unreachable"
"""The numba kernel of `channel_largest` for CPU tensors: one pass, and nothing as large as the tensor is made.

The bits of positive floats have the same order as their values, and NaN stands above all: so the largest magnitude is
found among integers, as many at a time as the processor's vectors hold, whatever the float's width.
"""

from typing import Any

import numba
import torch

from amp_core.record.stats.numba.compiled import kept, pointer

_INTEGERS = {2: torch.int16, 4: torch.int32}


def channels_cpu(values: torch.Tensor, channels: int, inner: int) -> torch.Tensor:
    """The largest magnitude of each channel of a contiguous tensor whose shape ends in `channels` × `inner` values."""
    found = torch.zeros(channels, dtype=values.dtype)
    size = values.dtype.itemsize
    integer = found.view(_INTEGERS[size]).numpy()
    outer = values.numel() // (channels * inner) if channels * inner else 0
    _largest(values.data_ptr(), outer, inner, integer, integer.dtype.type(2 ** (8 * size - 1) - 1))
    return found


@kept
def _largest(address: Any, outer: Any, inner: Any, found: Any, magnitude: Any) -> None:
    """Signed integers do for magnitudes, whose highest bit is never set."""
    channels = found.size
    values = numba.carray(pointer(address), (outer * channels * inner,), found.dtype)
    if inner == 1:
        for o in range(outer):
            row = values[o * channels : (o + 1) * channels]
            for c in range(channels):
                a = row[c] & magnitude
                found[c] = a if a > found[c] else found[c]
        return
    for o in range(outer):
        for c in range(channels):
            start = (o * channels + c) * inner
            row = values[start : start + inner]
            top = found[c]
            for i in range(inner):
                a = row[i] & magnitude
                top = a if a > top else top
            found[c] = top
