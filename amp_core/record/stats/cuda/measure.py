"""The kernels of `stats.dispatch` for CUDA tensors: each call is a few launches, and nothing is waited for."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from amp_core.record.backends import backend_of
from amp_core.record.stats.channels import ChannelMax
from amp_core.record.stats.cuda import program
from amp_core.record.stats.cuda.batch import Batch, Launch
from amp_core.record.stats.layout import Cap, addresses_of

MIN_REPEATED = 16
"""Tensors from which a table is kept on the device for the next call."""


def measure_cuda(tensors: Sequence[torch.Tensor], caps: Sequence[Cap | None] = ()) -> torch.Tensor:
    """The packed vectors of CUDA tensors of one device, one after another, as `measure_together` has them."""
    if all(cap is None for cap in caps):
        return _launched("measure", tensors)
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
    return _launched("norms", grads)


class _Kept(NamedTuple):
    """The launches of the last call on tensors in the same places."""

    places: tuple[Any, ...]
    launches: list[Launch]
    length: int
    """Of the results, behind which each tensor has a ticket."""


_kept: dict[tuple[torch.device, str, int], _Kept] = {}
"""By device, kernel and number of tensors."""


def _launched(kernel: str, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The results of `Batch.measure` or `Batch.norms`.

    The gradients of a step mostly lie where those of the step before lay. Their table is on the device then: to build
    and copy one of some hundred tensors takes the host a millisecond.
    """
    device = tensors[0].device
    if len(tensors) < MIN_REPEATED or not all(map(torch.Tensor.is_contiguous, tensors)):
        return _new(kernel, tensors)[0]
    key = device, kernel, len(tensors)
    stream = backend_of(device).current_stream()  # on which the table was copied
    places = stream, addresses_of(tensors), [t.numel() for t in tensors], [t.dtype for t in tensors]
    kept = _kept.get(key)
    if kept is not None and kept.places == places:
        whole = torch.zeros(kept.length + len(tensors), dtype=torch.float64, device=device)
        for launch in kept.launches:
            program.launch(device, *launch, whole)
        return whole[: kept.length]
    results, launches = _new(kernel, tensors)
    _kept[key] = _Kept(places, launches, len(results))
    return results


def _new(kernel: str, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[Launch]]:
    batch = Batch(tensors[0].device)
    if kernel == "measure":
        results = batch.measure(tensors)
        batch.launch()
    else:
        batch.norms(tensors)
        results = batch.launch()[: len(tensors)]
    return results, batch.launched
