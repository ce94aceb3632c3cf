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
from typing import TYPE_CHECKING

import torch

from amp_core.record.stats.layout import Cap, packed_size
from amp_core.record.stats.plain import capped, measure_plain

if TYPE_CHECKING:
    from amp_core.record.stats.numba.measure import PassingTensors


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


def measure_together(tensors: Sequence[torch.Tensor], caps: Sequence[Cap | None] = ()) -> torch.Tensor:
    """What `measure` returns for tensors of one device, as one vector: the packed vectors one after another.

    `caps` has a cap or None for each tensor, of its dtype. For those with one a second packed vector follows behind
    all others, of which only the exponent counts are set: those of magnitudes that are at most what the cap says.
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
    limited = [capped(t, cap) for t, cap in zip(tensors, caps, strict=False) if cap is not None]
    return torch.cat([measure_plain(t) for t in [*tensors, *limited]])


def passing_tensors(device: str) -> "PassingTensors | None":
    """What measures small tensors one at a time on that kind of device; None where nothing is quicker at it."""
    if device != "cpu" or _kernel(device) is None:
        return None
    from amp_core.record.stats.numba.measure import PassingTensors

    return PassingTensors()


Kernel = Callable[[Sequence[torch.Tensor], Sequence[Cap | None]], torch.Tensor]

_kernels: dict[str, Kernel | None] = {}


def _kernel(device: str) -> Kernel | None:
    """The kernel for tensors of that kind of device; None where the plain path is all there is."""
    if device not in _kernels:
        _kernels[device] = _import_kernel(device)
    return _kernels[device]


def _import_kernel(device: str) -> Kernel | None:
    try:
        if device == "cpu":
            from amp_core.record.stats.numba.measure import measure_cpu

            return measure_cpu
        if device == "cuda":
            from amp_core.record.stats.triton.measure import measure_cuda

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
