"""The largest output gradient of each channel of a layer, which bounds the layer's weight gradient.

    >>> largest = channel_largest(output_grad, channel=2)     # of a linear layer on (batch, time, channel)
    >>> cap_for(layer.weight.grad, largest, row=0, dims=2)
    Cap(largest=tensor([...]), inner=512)

A row of a weight gradient is a sum of products of one channel's output gradients with inputs. So if all output
gradients of a channel are flushed to zero, so is the whole row, however large it would have been. This happens to words
that a language model has not met yet, and to queries and keys in attention. With a `Cap`, `measure_together` takes that
into account: each magnitude of the weight gradient counts as at most its channel's.
"""

from dataclasses import dataclass

import torch

from amp_core.record.model import own
from amp_core.record.stats.dispatch import by_kernel
from amp_core.record.stats.layout import Cap, by_stride


def channel_of(module: torch.nn.Module) -> tuple[int, int] | None:
    """The channel dimension of the output (counted from its end), and the dimension of the weight that corresponds to
    it."""
    if isinstance(module, torch.nn.Linear):
        return -1, 0
    for spatial, kind in enumerate((torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d), start=1):
        if isinstance(module, kind):
            return -1 - spatial, 0
    # The linear layer of GPT-2 in transformers.
    if type(module).__name__ == "Conv1D" and own.parameter(module, "weight") is not None:
        return -1, 1
    return None


def channel_largest(grad: torch.Tensor, channel: int, into: torch.Tensor | None = None) -> torch.Tensor:
    """The largest magnitude of each channel (dimension `channel`), on the same device; NaN if the channel holds a NaN.

    With `into`, the larger ones of these and of what that holds; on a CPU in its place. Nothing as large as `grad` is
    made, unless it is neither contiguous nor permuted.
    """
    grad = grad.detach()
    largest = None
    if grad.dtype.itemsize <= 4:
        order = by_stride(grad)
        laid_out = grad.permute(order)  # channels last: (N, H, W, C), without a copy
        values, place_of = (
            (laid_out, order.index(channel)) if laid_out.is_contiguous() else (grad.contiguous(), channel)
        )
        inner = values.shape[place_of + 1 :].numel()
        place = (into,) if into is not None and into.is_cpu else ()
        largest = by_kernel("channels", grad.device.type, values, grad.shape[channel], inner, *place)
        if largest is not None and place:
            return largest
    if largest is None:
        others = [d for d in range(grad.dim()) if d != channel]
        largest = torch.linalg.vector_norm(grad, torch.inf, others)  # unlike `abs` it makes nothing as large
    return largest if into is None else torch.maximum(into, largest)


@dataclass(frozen=True, slots=True)
class Row:
    """Where the largest magnitudes of one layer's channels are held in `Rows`."""

    count: int
    dtype: torch.dtype
    index: int
    """Among those of its dtype."""
    block: int
    start: int
    address: int


class Rows:
    """Memory on the CPU for the largest magnitudes of many layers: zeros, until kernels raise them.

    It outlives the step, so no tensor is made for each layer while backward makes others. A few hundred small objects
    in between would leave the memory that the training uses over and over in pieces: at 500 layers each later step took
    an eighth longer.
    """

    def __init__(self) -> None:
        self._blocks: dict[torch.dtype, list[torch.Tensor]] = {}
        self._rows: dict[torch.dtype, list[Row]] = {}

    def add(self, count: int, dtype: torch.dtype) -> Row:
        """Memory for so many channels."""
        blocks, rows = self._blocks.setdefault(dtype, []), self._rows.setdefault(dtype, [])
        start = rows[-1].start + rows[-1].count if rows else 0
        if not blocks or start + count > len(blocks[-1]):
            blocks.append(torch.zeros(max(count, _BLOCK), dtype=dtype))
            start = 0
        address = blocks[-1].data_ptr() + start * dtype.itemsize
        rows.append(Row(count, dtype, len(rows), len(blocks) - 1, start, address))
        return rows[-1]

    def values(self, row: Row) -> torch.Tensor:
        """The tensor of one row. It is to be dropped before the step ends, and so are those of all."""
        return self._blocks[row.dtype][row.block][row.start : row.start + row.count]

    def all_values(self) -> dict[torch.dtype, list[torch.Tensor]]:
        """The tensors of all rows, by dtype and index."""
        parts: dict[torch.dtype, list[torch.Tensor]] = {}
        for dtype, blocks in self._blocks.items():
            counts: list[list[int]] = [[] for _ in blocks]
            for row in self._rows[dtype]:
                counts[row.block].append(row.count)
            pairs = zip(blocks, counts, strict=True)
            parts[dtype] = [part for block, some in pairs for part in block[: sum(some)].split(some)]
        return parts

    def clear(self) -> None:
        """Make all values zeros again."""
        for blocks in self._blocks.values():
            for block in blocks:
                block.zero_()


_BLOCK = 2**16
"""Values allocated at a time: so much memory is taken from the system, and none that tensors of the training leave."""


def cap_for(grad: torch.Tensor, largest: torch.Tensor, row: int, dims: int) -> Cap | None:
    """The cap for the gradient of a weight of `dims` dimensions, of which `row` is the channel, with the largest output
    gradient of each channel; None if it does not apply.

    It does not apply to a gradient on another device, in FP8, or of which this process holds a shard.
    """
    dtype, shape = grad.dtype, grad.shape
    if len(shape) != dims or shape[row] != len(largest) or dtype.itemsize < 2 or grad.device != largest.device:
        return None
    inner = shape[row + 1 :].numel()
    # A cap below the smallest value of the gradient's dtype becomes zero, as such a gradient would.
    return Cap(largest if largest.dtype is dtype else largest.to(dtype), inner) if inner else None
