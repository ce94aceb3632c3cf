"""The statistics in plain torch: the reference, and the fallback where no kernel can be used."""

import torch

from amp_core.formats import FORMAT_OF_DTYPE
from amp_core.record.backends import backend_of
from amp_core.record.stats.layout import Cap, dtype_name, in_one_row, packed_size

CHUNK = 2**20
"""Values that are measured together. Intermediate results take some 60 bytes for each."""


def measure_plain(tensor: torch.Tensor, cap: Cap | None = None) -> torch.Tensor:
    """The specification in torch operations, for devices without a kernel; none of them waits for the device.

    With `cap`, of magnitudes that are at most their channel's.
    """
    tensor = tensor.detach()
    if not backend_of(tensor.device).has_float64:
        tensor = tensor.cpu()
        cap = None if cap is None else Cap(cap.largest.cpu(), cap.inner)
    row = (in_one_row(tensor) if cap is None else tensor.contiguous()).view(-1)
    whole = torch.zeros(packed_size(tensor.dtype), dtype=torch.float64, device=row.device)
    absmax = torch.zeros((), dtype=torch.float64, device=row.device)
    absmin = absmax + torch.inf
    for start in range(0, row.numel(), CHUNK):
        values = row[start : start + CHUNK]
        # Narrow ones are widened, which is exact.
        wide = values if values.dtype in (torch.float32, torch.float64) else values.to(torch.float32)
        magnitude = wide.abs()
        if cap is not None:
            most = cap.of(start, start + len(values)).to(magnitude.dtype)
            magnitude = torch.where(most < magnitude, most, magnitude)  # a NaN is neither capped nor a cap
        added, largest, smallest = _measured(magnitude, dtype_name(tensor.dtype))
        whole += added
        absmax, absmin = torch.maximum(absmax, largest), torch.minimum(absmin, smallest)
    whole[3] = absmax
    whole[4] = torch.where(torch.isinf(absmin), 0.0, absmin)
    return whole


def _measured(magnitude: torch.Tensor, dtype: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What can be added up of a packed vector, the largest finite magnitude, and the smallest nonzero one (infinity
    where there is none)."""
    form = FORMAT_OF_DTYPE[dtype]
    low, bins = form.min_subnormal_exponent, form.powers_of_two
    finite = torch.isfinite(magnitude)
    nonzero = finite & (magnitude > 0)
    values = torch.where(finite, magnitude, 0).to(torch.float64)
    smallest = torch.where(nonzero, magnitude, torch.inf).min().to(torch.float64)
    zero = torch.zeros((), dtype=torch.float64, device=magnitude.device)
    leading = torch.stack(
        [
            (magnitude == 0).sum().to(torch.float64),
            torch.isinf(magnitude).sum().to(torch.float64),
            torch.isnan(magnitude).sum().to(torch.float64),
            zero,
            zero,
            values.sum(),
            values.square().sum(),
        ]
    )
    exponents = torch.frexp(magnitude).exponent.to(torch.int64) - 1 - low
    slots = torch.where(nonzero, exponents.clamp(0, bins - 1), bins)  # one more slot takes what has no exponent
    counts = torch.zeros(bins + 1, dtype=torch.int64, device=magnitude.device)
    counts.scatter_add_(0, slots, torch.ones_like(slots))
    return torch.cat([leading, counts[:bins].to(torch.float64)]), values.max(), smallest
