"""The statistics in plain torch: the reference, and the fallback where no kernel can be used."""

import torch

from amp_core.formats import FORMAT_OF_DTYPE
from amp_core.record.backends import backend_of
from amp_core.record.stats.layout import Cap, dtype_name


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    """The values in one row, contiguous, as float32, or float64 where they are that."""
    wide = tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.to(torch.float32)
    return wide.reshape(-1)


def capped(tensor: torch.Tensor, cap: Cap) -> torch.Tensor:
    """Magnitudes, each at most its channel's; a NaN is neither capped nor a cap."""
    magnitude = tensor.detach().reshape(-1).abs()
    most = cap.spread(tensor).to(tensor.dtype)
    return torch.where(most < magnitude, most, magnitude)


def measure_plain(tensor: torch.Tensor) -> torch.Tensor:
    """The specification in torch operations, for devices without a kernel; none of them waits for the device."""
    tensor = tensor.detach()
    if not backend_of(tensor.device).has_float64:
        tensor = tensor.cpu()
    magnitude = _widened(tensor).abs()
    device = magnitude.device
    form = FORMAT_OF_DTYPE[dtype_name(tensor.dtype)]
    low, bins = form.min_subnormal_exponent, form.powers_of_two
    finite = torch.isfinite(magnitude)
    nonzero = finite & (magnitude > 0)
    values = torch.where(finite, magnitude, 0).to(torch.float64)
    smallest = torch.where(nonzero, magnitude, torch.inf).to(torch.float64)
    edge = torch.zeros(1, dtype=torch.float64, device=device)  # so that an empty tensor has a largest value too
    absmin = torch.cat([smallest, edge + torch.inf]).min()
    leading = torch.stack(
        [
            (magnitude == 0).sum().to(torch.float64),
            torch.isinf(magnitude).sum().to(torch.float64),
            torch.isnan(magnitude).sum().to(torch.float64),
            torch.cat([values, edge]).max(),
            torch.where(torch.isinf(absmin), 0.0, absmin),
            values.sum(),
            values.square().sum(),
        ]
    )
    exponents = torch.frexp(magnitude).exponent.to(torch.int64) - 1 - low
    slots = torch.where(nonzero, exponents.clamp(0, bins - 1), bins)  # one more slot takes what has no exponent
    counts = torch.zeros(bins + 1, dtype=torch.int64, device=device)
    counts.scatter_add_(0, slots, torch.ones_like(slots))
    return torch.cat([leading, counts[:bins].to(torch.float64)])
