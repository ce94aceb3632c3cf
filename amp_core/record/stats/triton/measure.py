# mypy: disable-error-code="untyped-decorator,no-untyped-call,no-untyped-def,import-untyped,import-not-found"
"""The Triton kernel of `measure` for CUDA tensors: all tensors of a step in a launch or two, and nothing waited for.

    >>> measure_cuda([parameter.grad for parameter in model.parameters()])  # packed vectors one after another

A table says where each stretch of values lies and into which packed vector it is counted; a program takes one stretch,
a tensor of its own or a part of a large one. It reads every value once, keeps its findings in registers, and adds them
to the packed vector at its end, with atomics. (The last bit of a sum may therefore differ from one run to the next;
counts and extremes cannot.)

What a histogram costs grows with its bins. So it has 64: for the exponents from somewhat above the largest of the first
block that is not all zeros downwards, and one each for zeros, infinities, NaNs and the rest. A block that holds
anything of the rest, subnormals included, is looked at again with a bin for every exponent there is.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from amp_core.formats import FORMAT_OF_DTYPE, FORMATS
from amp_core.record.backends import backend_of
from amp_core.record.stats.layout import LEADING, Cap, dtype_name, in_one_row, packed_size

SIZE = 1024
"""Values a program reads at a time: eight a thread, so that all its findings stay in registers."""
STRETCHES = 4096
"""Values are cut into about so many stretches where there are enough: work for any GPU, and a small table."""

_BINS = tl.constexpr(64)
_ZEROS, _INFINITIES, _NANS, _REST = tl.constexpr(60), tl.constexpr(61), tl.constexpr(62), tl.constexpr(63)
_ABOVE = tl.constexpr(8)
_INTEGERS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}


def measure_cuda(tensors: Sequence[torch.Tensor], caps: Sequence[Cap | None] = ()) -> torch.Tensor:
    """The packed vectors of CUDA tensors of one device, one after another, as `measure_together` has them.

    Tensors on the CPU work under Triton's interpreter.
    """
    packed = _in_order([in_one_row(t) for t in tensors], None)
    limited = [(t.detach().contiguous(), cap) for t, cap in zip(tensors, caps, strict=False) if cap is not None]
    if not limited:
        return packed
    return torch.cat([packed, _in_order([row for row, _ in limited], [cap for _, cap in limited])])


def _in_order(rows: list[torch.Tensor], caps: list[Cap] | None) -> torch.Tensor:
    """Packed vectors of contiguous tensors; with `caps` their capped ones."""
    groups: dict[torch.dtype, list[int]] = {}
    for i, row in enumerate(rows):
        groups.setdefault(row.dtype, []).append(i)
    vectors: dict[int, torch.Tensor] = {}
    for members in groups.values():
        limits = None if caps is None else [caps[i] for i in members]
        packed = _measure_alike([rows[i] for i in members], limits, rows[0].device)
        if len(groups) == 1:
            return packed.reshape(-1)
        vectors.update(zip(members, packed.unbind(), strict=True))
    return torch.cat([vectors[i] for i in range(len(rows))])


def _measure_alike(rows: list[torch.Tensor], caps: list[Cap] | None, device: torch.device) -> torch.Tensor:
    """Packed vectors, one a row, of contiguous tensors of one dtype."""
    dtype = rows[0].dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32  # as wide as the kernel compares them
    limits = [Cap(c.largest.to(wide), c.inner) for c in caps or ()]
    packed = torch.zeros(len(rows), packed_size(dtype), dtype=torch.float64, device=device)
    packed[:, 4] = torch.inf
    for aligned in (True, False):  # vectors of 16 bytes are loaded where every stretch begins and ends with one
        members = [i for i, row in enumerate(rows) if row.numel() and _aligned(row) is aligned]
        if not members:
            continue
        starts = [i * packed.shape[1] for i in members]
        table = _table([rows[i] for i in members], starts, [limits[i] for i in members] if limits else None)
        if device.type != "cpu":
            table = table.pin_memory()
        launch: Any = _measure_stretches[(table.shape[1],)]
        with backend_of(device).selected():
            launch(
                table.to(device, non_blocking=True),
                packed,
                packed.view(torch.int64),
                table.shape[1],
                **constants(FORMAT_OF_DTYPE[dtype_name(dtype)].name),
                ALIGNED=aligned,
                CAPPED=bool(limits),
                num_warps=4,
            )
    smallest = packed[:, 4]
    smallest.masked_fill_(smallest == torch.inf, 0.0)
    return packed


def constants(form: str) -> dict[str, Any]:
    """What the kernel for a format is compiled with, but for ALIGNED and CAPPED."""
    double = form == "fp64"
    return {
        "FORM": form,
        "INTEGER": _INTEGERS[(1 + FORMATS[form].exponent_bits + FORMATS[form].mantissa_bits) // 8],
        "MANTISSA": 52 if double else 23,
        "EXPONENTS": 4096 if double else 512,
        "FIRST": LEADING - (FORMATS[form].min_subnormal_exponent - (-1074 if double else -149)),
        "SIZE": SIZE,
    }


def _aligned(row: torch.Tensor) -> bool:
    return row.data_ptr() % 16 == 0 and row.numel() % 16 == 0


def _table(rows: list[torch.Tensor], into: list[int], caps: list[Cap] | None) -> torch.Tensor:
    """Stretches of a few blocks each: address, length, and index of the packed vector's first number.

    With caps also the number of values of the tensor before the stretch, the address of the largest magnitudes, their
    number, and how many values in a row share one.
    """
    length = np.array([row.numel() for row in rows])
    most = max(4, -(-int(length.sum()) // (STRETCHES * SIZE))) * SIZE
    pieces = -(-length // most)
    which = np.repeat(np.arange(len(rows)), pieces)
    start = (np.arange(len(which)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * most
    address = np.array([row.data_ptr() for row in rows])[which] + start * rows[0].dtype.itemsize
    columns = [address, np.minimum(most, length[which] - start), np.array(into)[which]]
    if caps is not None:
        limits = np.array([(c.largest.data_ptr(), len(c.largest), c.inner) for c in caps])
        columns += [start, *limits[which].T]
    return torch.from_numpy(np.stack(columns))


@triton.jit
def magnitude_bits(raw, FORM: tl.constexpr):  # noqa: N803
    """The bits of |x| as float32, or as float64 where x is that. Nothing is rounded."""
    if FORM == "fp64":
        bits = raw & 0x7FFFFFFFFFFFFFFF
    elif FORM == "fp32":
        bits = raw & 0x7FFFFFFF
    elif FORM == "bf16":
        bits = (raw.to(tl.int32) & 0x7FFF) << 16
    elif FORM == "fp16":
        bits = (raw & 0x7FFF).to(tl.float16, bitcast=True).to(tl.float32).to(tl.int32, bitcast=True)
    elif FORM == "fp8-e5m2":
        half = ((raw.to(tl.int16) & 0x7F) << 8).to(tl.float16, bitcast=True)
        bits = half.to(tl.float32).to(tl.int32, bitcast=True)
    else:
        tl.static_assert(FORM == "fp8-e4m3")
        magnitude = raw.to(tl.int16) & 0x7F
        half = (magnitude << 7).to(tl.float16, bitcast=True)  # FP16's exponents have a bias that is larger by 8
        bits = (half.to(tl.float32) * 256.0).to(tl.int32, bitcast=True)
        bits = tl.where(magnitude == 0x7F, 0x7FC00000, bits)
    return bits


@triton.jit
def _as_real(bits):
    """float64 of the bits of a float32 or float64."""
    if bits.dtype == tl.int64:
        real = bits.to(tl.float64, bitcast=True)
    else:
        real = bits.to(tl.float32, bitcast=True).to(tl.float64)
    return real


@triton.jit
def _measure_stretches(
    table,
    packed,
    packed_bits,
    stretches,
    FORM: tl.constexpr,  # noqa: N803
    INTEGER: tl.constexpr,  # noqa: N803
    MANTISSA: tl.constexpr,  # noqa: N803
    EXPONENTS: tl.constexpr,  # noqa: N803
    FIRST: tl.constexpr,  # noqa: N803
    ALIGNED: tl.constexpr,  # noqa: N803
    CAPPED: tl.constexpr,  # noqa: N803
    SIZE: tl.constexpr,  # noqa: N803
):
    """Measure one stretch of values and add it to its packed vector.

    `packed_bits` is `packed` as int64, for extremes: positive floats and their bits have the same order. EXPONENTS is a
    power of two above the number of exponents of the width, and FIRST the index of its lowest in the packed vector.
    An exponent field f >= 1 stands MANTISSA - 1 + f above that.
    """
    FIELDS: tl.constexpr = (1 << (8 if MANTISSA == 23 else 11)) - 1  # noqa: N806
    special = tl.full((), FIELDS, tl.int32 if MANTISSA == 23 else tl.int64) << MANTISSA
    stretch = tl.program_id(0)
    source = tl.load(table + stretch).to(tl.pointer_type(INTEGER))
    length = tl.load(table + stretches + stretch).to(tl.int32)
    if ALIGNED:
        source = tl.multiple_of(source, 16)
        length = tl.multiple_of(length, 16)
    row = tl.load(table + 2 * stretches + stretch)
    if CAPPED:
        first = tl.load(table + 3 * stretches + stretch)
        caps = tl.load(table + 4 * stretches + stretch).to(tl.pointer_type(special.dtype))
        channels = tl.load(table + 5 * stretches + stretch)
        inner = tl.load(table + 6 * stretches + stretch)
    packed += row
    packed_bits += row

    offsets = tl.arange(0, SIZE)
    bins = tl.arange(0, _BINS)
    exponents = tl.arange(0, EXPONENTS)
    counts = tl.zeros((_BINS,), tl.int32)
    total = tl.zeros((SIZE,), tl.float64)
    squares = tl.zeros((SIZE,), tl.float64)
    largest = tl.zeros((SIZE,), special.dtype)
    smallest = tl.zeros((SIZE,), special.dtype) + special
    highest = -1  # the field that the first bin counts; none yet
    for start in range(0, length, SIZE):
        there = start + offsets < length
        bits = magnitude_bits(tl.load(source + start + offsets, mask=there, other=0), FORM)
        if CAPPED:
            cap = tl.load(caps + (first + start + offsets) // inner % channels, mask=there, other=0)
            bits = tl.where((cap < bits) & (bits <= special), cap, bits)
        finite = bits < special
        field = (bits >> MANTISSA).to(tl.int32)
        if highest < 0:
            top = tl.max(tl.where(finite, field, 0), 0)
            highest = tl.where(top > 0, top + _ABOVE, -1)
        below = highest - field
        slot = tl.where((below >= 0) & (below < _ZEROS) & (field > 0) & finite, below, _REST)
        slot = tl.where(bits == 0, _ZEROS, slot)
        slot = tl.where(bits == special, _INFINITIES, slot)
        slot = tl.where(bits > special, _NANS, slot)
        slot = tl.where(there, slot, _REST)
        counts += tl.histogram(slot, _BINS)
        rest = there & (slot == _REST)
        if tl.max(rest.to(tl.int32), 0) > 0:
            if MANTISSA == 23:  # a subnormal is so many times the smallest of them, which has an exponent of its own
                units = (bits.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
            else:
                units = (bits.to(tl.float64).to(tl.int64, bitcast=True) >> 52).to(tl.int32) - 1023
            exponent = tl.where(field > 0, field + (MANTISSA - 1), units)
            every = tl.histogram(tl.where(rest, exponent, EXPONENTS - 1), EXPONENTS)
            counted = (every > 0) & (exponents < EXPONENTS - 1)
            tl.atomic_add(packed + FIRST + exponents, every.to(tl.float64), mask=counted)
        bits = tl.where(finite, bits, 0)
        largest = tl.maximum(largest, bits)
        smallest = tl.minimum(smallest, tl.where(bits > 0, bits, special))
        real = _as_real(bits)
        total += real
        squares += real * real

    place = tl.where(bins < _ZEROS, FIRST + (MANTISSA - 1) + highest - bins, bins - _ZEROS)  # zero, inf, nan come first
    tl.atomic_add(packed + place, counts.to(tl.float64), mask=(counts > 0) & (bins != _REST))
    tl.atomic_max(packed_bits + 3, _as_real(tl.max(largest, 0)).to(tl.int64, bitcast=True))
    tl.atomic_min(packed_bits + 4, _as_real(tl.min(smallest, 0)).to(tl.int64, bitcast=True))
    tl.atomic_add(packed + 5, tl.sum(total, 0))
    tl.atomic_add(packed + 6, tl.sum(squares, 0))
