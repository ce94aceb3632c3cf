"""The largest output gradient of each channel of a layer, which bounds the layer's weight gradient.

    >>> largest = channel_largest(output_grad, channel=2)     # of a linear layer on (batch, time, channel)
    >>> ChannelLargest(largest, row=0, dims=2).cap_for(layer.weight.grad)
    Cap(largest=tensor([...]), inner=512)

A weight gradient is a sum of products of one channel's output gradients with inputs. So where all of a channel's output
gradients are flushed to zero, its whole row of the weight gradient is, however large that would have been: as happens
to words a language model has not seen, and to queries and keys in attention. `Cap` is what `measure_together` takes to
say how small that makes a row: each magnitude of the weight gradient counts as at most its channel's.
"""

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
        inner = grad.shape[channel + 1 :].numel()
        place = (into,) if into is not None and into.is_cpu else ()
        largest = by_kernel("channels", grad.device.type, grad.contiguous(), grad.shape[channel], inner, *place)
        if largest is not None and place:
            return largest
    if largest is None:
        largest = grad.abs().amax([d for d in range(grad.dim()) if d != channel])
    return largest if into is None else torch.maximum(into, largest)


class ChannelLargest:
    """The largest output gradient of each channel of a layer, whose weight has `dims` dimensions; `row` is the channel.

    `values` has one per channel; see `channel_largest`.
    """

    __slots__ = ("dims", "present", "row", "values")

    def __init__(self, values: torch.Tensor, row: int, dims: int) -> None:
        self.values = values
        self.row = row
        self.dims = dims
        self.present = True
        """Whether `values` are of the present step."""

    def take_in(self, grad: torch.Tensor, channel: int) -> bool:
        """Take in another output gradient. The first one of a step takes the place of those before it.

        Returns False, without effect, if the number of channels, the dtype or the device differs.
        """
        values = self.values
        if grad.shape[channel] != len(values) or grad.dtype is not values.dtype or grad.device != values.device:
            return False
        if not self.present and not values.is_cpu:
            self.values = channel_largest(grad, channel)
        else:
            if not self.present:
                values.zero_()
            self.values = channel_largest(grad, channel, into=values)
        self.present = True
        return True

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
        return Cap(values if values.dtype is dtype else values.to(dtype), inner) if inner else None
