"""The kernels of the fake machine: each is one launch, and computes what numba's computes on the host."""

from collections.abc import Sequence
from typing import Any

import torch

from amp_core.record.backends.cpu import Cpu
from amp_core.record.stats.layout import Cap
from tests.fake_cuda.tensors import CudaTensor, kernel

failing: dict[str, Exception] = {}
"""By name of a kernel: what its launch raises, as where there is no compiler."""


def measure(tensors: Sequence[Any], caps: Sequence[Cap | None] = ()) -> torch.Tensor:
    """`measure` of tensors of one device."""
    limits = [None if cap is None else Cap(cap.largest.raw, cap.inner) for cap in caps]  # type: ignore[attr-defined]
    held = [*tensors, *(cap.largest for cap in caps if cap is not None)]
    return _launched("measure", held, [t.raw for t in tensors], limits)


def channels(grad: Any, count: int, inner: int) -> torch.Tensor:
    """`channels` of one gradient."""
    return _launched("channels", [grad], grad.raw, count, inner)


def _launched(name: str, read: Sequence[CudaTensor], *args: Any) -> torch.Tensor:
    if name in failing:
        raise failing[name]
    return kernel(name, read, lambda: Cpu.kernels()[name](*args))


def kernels() -> dict[str, Any]:
    """In the place of `Cuda.kernels`."""
    return {"measure": measure, "channels": channels}
