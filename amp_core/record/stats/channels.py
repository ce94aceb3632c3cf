"""The largest output gradient of each channel of a layer, which bounds the layer's weight gradient.

    >>> largest = channel_largest(output_grad, channel=2)     # of a linear layer on (batch, time, channel)
    >>> ChannelLargest(largest, row=0, dims=2).cap_for(layer.weight.grad)
    Cap(largest=tensor([...]), inner=512)

A weight gradient is a sum of products of one channel's output gradients with inputs. So where all of a channel's output
gradients are flushed to zero, its whole row of the weight gradient is, however large that would have been: as happens
to words a language model has not seen, and to queries and keys in attention. `Cap` is what `measure_together` takes to
say how small that makes a row: each magnitude of the weight gradient counts as at most its channel's.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from amp_core.record.model import own
from amp_core.record.stats.dispatch import by_kernel
from amp_core.record.stats.layout import Cap


def channel_of(module: torch.nn.Module) -> tuple[int, int] | None:
    """The dimension of the output (from its end) that is the channel, and the one of the weight that goes with it."""
    if isinstance(module, torch.nn.Linear):
        return -1, 0
    for spatial, kind in enumerate((torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d), start=1):
        if isinstance(module, kind):
            return -1 - spatial, 0
    if type(module).__name__ == "Conv1D" and own.parameter(module, "weight") is not None:  # GPT-2's, in transformers
        return -1, 1
    return None


def channel_largest(grad: torch.Tensor, channel: int, into: torch.Tensor | None = None) -> torch.Tensor:
    """The largest magnitude along dimension `channel`: one value per channel, on the same device, NaN where one is.

    With `into`, the larger ones of these and of what that holds; on a CPU in its place. Nothing as large as `grad` is
    made where a kernel is at hand.
    """
    grad = grad.detach()
    largest = None
    if grad.dtype.itemsize <= 4:
        place = (into,) if into is not None and into.is_cpu else ()
        largest = by_kernel("channels", grad.device.type, *in_channels(grad, channel), *place)
        if largest is not None and place:
            return largest
    if largest is None:
        largest = grad.abs().amax([d for d in range(grad.dim()) if d != channel])
    return largest if into is None else torch.maximum(into, largest)


class Pool:
    """Memory on the CPU for the largest magnitudes of many layers.

    They outlive the step. As tensors of their own, made while backward makes others, they would leave the memory that
    the training uses over and over in pieces, and slow down its allocations from then on.
    """

    def __init__(self) -> None:
        self._blocks: list[torch.Tensor] = []
        self._used = 0

    def take(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """So many zeros."""
        size = -(-count * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        if not self._blocks or self._used + size > len(self._blocks[-1]):
            self._blocks.append(torch.zeros(max(size, _POOL_BYTES), dtype=torch.uint8))
            self._used = 0
        part = self._blocks[-1][self._used : self._used + count * dtype.itemsize].view(dtype)
        self._used += size
        return part

    def clear(self) -> None:
        """Make all of them zeros again."""
        for block in self._blocks:
            block.zero_()


_ALIGNMENT = 64
_POOL_BYTES = 2**18


def in_channels(grad: torch.Tensor, channel: int) -> tuple[torch.Tensor, int, int]:
    """Contiguous values whose shape ends in (channels, inner), and both numbers; copied only where they must be."""
    channels = grad.shape[channel]
    if grad.stride(channel) == 1 and not grad.is_contiguous():
        last = grad.movedim(channel, -1)  # channels-last, or transposed
        if last.is_contiguous():
            return last, channels, 1
    return grad.contiguous(), channels, grad.shape[channel + 1 :].numel()


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
    found: list[torch.Tensor] = []
    for one in wanted:
        largest = one.grad.detach().reshape(-1, one.channels, one.inner).abs().amax((0, 2)).to(torch.float32)
        into = found[one.into] if isinstance(one.into, int) else one.into
        found.append(largest if into is None else torch.maximum(into, largest))
    return found


class ChannelLargest:
    """The largest output gradient of each channel of a layer, whose weight has `dims` dimensions; `row` is the channel.

    `values` has one per channel, zeros at first; see `channel_largest`.
    """

    __slots__ = ("_address", "_dtype", "_length", "dims", "present", "row", "values")

    def __init__(self, values: torch.Tensor, row: int, dims: int, dtype: torch.dtype | None = None) -> None:
        self.values = values
        self.row = row
        self.dims = dims
        self.present = False
        """Whether `values` are of the present step."""
        self._dtype = dtype or values.dtype  # of the output gradients: `values` may be float32 all the same
        self._length = values.numel()
        self._address = values.data_ptr() if values.is_cpu else 0

    def fits(self, grad: torch.Tensor, channel: int) -> bool:
        """Whether number of channels, dtype and device are those of `values`."""
        here = grad.is_cpu if self._address else grad.device == self.values.device
        return here and grad.dtype is self._dtype and grad.shape[channel] == self._length

    def place(self, grad: torch.Tensor, channel: int) -> tuple[int, int, int]:
        """What `PassingTensors.add` takes to take in a CPU gradient that fits."""
        return self._length, grad.shape[channel + 1 :].numel(), self._address

    def take_in(self, grad: torch.Tensor, channel: int) -> None:
        """Take in an output gradient that fits. Elsewhere than on a CPU, where a `Pool` is cleared, the first one of a
        step takes the place of those before it."""
        if self._address:
            largest = channel_largest(grad, channel, into=self.values)
            if largest is not self.values:
                self.values.copy_(largest)
        else:
            self.values = channel_largest(grad, channel, into=self.values if self.present else None)
        self.present = True

    def cap_for(self, grad: torch.Tensor) -> Cap | None:
        """The cap for the weight's gradient; None if it does not apply.

        It does not apply to a gradient on another device, in FP8, or of which this process holds a shard.
        """
        values, dtype, shape = self.values, grad.dtype, grad.shape
        if (
            len(shape) != self.dims
            or shape[self.row] != len(values)
            or dtype.itemsize < 2
            or grad.device != values.device
        ):
            return None
        inner = shape[self.row + 1 :].numel()
        # A cap below the smallest value of the gradient's dtype becomes zero, as such a gradient would.
        exact = values.dtype is dtype or (values.dtype is torch.float32 and self._dtype is dtype)
        return Cap(values if exact else values.to(dtype), inner) if inner else None
