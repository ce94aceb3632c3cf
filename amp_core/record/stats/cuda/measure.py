"""The kernels of `stats.dispatch` for CUDA tensors: each call is a few launches, and nothing is waited for."""

from collections.abc import Callable, Sequence

import torch

from amp_core.record.stats.channels import ChannelMax
from amp_core.record.stats.cuda.batch import Batch
from amp_core.record.stats.layout import Cap


def measure_cuda(tensors: Sequence[torch.Tensor], caps: Sequence[Cap | None] = ()) -> torch.Tensor:
    """The packed vectors of CUDA tensors of one device, one after another, as `measure_together` has them."""
    batch = Batch(tensors[0].device)
    packed = batch.measure(tensors, caps)
    batch.launch()
    return packed


def channels_cuda(values: torch.Tensor, channels: int, inner: int) -> torch.Tensor:
    """The largest magnitude of each channel of a contiguous tensor whose shape ends in `channels` × `inner` values."""
    batch = Batch(values.device)
    (largest,) = batch.channels([ChannelMax(values, channels, inner)])
    batch.launch()
    return largest.to(values.dtype)


def outputs_cuda(
    tensors: Sequence[torch.Tensor],
    wanted: Sequence[ChannelMax],
    weights: Sequence[torch.Tensor] = (),
    caps_of: Callable[[list[torch.Tensor]], Sequence[Cap | None]] = lambda largest: (),
) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
    """`measure_cuda` of tensors of one device, the largest magnitudes by channel as float32, and `measure_cuda` of
    weight gradients of that device, in one batch.

    `caps_of` gives the caps of the weight gradients. The largest magnitudes that it takes hold no values yet.
    """
    batch = Batch(tensors[0].device)
    batch.reserve(tensors, wanted, weights)
    packed, largest = batch.measure(tensors), batch.channels(wanted)
    packed_weights = batch.measure(weights, caps_of(largest))
    batch.launch()
    return packed, largest, packed_weights


def largest_cuda(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The largest magnitude of each float32, float16 or bfloat16 tensor, all on one device, as float32."""
    batch = Batch(tensors[0].device)
    batch.largest(tensors)
    return batch.launch().view(torch.float32)[: len(tensors)]


def norms_cuda(grads: Sequence[torch.Tensor]) -> torch.Tensor:
    """The 2-norm of each gradient, all on one device and of 16 bits or more, as float64."""
    batch = Batch(grads[0].device)
    batch.norms(grads)
    return batch.launch()[: len(grads)]
