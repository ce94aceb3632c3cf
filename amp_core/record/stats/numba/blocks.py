# mypy: disable-error-code="attr-defined,call-arg,unreachable,no-any-return,import-untyped"
"""The numba kernel of `blocks.distances_plain`, for CPU tensors: each row of the matrix at a time, while it is in the
cache, on as many threads as torch has.

Where all values of a row share a scale, they are counted as integers, and the top of the row is multiplied once. Else
what belongs to one distance lies side by side, so that LLVM adds it with one vector instruction; neighbours go to
different tables, so that one addition need not wait for the one before.
"""

from typing import Any

import numba
import numpy as np
import torch

from amp_core.quantization import BINS, EIGHTHS, FINE_OCTAVES, OCTAVES
from amp_core.record.stats.layout import addresses_of
from amp_core.record.stats.numba.compiled import kept, pointer, taken
from amp_core.record.stats.numba.thread_team import together

_SUMS, _TABLES = 4, 4
_FINE = EIGHTHS * FINE_OCTAVES
_COARSE = _FINE - FINE_OCTAVES
_LAST = OCTAVES - 1

CHUNK = 64
"""Values between two looks for ties, which in FP32 are rare."""
SHARE = 1 << 16
"""Values for which a further thread is worth its start."""


def distances_cpu(
    magnitude: torch.Tensor, factor: torch.Tensor, top: torch.Tensor, rows: int, columns: int, exponent: int
) -> torch.Tensor:
    """`blocks.distances_plain`."""
    height, width = magnitude.shape
    parts = max(1, min(torch.get_num_threads(), magnitude.numel() // SHARE))
    sums = np.zeros((parts, BINS + 1, _SUMS))
    tensors = [t.contiguous() for t in (magnitude, factor, top)]
    given = [0, height, width, *factor.shape, rows, columns, exponent, sums.ctypes.data, parts]
    job = np.array([*given, *addresses_of(tensors)], np.int64)
    if parts == 1:
        add_distances(job.ctypes.data)
    else:
        together(add_distances, job.ctypes.data, parts)
    return torch.from_numpy(np.ascontiguousarray(sums.sum(0)[:BINS].T))


@kept
def add_distances(address: int) -> None:
    """Add 1, the top and its square at the distance of each value, and ties by octave: of one part of the rows."""
    job = numba.carray(pointer(address), (13,), np.int64)
    height, width, high, wide = job[1], job[2], job[3], job[4]
    rows, columns, exponent, parts = job[5], job[6], job[7], job[9]
    part = taken(address)
    sums = numba.carray(pointer(job[8] + part * (BINS + 1) * _SUMS * 8), (BINS + 1, _SUMS), np.float64)
    magnitude = numba.carray(pointer(job[10]), (height, width), np.float32)
    factor = numba.carray(pointer(job[11]), (high, wide), np.float32)
    top = numba.carray(pointer(job[12]), (high, wide), np.float64)
    tables = np.zeros((_TABLES, BINS + 1, _SUMS))
    counts = np.zeros((_TABLES, BINS + 1), np.int32)
    scaled, bits_of = np.empty(width, np.float32), np.empty(width, np.int32)
    tops = np.empty(width, np.float64)
    factors = np.empty(width, np.float32)
    places = np.empty(width, np.int32)
    bits = scaled.view(np.int32)
    uniform = columns >= width
    first, last = part * height // parts, (part + 1) * height // parts
    block = -1
    for i in range(first, last):
        values = magnitude[i]
        if i // rows != block:
            if uniform and block >= 0:
                _flush(counts, top[block, 0], sums)
            block = i // rows
            for b in range(wide):
                for j in range(b * columns, min((b + 1) * columns, width)):
                    factors[j] = factor[block, b]
                    tops[j] = top[block, b]
        for j in range(width):
            scaled[j] = values[j] * factors[j]
        _places(values, bits, exponent, places, bits_of)
        if uniform:
            for j in range(width):
                counts[j % _TABLES, places[j]] += 1
        else:
            for j in range(width):
                t = tops[j]
                tables[j % _TABLES, places[j], 0] += 1.0
                tables[j % _TABLES, places[j], 1] += t
                tables[j % _TABLES, places[j], 2] += t * t
        for start in range(0, width, CHUNK):
            end = min(start + CHUNK, width)
            ties = 0
            for j in range(start, end):
                ties += bits_of[j] >= 0
            if ties:
                for j in range(start, end):
                    if bits_of[j] >= 0:
                        sums[bits_of[j], 3] += 1.0
    if uniform and block >= 0:
        _flush(counts, top[block, 0], sums)
    for table in range(_TABLES):
        for place in range(BINS + 1):
            for k in range(3):
                sums[place, k] += tables[table, place, k]


@numba.njit(nogil=True)
def _places(values: Any, bits: Any, exponent: int, places: Any, tie: Any) -> None:
    """The bin of each scaled value, and of ties the octave; -1 for others."""
    highest = np.int32(((exponent + 127) << 3) | 7)
    last = np.int32(_LAST)
    for j in range(values.size):
        eighths = highest - (bits[j] >> np.int32(20))
        octave = min(eighths >> np.int32(3), last)
        place = max(eighths if eighths < _FINE else octave + np.int32(_COARSE), np.int32(0))
        nonzero = values[j] > 0
        places[j] = place if nonzero else np.int32(BINS)
        tied = nonzero and (bits[j] & np.int32(0x7FFFFF)) == 0
        tie[j] = max(octave, np.int32(0)) if tied else np.int32(-1)


@numba.njit(nogil=True)
def _flush(counts: Any, top: float, sums: Any) -> None:
    """Add what was counted under one top, and count anew."""
    for place in range(BINS + 1):
        number = 0
        for table in range(_TABLES):
            number += counts[table, place]
            counts[table, place] = 0
        sums[place, 0] += number
        sums[place, 1] += number * top
        sums[place, 2] += number * top * top
