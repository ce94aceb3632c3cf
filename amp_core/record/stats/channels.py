"""The largest output gradient of each channel of a layer, which bounds the layer's weight gradient.

    >>> largest = channel_largest(output_grad, channel=2)     # of a linear layer on (batch, time, channel)
    >>> cap_for(layer.weight.grad, largest, row=0, dims=2)
    Cap(largest=tensor([...]), inner=512)

A row of a weight gradient is a sum of products of one channel's output gradients with inputs. So if all output
gradients of a channel are flushed to zero, so is the whole row, however large it would have been. This happens to words
that a language model has not met yet, and to queries and keys in attention. With a `Cap`, `measure_together` takes that
into account: each magnitude of the weight gradient counts as at most its channel's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

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
        place = (into,) if into is not None and into.is_cpu else ()
        largest = by_kernel("channels", grad.device.type, *in_channels(grad, channel), *place)
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
        """Memory for that number of channels."""
        blocks, rows = self._blocks.setdefault(dtype, []), self._rows.setdefault(dtype, [])
        start = rows[-1].start + rows[-1].count if rows else 0
        if not blocks or start + count > len(blocks[-1]):
            blocks.append(torch.zeros(max(count, _BLOCK), dtype=dtype, device="cpu"))
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
"""Values allocated at a time: enough to come from the system rather than from memory that training tensors freed."""


def in_channels(grad: torch.Tensor, channel: int) -> tuple[torch.Tensor, int, int]:
    """Contiguous values whose shape ends in (channels, inner), and both numbers; a copy only if `grad` is neither
    contiguous nor permuted."""
    if not grad.is_contiguous():
        order = by_stride(grad)
        laid_out = grad.permute(order)  # channels last: (N, H, W, C), without a copy
        if laid_out.is_contiguous():
            return laid_out, grad.shape[channel], laid_out.shape[order.index(channel) + 1 :].numel()
        grad = grad.contiguous()
    return grad, grad.shape[channel], grad.shape[channel + 1 :].numel()


class ChannelMax(NamedTuple):
    """A kernel is to find the largest magnitude of each channel of `grad`, whose shape ends in `channels` × `inner`."""

    grad: torch.Tensor
    channels: int
    inner: int
    into: torch.Tensor | int | None = None
    """What holds magnitudes already, of which the larger ones stay; or the place of another one in a sequence, with
    which this one shares the result."""


def channel_maxima(wanted: Sequence[ChannelMax]) -> list[torch.Tensor]:
    """What is wanted, as float32, in plain torch."""
    maxima: list[torch.Tensor] = []
    for one in wanted:
        largest = one.grad.detach().reshape(-1, one.channels, one.inner).abs().amax((0, 2)).to(torch.float32)
        into = maxima[one.into] if isinstance(one.into, int) else one.into
        maxima.append(largest if into is None else torch.maximum(into, largest))
    return maxima


class ChannelLargest:
    """The largest output gradient of each channel of a layer, whose weight has `dims` dimensions; `row` is the channel.

    They are a row of `Rows` on a CPU, else a tensor: of the output gradients' `dtype`, or float32.
    """

    __slots__ = ("dims", "dtype", "held", "present", "row")

    def __init__(self, held: Row | torch.Tensor, row: int, dims: int, dtype: torch.dtype) -> None:
        self.held = held
        self.row = row
        self.dims = dims
        self.dtype = dtype
        self.present = False
        """Whether the values are of the present step."""

    def fits(self, grad: torch.Tensor, channel: int) -> bool:
        """Whether number of channels, dtype and device are those of `grad`."""
        held = self.held
        if isinstance(held, Row):
            return grad.is_cpu and grad.dtype is held.dtype and grad.shape[channel] == held.count
        return grad.device == held.device and grad.dtype is self.dtype and grad.shape[channel] == len(held)

    def take_in(self, grad: torch.Tensor, channel: int, rows: Rows) -> None:
        """Take in an output gradient that fits; `rows` has the rows. On a device the first one of a step takes the
        place of those before it."""
        if isinstance(self.held, Row):
            values = rows.values(self.held)
            largest = channel_largest(grad, channel, into=values)
            if largest is not values:
                values.copy_(largest)
        else:
            self.held = channel_largest(grad, channel, into=self.held if self.present else None)
        self.present = True


def cap_for(
    grad: torch.Tensor, largest: torch.Tensor, row: int, dims: int, dtype: torch.dtype | None = None
) -> Cap | None:
    """The cap for the gradient of a weight of `dims` dimensions, of which `row` is the channel, with the largest output
    gradient of each channel; None if it does not apply. `dtype`: of the output gradients, if `largest` is wider.

    It does not apply to a gradient on another device, in FP8, or of which this process holds a shard.
    """
    shape = grad.shape
    if len(shape) != dims or shape[row] != largest.numel() or grad.dtype.itemsize < 2 or grad.device != largest.device:
        return None
    inner = shape[row + 1 :].numel()
    # A cap below the smallest value of the gradient's dtype becomes zero, as such a gradient would.
    exact = grad.dtype in (largest.dtype, dtype)
    return Cap(largest if exact else largest.to(grad.dtype), inner) if inner else None
