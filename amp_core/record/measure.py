"""One specification of what is measured on a tensor, and the plain torch implementation of it.

    >>> packed = measure([torch.tensor([0.0, 1.5, -3.0, float("inf")])])
    >>> unpack(packed[0].numpy(), "float32")
    Measured(numel=4, zero=1, subnormal=0, normal=2, inf=1, nan=0, absmax=3.0, absmin=1.5, ..., exp_min=0, ...)

For each tensor: counts of exact zeros, infinities and NaNs, the largest finite and smallest nonzero magnitude, the sum
and the sum of squares of finite magnitudes, and the number of finite nonzero values with each exponent
floor(log2|x|), subnormals included. Subnormal and normal follow from the exponents, since each dtype's limit between
the two is a power of two. Values narrower than 32 bits are widened first, which is exact.

Results stay on the tensor's device, packed as float64 (counts are exact up to 2^53), so that a step's statistics come
over in one copy. CPU tensors go to the numba kernel of `_measure_cpu`, CUDA tensors to the Triton kernel of
`_measure_cuda`, where those are installed; everything else takes the plain path below.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from amp_core.formats import FORMAT_OF_DTYPE
from amp_core.record.channels import Cap

Key = tuple[str, str, str]
"""Name, kind and dtype of a tensor that is measured."""

LEADING = 7
"""Packed values before the exponent counts: zero, inf, nan, absmax, absmin, abs_sum, sq_sum."""
INFINITIES, NANS, SQUARES = 1, 2, 6
"""Where three of them stand."""


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
    rms: float
    """Root of the mean square of the finite values; 0 where there are none."""
    exp_min: int
    exp_counts: npt.NDArray[np.int64]


def measurable(tensor: torch.Tensor) -> bool:
    """Whether `measure` takes the tensor: real, floating point, of a format it knows, and with values (not meta)."""
    return _is_known(tensor.dtype) and not tensor.is_meta


@cache
def _is_known(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype_name(dtype) in FORMAT_OF_DTYPE


def measure(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Measure each tensor; returns one packed float64 vector per tensor, on the tensor's device, for `unpack`.

    Takes float32, float16, bfloat16, float64 and FP8 tensors of any shape and stride. Never waits for the device.
    """
    packed: list[torch.Tensor] = [torch.empty(0)] * len(tensors)
    for device in {t.device: None for t in tensors}:
        here = [i for i, t in enumerate(tensors) if t.device == device]
        together = measure_together([tensors[i] for i in here])
        parts = together.split([packed_size(tensors[i].dtype) for i in here])
        for i, part in zip(here, parts, strict=True):
            packed[i] = part
    return packed


def measure_together(tensors: Sequence[torch.Tensor], caps: Sequence[Cap] | None = None) -> torch.Tensor:
    """What `measure` returns for tensors of one device, as one vector: the packed vectors one after another.

    With `caps`, one for each tensor and of its dtype, magnitudes count as at most what those say.
    """
    if not tensors:
        return torch.zeros(0, dtype=torch.float64)
    kind = tensors[0].device.type
    kernel = _kernel(kind)
    if kernel is not None:
        try:
            return kernel(tensors, caps)
        except Exception as error:
            if kind == "cpu" or isinstance(error, torch.OutOfMemoryError):
                raise
            _do_without(kind, error)  # Triton compiles on first use, which takes a C compiler and more
    if caps is None:
        return torch.cat([_measure_plain(t) for t in tensors])
    return torch.cat([_measure_plain(_capped(t, cap)) for t, cap in zip(tensors, caps, strict=True)])


def unpack(packed: npt.NDArray[np.float64], dtype: str) -> Measured:
    """Read what `measure` packed of a tensor of `dtype` (a name such as `float16`), once it is on the host."""
    columns, counts = unpack_together(packed, [dtype])
    numbers = {name: values[0].item() for name, values in columns.items()}
    return Measured(**numbers, exp_counts=counts[0])


def unpack_together(
    packed: npt.NDArray[np.float64], dtypes: Sequence[str]
) -> tuple[dict[str, npt.NDArray[Any]], list[npt.NDArray[np.int64]]]:
    """Read packed vectors that stand one after another; `dtypes` names each one's dtype.

    Returns the columns of `Measured` but the last, with a value per vector, and the last: `exp_counts` of each.
    """
    if len(set(dtypes)) > 1:
        return _unpack_mixed(packed, dtypes)
    form = FORMAT_OF_DTYPE[dtypes[0]]
    rows = packed.reshape(len(dtypes), LEADING + form.powers_of_two)
    zero, inf, nan = rows[:, :3].T.astype(np.int64)
    absmax, absmin, abs_sum, sq_sum = rows[:, 3:LEADING].T
    # Of the 277 exponents of FP32 a step has some thirty: only columns from the lowest to the highest are gone through.
    found = np.flatnonzero(rows[:, LEADING:].max(axis=0))
    low, high = (int(found[0]), int(found[-1]) + 1) if len(found) else (0, 1)
    counts = rows[:, LEADING + low : LEADING + high].astype(np.int64)
    normal_from = form.min_normal_exponent - form.min_subnormal_exponent - low
    subnormal = counts[:, : max(0, normal_from)].sum(axis=1)
    nonzero = counts.sum(axis=1)
    used = counts != 0
    any_used = used.any(axis=1)
    first = used.argmax(axis=1)
    stop = np.where(any_used, high - low - used[:, ::-1].argmax(axis=1), 0)
    finite = zero + nonzero
    columns: dict[str, npt.NDArray[Any]] = {
        "numel": finite + inf + nan,
        "zero": zero,
        "subnormal": subnormal,
        "normal": nonzero - subnormal,
        "inf": inf,
        "nan": nan,
        "absmax": absmax,
        "absmin": absmin,
        "abs_sum": abs_sum,
        "sq_sum": sq_sum,
        "rms": np.sqrt(sq_sum / np.maximum(finite, 1)),
        "exp_min": np.where(any_used, form.min_subnormal_exponent + low + first, 0),
    }
    return columns, [row[a:b] for row, a, b in zip(counts, first.tolist(), stop.tolist(), strict=True)]


def _unpack_mixed(
    packed: npt.NDArray[np.float64], dtypes: Sequence[str]
) -> tuple[dict[str, npt.NDArray[Any]], list[npt.NDArray[np.int64]]]:
    """`unpack_together`, dtype by dtype."""
    ends = np.cumsum([packed_length(dtype) for dtype in dtypes])
    vectors = np.split(packed, ends[:-1])
    columns: dict[str, npt.NDArray[Any]] = {}
    counts: list[npt.NDArray[np.int64]] = [np.zeros(0, np.int64)] * len(dtypes)
    for dtype in set(dtypes):
        mine = [i for i, d in enumerate(dtypes) if d == dtype]
        part, part_counts = unpack_together(np.concatenate([vectors[i] for i in mine]), [dtype] * len(mine))
        for name, values in part.items():
            columns.setdefault(name, np.zeros(len(dtypes), values.dtype))[mine] = values
        for i, one in zip(mine, part_counts, strict=True):
            counts[i] = one
    return columns, counts


def merged(one: npt.NDArray[np.float64], other: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Two packed vectors of the same dtype as if their tensors had been one."""
    both = one + other
    both[3] = max(one[3], other[3])
    both[4] = min(one[4] or np.inf, other[4] or np.inf) if one[4] or other[4] else 0.0
    return both


@cache
def packed_size(dtype: torch.dtype) -> int:
    """Length of the packed vector of a tensor of `dtype`."""
    return packed_length(dtype_name(dtype))


@cache
def packed_length(dtype: str) -> int:
    """The same by the dtype's name, such as `float16`."""
    return LEADING + FORMAT_OF_DTYPE[dtype].powers_of_two


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """`float16` for `torch.float16`."""
    return str(dtype).removeprefix("torch.")


@lru_cache(maxsize=2**16)
def key_of(name: str, kind: str, dtype: str) -> Key:
    """The same object for the same tensor at every step: new ones by the thousand start Python's garbage collector."""
    return name, kind, dtype


def in_one_row(tensor: torch.Tensor) -> torch.Tensor:
    """The values without gaps, in whatever order; a copy only where they do not lie so."""
    tensor = tensor.detach()
    if tensor.is_contiguous():
        return tensor
    by_stride = tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
    return by_stride.contiguous()  # a transposed or channels-last tensor is contiguous that way


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    """The values in one row, contiguous, as float32, or float64 where they are that."""
    wide = tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.to(torch.float32)
    return wide.reshape(-1)


def _capped(tensor: torch.Tensor, cap: Cap) -> torch.Tensor:
    """Magnitudes, each at most its channel's; a NaN is neither capped nor a cap."""
    magnitude = tensor.detach().reshape(-1).abs()
    most = cap.spread(tensor)
    return torch.where(most < magnitude, most, magnitude)


def _measure_plain(tensor: torch.Tensor) -> torch.Tensor:
    """The specification in torch operations, for devices without a kernel; none of them waits for the device."""
    tensor = tensor.detach()
    if tensor.device.type not in ("cpu", "cuda"):
        tensor = tensor.cpu()  # float64 and frexp are missing elsewhere
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


Kernel = Callable[[Sequence[torch.Tensor], Sequence[Cap] | None], torch.Tensor]

_kernels: dict[str, Kernel | None] = {}


def _kernel(device: str) -> Kernel | None:
    """The kernel for tensors of that kind of device; None where the plain path is all there is."""
    if device not in _kernels:
        _kernels[device] = _import_kernel(device)
    return _kernels[device]


def _import_kernel(device: str) -> Kernel | None:
    try:
        if device == "cpu":
            from amp_core.record._measure_cpu import measure_cpu

            return measure_cpu
        if device == "cuda":
            from amp_core.record._measure_cuda import measure_cuda

            return measure_cuda
    except ImportError:  # numba or triton is not there: the plain path gives the same numbers, slower
        pass
    return None


def _do_without(device: str, error: Exception) -> None:
    _kernels[device] = None
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    warnings.warn(
        f"the Triton kernel cannot run, so watching measures with plain torch, which is slower: {reason}", stacklevel=2
    )
