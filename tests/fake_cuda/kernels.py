"""The kernels of the fake machine, each with the results of the CUDA kernel, computed on the host."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from amp_core.record.backends.cpu import Cpu
from amp_core.record.stats.channels import ChannelMax, channel_maxima
from amp_core.record.stats.layout import Cap
from tests.fake_cuda.tensors import CudaTensor, kernel

failing: dict[str, Exception] = {}
"""The exception that launches of a kernel raise, by its name, as without a compiler."""


def measure(tensors: Sequence[Any], caps: Sequence[Cap | None] = ()) -> torch.Tensor:
    """`measure` of tensors of one device."""
    limits = [
        None if cap is None else Cap(cap.largest.raw.to(tensor.dtype), cap.inner)  # type: ignore[attr-defined]
        for tensor, cap in zip(tensors, caps, strict=False)
    ]
    held = [*tensors, *(cap.largest for cap in caps if cap is not None)]
    return _launched("measure", held, [t.raw for t in tensors], limits)


def channels(grad: Any, count: int, inner: int) -> torch.Tensor:
    """`channels` of one gradient."""
    return _launched("channels", [grad], grad.raw, count, inner)


def norms(grads: Sequence[Any]) -> torch.Tensor:
    """`norms` of gradients of one device."""
    _may_fail("norms")
    return kernel("norms", grads, lambda: torch.stack([g.raw.to(torch.float64).norm() for g in grads]))


def largest(tensors: Sequence[Any]) -> torch.Tensor:
    """`largest` of tensors of one device."""
    _may_fail("largest")
    return kernel("largest", tensors, lambda: torch.stack([t.raw.to(torch.float32).abs().max() for t in tensors]))


def outputs(
    tensors: Sequence[Any],
    wanted: Sequence[ChannelMax],
    weights: Sequence[Any] = (),
    caps_of: Callable[[list[torch.Tensor]], Sequence[Cap | None]] = lambda largest: (),
) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
    """`measure`, the largest magnitudes by channel, and `measure` of weight gradients."""
    _may_fail("outputs")
    given: list[Any] = [one.into for one in wanted]
    raws = [getattr(into, "raw", into) for into in given]
    read = [*tensors, *(into for into in given if isinstance(into, CudaTensor))]
    with torch._C.DisableTorchFunction():  # it makes tensors of the host
        maxima = channel_maxima(
            [one._replace(grad=one.grad.raw, into=raw) for one, raw in zip(wanted, raws, strict=True)]  # type: ignore[attr-defined]
        )
    largest: list[torch.Tensor] = [kernel("outputs", read, values.clone) for values in maxima]
    return measure(tensors), largest, measure(weights, caps_of(largest)) if weights else torch.empty(0)


def blocks(magnitude: Any, factor: Any, top: Any, *shape: int) -> torch.Tensor:
    """`blocks` of one matrix."""
    return _launched("blocks", [magnitude, factor, top], magnitude.raw, factor.raw, top.raw, *shape)


def _launched(name: str, read: Sequence[CudaTensor], *args: Any) -> torch.Tensor:
    _may_fail(name)
    return kernel(name, read, lambda: Cpu.kernels()[name](*args))


def _may_fail(name: str) -> None:
    if name in failing:
        raise failing[name]


def kernels() -> dict[str, Any]:
    """Replaces `Cuda.kernels`."""
    return {
        "measure": measure,
        "channels": channels,
        "norms": norms,
        "largest": largest,
        "outputs": outputs,
        "blocks": blocks,
    }
