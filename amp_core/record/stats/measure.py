"""The statistics of a tensor: their specification, and the call that computes them with the best kernel there is.

    >>> packed = measure([torch.tensor([0.0, 1.5, -3.0, float("inf")])])
    >>> unpack(packed[0].numpy(), "float32")
    Measured(numel=4, zero=1, subnormal=0, normal=2, inf=1, nan=0, absmax=3.0, absmin=1.5, ..., exp_min=0, ...)

For each tensor: counts of exact zeros, infinities and NaNs, the largest finite and smallest nonzero magnitude, the sum
and the sum of squares of finite magnitudes, and the number of finite nonzero values with each exponent
floor(log2|x|), subnormals included. Subnormal and normal follow from the exponents, since each dtype's limit between
the two is a power of two. Values narrower than 32 bits are widened first, which is exact.

Results stay on the tensor's device, packed as float64 (counts are exact up to 2^53), so that one copy brings all of a
step's statistics to the host. `dispatch` chooses the kernel: numba for CPU tensors, CUDA C++ for CUDA tensors, else
plain torch.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from amp_core.record.stats.dispatch import by_kernel, kernel_of
from amp_core.record.stats.layout import Cap, packed_size
from amp_core.record.stats.plain import measure_plain

if TYPE_CHECKING:
    from amp_core.record.stats.numba.measure import PassingTensors


def measure(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Measure each tensor; returns one packed float64 vector per tensor, on the tensor's device, for `unpack`.

    Takes float32, float16, bfloat16, float64 and FP8 tensors of any shape and stride. Never waits for the device.
    """
    packed: list[torch.Tensor] = [torch.empty(0, device="cpu")] * len(tensors)
    for device in {t.device: None for t in tensors}:
        here = [i for i, t in enumerate(tensors) if t.device == device]
        together = measure_together([tensors[i] for i in here])
        parts = together.split([packed_size(tensors[i].dtype) for i in here])
        for i, part in zip(here, parts, strict=True):
            packed[i] = part
    return packed


def measure_together(tensors: Sequence[torch.Tensor], caps: Sequence[Cap | None] = ()) -> torch.Tensor:
    """The packed vectors of tensors of one device, concatenated.

    `caps` has a cap of the tensor's dtype, or None, for each tensor. After all of these follows a second packed vector
    for each tensor with a cap, with only the exponent counts set: those of the capped magnitudes.
    """
    if not tensors:
        return torch.zeros(0, dtype=torch.float64, device="cpu")
    measured = by_kernel("measure", tensors[0].device.type, tensors, caps)
    if measured is not None:
        return measured
    limited = [measure_plain(t, cap) for t, cap in zip(tensors, caps, strict=False) if cap is not None]
    return torch.cat([*map(measure_plain, tensors), *limited])


def compile_ahead(devices: Iterable[torch.device]) -> None:
    """Compile ahead what training on those devices needs, which takes seconds on a GPU: autocast makes tensors of 16
    bits of which the model's parameters give no indication."""
    for device in devices:
        dtypes = [torch.float32] if device.type == "cpu" else [torch.float32, torch.float16, torch.bfloat16]
        measure_together([torch.zeros(1, dtype=dtype, device=device) for dtype in dtypes])


def passing_tensors(device: str) -> "PassingTensors | None":
    """The fast path for small tensors that come one at a time on that type of device; None if it has none."""
    make = kernel_of("passing", device)
    return make() if make is not None else None
