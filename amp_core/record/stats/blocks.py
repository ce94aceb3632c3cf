"""How far the values of a matrix lie below the top of their block, for each way of scaling blocks.

    >>> rows = measure_blocks(weight, "weight")        # of [outputs, inputs]
    >>> rows[0].product, rows[0].block, rows[0].scaling, rows[0].counts
    (None, 'tensor', 'fp32 amax 1.75', array([...]))

One specification, in `distances_plain`, of which numba and CUDA C++ have kernels. A recipe multiplies the values of a
block with one factor, as `fake_quantize` does, before it rounds them to its element. The top of a block is the
magnitude that this brings to the element's highest power of two (2^8 for E4M3). The exponent and the first three
mantissa bits of a scaled value then say what the element makes of it, whichever element it is: in MX the top is the
power of two of the block's largest value. Values are counted by their distance below twice the top, in eighths of the
four highest octaves and in octaves below; those exactly a power of two below the top apart, since there ties are
decided. With each distance go the sums of the tops of the values' blocks, and of their squares: rounding errors are
proportional to them.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from amp_core.quantization import BINS, EIGHTHS, FINE_OCTAVES, OCTAVES, OPERANDS, ROW, TENSOR, Block, Recipe, scalings
from amp_core.record.fake_quantize import block_scales
from amp_core.record.stats.dispatch import by_kernel


class BlockRow(NamedTuple):
    """What was measured on a matrix for one way of scaling; see the columns of `blocks` of the same names."""

    product: str | None
    block: str
    scaling: str
    packed: torch.Tensor
    """[4, BINS] float64: counts, sums of tops, sums of squares of tops, and ties, which fill the first `OCTAVES`."""
    totals: torch.Tensor
    """[3] float64 of the whole matrix: largest magnitude, sum of magnitudes, sum of squares."""


def measure_blocks(matrix: torch.Tensor, kind: str) -> list[BlockRow]:
    """One row for each way in which the recipes scale a matrix [rows, columns] of that kind, and each product that it
    enters. Weights are [outputs, inputs], other operands [tokens, features]. Never waits for the device."""
    magnitude = matrix.detach().abs().to(torch.float32).nan_to_num(0.0, 0.0).contiguous()
    wide = magnitude.to(torch.float64).flatten()
    totals = torch.stack([wide.amax() if wide.numel() else wide.sum(), wide.sum(), wide.dot(wide)])
    asked = [
        (name, key, recipe, recipe.block_of(kind), product, shape)
        for (name, key), recipe in scalings(kind).items()
        for product, shape in _shapes(recipe.block_of(kind), magnitude.shape, kind)
    ]
    largest = _Largest(magnitude)
    if magnitude.numel():
        for *_, shape in sorted(asked, key=lambda one: math.prod(one[-1])):  # smaller ones first: larger ones use them
            largest.of_blocks(*shape)
    rows = []
    for name, key, recipe, block, product, shape in asked:
        packed = _distances(magnitude, largest, recipe, kind, block, shape)
        rows.append(BlockRow(product, name, key, packed, totals))
    return rows


def _shapes(block: Block, size: torch.Size, kind: str) -> Iterator[tuple[str | None, tuple[int, int]]]:
    """Rows and columns of a block, for each product."""
    if block == TENSOR:
        yield None, (size[0], size[1])
    elif isinstance(block, tuple):
        yield None, block
    else:
        along_columns, along_rows = OPERANDS[kind]
        yield along_columns, (1, size[1] if block == ROW else int(block))
        yield along_rows, (size[0] if block == ROW else int(block), 1)


def _distances(
    magnitude: torch.Tensor, largest: "_Largest", recipe: Recipe, kind: str, block: Block, shape: tuple[int, int]
) -> torch.Tensor:
    if not magnitude.numel():
        return torch.zeros(4, BINS, dtype=torch.float64, device=magnitude.device)
    element = recipe.element_of(kind)
    amax = largest.of_blocks(*shape)
    scales = block_scales(recipe, element, block, amax.reshape(-1, 1), largest.of_all())
    factor = (scales.encode if scales.multiply else 1.0 / scales.encode).reshape(amax.shape)
    decode = scales.decode.to(torch.float64).reshape(amax.shape)
    highest = 2.0**element.max_exponent
    top = torch.where(amax > 0, highest / decode if scales.divide else decode * highest, 0.0)
    args = magnitude, factor, top, *shape, element.max_exponent
    packed = by_kernel("blocks", magnitude.device.type, *args)
    return distances_plain(*args) if packed is None else packed


class _Largest:
    """The largest magnitudes of blocks: of large ones from those of smaller ones that fill them."""

    def __init__(self, magnitude: torch.Tensor) -> None:
        self._size = magnitude.shape
        self._known = {(1, 1): magnitude}

    def of_all(self) -> torch.Tensor:
        """The largest magnitude of all, as [1, 1]."""
        return self.of_blocks(*self._size)

    def of_blocks(self, rows: int, columns: int) -> torch.Tensor:
        """The largest magnitude of each block of that many rows and columns, as a matrix of blocks."""
        if (rows, columns) not in self._known:
            height, width = self._size
            fits = [
                (r, c)
                for r, c in self._known
                if (rows % r == 0 or rows >= height) and (columns % c == 0 or columns >= width)
            ]
            r, c = max(fits, key=lambda sides: sides[0] * sides[1])
            self._known[rows, columns] = _largest(self._known[r, c], -(-rows // r), -(-columns // c))
        return self._known[rows, columns]


def _largest(magnitude: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    height, width = magnitude.shape
    high, wide = -(-height // rows), -(-width // columns)
    missing = (0, wide * columns - width, 0, high * rows - height)
    padded = torch.nn.functional.pad(magnitude, missing) if any(missing) else magnitude
    if rows > 1:
        padded = padded.reshape(high, rows, -1).amax(1)
    return padded.reshape(high, wide, columns).amax(2) if columns > 1 else padded


def distances_plain(
    magnitude: torch.Tensor, factor: torch.Tensor, top: torch.Tensor, rows: int, columns: int, exponent: int
) -> torch.Tensor:
    """[4, BINS] as in `BlockRow.packed`.

    `magnitude` [height, width] is FP32, finite and contiguous; `factor` (FP32) and `top` (float64) have one value per
    block of `rows` × `columns`. The factor brings the top of a block to 2^exponent.
    """
    height, width = magnitude.shape

    def spread(blocks: torch.Tensor) -> torch.Tensor:
        return blocks.repeat_interleave(rows, 0)[:height].repeat_interleave(columns, 1)[:, :width]

    bits = (magnitude * spread(factor)).view(torch.int32)
    eighths = ((exponent + 127) << 3 | 7) - (bits >> 20)
    octaves = (eighths >> 3).clamp(0, OCTAVES - 1)
    bins = torch.where(eighths < EIGHTHS * FINE_OCTAVES, eighths, octaves + (EIGHTHS - 1) * FINE_OCTAVES)
    nonzero = magnitude > 0
    where = torch.where(nonzero, bins.clamp(min=0), BINS).flatten().long()
    tops = spread(top).flatten()
    tie = nonzero & (bits & 0x7FFFFF == 0)
    packed = torch.zeros(4, BINS + 1, dtype=torch.float64, device=magnitude.device)
    packed[0].index_add_(0, where, torch.ones_like(tops))
    packed[1].index_add_(0, where, tops)
    packed[2].index_add_(0, where, tops.square())
    packed[3].index_add_(0, torch.where(tie, octaves, BINS).flatten().long(), torch.ones_like(tops))
    return packed[:, :BINS].contiguous()
