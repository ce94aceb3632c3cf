"""One specification of what is measured on a tensor, and the plain torch implementation of it.

    >>> packed = measure([torch.tensor([0.0, 1.5, -3.0, float("inf")])])
    >>> unpack(packed[0].numpy(), "float32")
    Measured(numel=4, zero=1, subnormal=0, normal=2, inf=1, nan=0, absmax=3.0, absmin=1.5, ..., exp_min=0, ...)

For each tensor: counts of exact zeros, infinities and NaNs, the largest finite and smallest nonzero magnitude, the sum
and the sum of squares of finite magnitudes, and the number of finite nonzero values with each exponent
floor(log2|x|), subnormals included. Subnormal and normal follow from the exponents, since each dtype's limit between
the two is a power of two. Values narrower than 32 bits are widened first, which is exact.

Results stay on the tensor's device, packed as float64 (counts are exact up to 2^53), so that a step's statistics come
over in one copy. CPU tensors go to the numba kernel of `_measure_cpu` where numba is installed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from amp_core.formats import FORMAT_OF_DTYPE, Format

LEADING = 7
"""Packed values before the exponent counts: zero, inf, nan, absmax, absmin, abs_sum, sq_sum."""


@dataclass(frozen=True)
class Measured:
    """What was measured on one tensor; the columns of `tensors` of the same names."""

    numel: int
    zero: int
    subnormal: int
    normal: int
    inf: int
    nan: int
    absmax: float
    absmin: float
    abs_sum: float
    sq_sum: float
    exp_min: int
    exp_counts: npt.NDArray[np.int64]

    @property
    def rms(self) -> float:
        """Root of the mean square of the finite values; 0 where there are none."""
        finite = self.zero + self.subnormal + self.normal
        return float(np.sqrt(self.sq_sum / finite)) if finite else 0.0


def measurable(tensor: torch.Tensor) -> bool:
    """Whether `measure` takes the tensor: real, floating point, of a format it knows."""
    return tensor.is_floating_point() and dtype_name(tensor.dtype) in FORMAT_OF_DTYPE


def measure(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Measure each tensor; returns one packed float64 vector per tensor, on the tensor's device, for `unpack`.

    Takes float32, float16, bfloat16, float64 and FP8 tensors of any shape and stride. Never waits for the device.
    """
    on_cpu = [t.device.type == "cpu" for t in tensors]
    kernel = _cpu_kernel() if any(on_cpu) else None
    if kernel is None:
        return [_measure_plain(t.detach()) for t in tensors]
    flat = [_widened(t.detach()) for t in tensors if t.device.type == "cpu"]
    low, bins = zip(*((_lowest(t.dtype), _bins(t.dtype)) for t in tensors if t.device.type == "cpu"), strict=True)
    packed = iter(kernel.measure_cpu(flat, low, bins))
    return [next(packed) if cpu else _measure_plain(t.detach()) for t, cpu in zip(tensors, on_cpu, strict=True)]


def unpack(packed: npt.NDArray[np.float64], dtype: str) -> Measured:
    """Read what `measure` packed of a tensor of `dtype` (a name such as `float16`), once it is on the host."""
    form = FORMAT_OF_DTYPE[dtype]
    zero, inf, nan = (int(v) for v in packed[:3])
    absmax, absmin, abs_sum, sq_sum = (float(v) for v in packed[3:LEADING])
    counts = packed[LEADING:].astype(np.int64)
    subnormal = int(counts[: form.min_normal_exponent - form.min_subnormal_exponent].sum())
    normal = int(counts.sum()) - subnormal
    used = np.flatnonzero(counts)
    first, last = (int(used[0]), int(used[-1]) + 1) if len(used) else (0, 0)
    return Measured(
        numel=zero + subnormal + normal + inf + nan,
        zero=zero,
        subnormal=subnormal,
        normal=normal,
        inf=inf,
        nan=nan,
        absmax=absmax,
        absmin=absmin,
        abs_sum=abs_sum,
        sq_sum=sq_sum,
        exp_min=form.min_subnormal_exponent + first if len(used) else 0,
        exp_counts=counts[first:last],
    )


def merged(one: npt.NDArray[np.float64], other: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Two packed vectors of the same dtype as if their tensors had been one."""
    both = one + other
    both[3] = max(one[3], other[3])
    both[4] = min(one[4] or np.inf, other[4] or np.inf) if one[4] or other[4] else 0.0
    return both


def packed_size(dtype: torch.dtype) -> int:
    """Length of the packed vector of a tensor of `dtype`."""
    return LEADING + _bins(dtype)


def dtype_name(dtype: torch.dtype) -> str:
    """`float16` for `torch.float16`."""
    return str(dtype).removeprefix("torch.")


def _format(dtype: torch.dtype) -> Format:
    return FORMAT_OF_DTYPE[dtype_name(dtype)]


def _lowest(dtype: torch.dtype) -> int:
    return _format(dtype).min_subnormal_exponent


def _bins(dtype: torch.dtype) -> int:
    form = _format(dtype)
    return form.max_exponent - form.min_subnormal_exponent + 1


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    """The values in one row, contiguous, as float32, or float64 where they are that."""
    wide = tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.to(torch.float32)
    return wide.reshape(-1)


def _measure_plain(tensor: torch.Tensor) -> torch.Tensor:
    """The specification in torch operations, for devices without a kernel; none of them waits for the device."""
    if tensor.device.type not in ("cpu", "cuda"):
        tensor = tensor.cpu()  # float64 and frexp are missing elsewhere
    magnitude = _widened(tensor).abs()
    device = magnitude.device
    low, bins = _lowest(tensor.dtype), _bins(tensor.dtype)
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


@cache
def _cpu_kernel() -> ModuleType | Any:
    try:
        from amp_core.record import _measure_cpu
    except ImportError:  # numba is not there: the plain path gives the same numbers, slower
        return None
    return _measure_cpu
