"""The kernels of `stats.dispatch` for CUDA tensors: each call is a few launches, and nothing is waited for."""

from collections.abc import Sequence

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
    tensors: Sequence[torch.Tensor], wanted: Sequence[ChannelMax]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """`measure_cuda` of tensors of one device, and the largest magnitudes by channel as float32, in one batch."""
    batch = Batch(tensors[0].device)
    batch.reserve(tensors, wanted)
    packed, largest = batch.measure(tensors), batch.channels(wanted)
    batch.launch()
    return packed, largest


def norms_cuda(grads: Sequence[torch.Tensor]) -> torch.Tensor:
    """The 2-norm of each gradient, all on one device and of 16 bits or more, as float64."""
    batch = Batch(grads[0].device)
    batch.norms(grads)
    return batch.launch()[: len(grads)]
