# mypy: disable-error-code="untyped-decorator,no-untyped-call,no-untyped-def,import-untyped,import-not-found"
"""The Triton kernel of `channel_largest` for CUDA tensors: one launch, and nothing as large as the tensor is made."""

from typing import Any

import torch
import triton
import triton.language as tl

from amp_core.formats import FORMAT_OF_DTYPE
from amp_core.record.backends import backend_of
from amp_core.record.stats.layout import dtype_name
from amp_core.record.stats.triton.measure import constants, magnitude_bits

ROWS, COLUMNS = 16, 128
"""Values a program reads at a time where channels lie side by side."""
SIZE = 1024
"""The same where the values of one channel do."""
MAX_READS = 256
"""Times that one program reads its part, at most."""


def channels_cuda(values: torch.Tensor, channels: int, inner: int) -> torch.Tensor:
    """The largest magnitude of each channel of a contiguous tensor whose shape ends in `channels` × `inner` values.

    Tensors on the CPU work under Triton's interpreter.
    """
    device = values.device
    found = torch.zeros(channels, dtype=torch.int32, device=device)
    if values.numel():
        outer = values.numel() // (channels * inner)
        beside = inner == 1
        blocks = triton.cdiv(outer, ROWS) if beside else outer
        times = max(1, min(MAX_READS, blocks // 64))  # at least 64 programs per channel block, if possible
        grid = (triton.cdiv(blocks, times), triton.cdiv(channels, COLUMNS) if beside else channels)
        settings = constants(FORMAT_OF_DTYPE[dtype_name(values.dtype)].name)
        launch: Any = _beside[grid] if beside else _apart[grid]
        sizes = {"ROWS": ROWS, "COLUMNS": COLUMNS} if beside else {"SIZE": SIZE}
        arguments = (channels, outer, times) if beside else (channels, outer, inner, times)
        with backend_of(device).selected():
            launch(values.view(_SIGNED[values.dtype.itemsize]), found, *arguments, FORM=settings["FORM"], **sizes)
    return found.view(torch.float32).to(values.dtype)


_SIGNED = {2: torch.int16, 4: torch.int32}


@triton.jit
def _beside(
    values,
    found,
    channels,
    outer,
    times,
    FORM: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
):
    """The channels lie side by side: (outer, channels)."""
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    first = tl.program_id(0).to(tl.int64) * times * ROWS
    largest = tl.zeros((COLUMNS,), tl.int32)
    for block in range(times):
        row = first + block * ROWS + tl.arange(0, ROWS)
        there = (row[:, None] < outer) & (column[None, :] < channels)
        bits = magnitude_bits(tl.load(values + row[:, None] * channels + column[None, :], mask=there, other=0), FORM)
        largest = tl.maximum(largest, tl.max(bits, 0))
    tl.atomic_max(found + column, largest, mask=column < channels)


@triton.jit
def _apart(
    values,
    found,
    channels,
    outer,
    inner,
    times,
    FORM: tl.constexpr,  # noqa: N803
    SIZE: tl.constexpr,  # noqa: N803
):
    """The values of one channel lie side by side: (outer, channels, inner)."""
    channel = tl.program_id(1)
    first = tl.program_id(0) * times
    offsets = tl.arange(0, SIZE)
    largest = tl.zeros((SIZE,), tl.int32)
    here = values + (first.to(tl.int64) * channels + channel) * inner
    for _ in range(first, tl.minimum(first + times, outer)):
        for start in range(0, inner, SIZE):
            there = start + offsets < inner
            bits = magnitude_bits(tl.load(here + start + offsets, mask=there, other=0), FORM)
            largest = tl.maximum(largest, bits)
        here += channels * inner
    tl.atomic_max(found + channel, tl.max(largest, 0))
