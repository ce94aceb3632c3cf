"""`blocks.distances_plain` for CUDA tensors: one launch, and one copy that brings its table."""

import numpy as np
import torch

from amp_core.quantization import BINS
from amp_core.record.stats.cuda import program, table

COLUMNS = ("values", "factors", "tops", "width", "first", "length", "column", "rows", "columns", "exponent")
"""Those of `Tile` in blocks.cu."""
WIDTH, MIN_HEIGHT = 128, 64
"""Columns of a tile, as the source has them, and its fewest rows: some microseconds go to its beginning and end."""


def distances_cuda(
    magnitude: torch.Tensor, factor: torch.Tensor, top: torch.Tensor, rows: int, columns: int, exponent: int
) -> torch.Tensor:
    """`blocks.distances_plain`."""
    height, width = magnitude.shape
    held = [magnitude, factor.contiguous(), top.contiguous()]
    tile = max(MIN_HEIGHT, -(-height * -(-width // WIDTH) // table.STRETCHES))
    first, column = np.meshgrid(np.arange(0, height, tile), np.arange(0, width, WIDTH), indexing="ij")
    made = table.rows(
        first.size,
        COLUMNS,
        **{name: tensor.data_ptr() for name, tensor in zip(COLUMNS, held, strict=False)},
        width=width,
        first=first.ravel(),
        length=np.minimum(tile, height - first.ravel()),
        column=column.ravel(),
        rows=rows,
        columns=columns,
        exponent=exponent,
    )
    (tiles,), results = table.on_device([made], 4 * BINS, magnitude.device)
    program.launch(magnitude.device, "fp32", "distances", tiles, results)
    return results.view(4, BINS)
