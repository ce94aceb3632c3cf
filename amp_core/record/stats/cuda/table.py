"""Tables of what a launch reads: one row, one block of threads, for each stretch of a tensor.

A table is built on the host and copied to the device without waiting.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

COLUMNS = (
    *("address", "length", "out", "ticket", "stretches", "caps", "channels", "inner", "first", "capped_out", "format"),
)
"""Those of `Stretch` in kernels.cu."""
STRETCHES = 2048
"""Approximate number of pieces that values are cut into if there are enough: several per multiprocessor of any GPU."""
MIN_STRETCH, MAX_STRETCH = 1 << 14, 1 << 30
"""Values of a stretch, both multiples of the values of any load. A block begins and ends with some microseconds of
work, and counts in 32 bits."""

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Table:
    """Rows on a device; `held` keeps their memory until the launch is queued."""

    rows: int
    address: int
    held: torch.Tensor


def stretches(lengths: Sequence[int], addresses: Sequence[int], itemsize: int, **columns: Sequence[int]) -> Rows:
    """Rows of tensors of one dtype, each cut into stretches; `columns` are the same for all stretches of a tensor."""
    length = np.array(lengths)
    most = min(MAX_STRETCH, max(MIN_STRETCH, -(-int(length.sum()) // STRETCHES // MIN_STRETCH) * MIN_STRETCH))
    pieces = -(-length // most)
    which = np.repeat(np.arange(len(length)), pieces)
    first = (np.arange(len(which)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * most
    return rows(
        len(which),
        COLUMNS,
        address=np.array(addresses)[which] + first * itemsize,
        length=np.minimum(most, length[which] - first),
        stretches=pieces[which],
        first=first,
        **{name: np.array(values)[which] for name, values in columns.items()},
    )


def rows(count: int, names: Sequence[str], **columns: npt.ArrayLike) -> Rows:
    """Rows of a table whose columns are `names`, with those given and the others zero."""
    made = np.zeros((count, len(names)), np.int64)
    for name, values in columns.items():
        made[:, names.index(name)] = values
    return made


def on_device(parts: Sequence[Rows], doubles: int, device: torch.device) -> tuple[list[Table], torch.Tensor]:
    """The tables with those rows, and that number of float64 zeros, in one copy."""
    whole = torch.from_numpy(np.concatenate([*(part.reshape(-1) for part in parts), np.zeros(doubles, np.int64)]))
    if device.type != "cpu":
        whole = whole.pin_memory().to(device, non_blocking=True)
    address = whole.data_ptr()
    tables = []
    for part in parts:
        tables.append(Table(len(part), address, whole))
        address += part.nbytes
    return tables, whole[len(whole) - doubles :].view(torch.float64)
