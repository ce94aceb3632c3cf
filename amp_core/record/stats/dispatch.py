"""Chooses how a statistic is computed: by a kernel of the device's backend, or by plain torch.

    >>> by_kernel("channels", "cpu", grad, count, inner)     # None: no kernel; use plain torch

Kernels come from `Backend.kernels()`. If they cannot be imported, or one fails (those of CUDA are compiled on first
use), plain torch computes the same numbers, more slowly; `fallbacks` holds the reason, and an event of each
run reports it.
"""

import logging
from typing import Any

import torch

from amp_core.record.backends import BACKENDS
from amp_core.record.backends.base import Backend, Kernel

KERNELS = ("measure", "channels", "norms", "largest", "passing", "outputs", "blocks", "casts")
"""`measure.measure_together`, `channels.channel_largest`, `norms.norms` and `norms.largest`, each without its checks,
what makes `measure.passing_tensors`, `measure.measure_together` with `channels.channel_maxima` at once,
`blocks.distances`, and `casts.cast.losses_plain`."""

fallbacks: dict[str, str] = {}
"""By device type: why plain torch measures there."""

_kernels: dict[str, dict[str, Kernel]] = {}

log = logging.getLogger("amp_core")


def kernel_of(name: str, device_type: str) -> Kernel | None:
    """The kernel of that name; None if there is none."""
    kernels = _kernels.get(device_type)
    if kernels is None:
        kernels = _kernels[device_type] = _import_kernels(device_type)
    return kernels.get(name)


def by_kernel(name: str, device_type: str, *args: Any) -> torch.Tensor | None:
    """The result of the kernel of that name; None if plain torch has to compute it."""
    kernel = kernel_of(name, device_type)
    if kernel is None:
        return None
    try:
        result: torch.Tensor = kernel(*args)
    except Exception as error:
        if not BACKENDS.get(device_type, Backend).may_lack_kernels or isinstance(error, torch.OutOfMemoryError):
            raise
        _kernels[device_type].pop(name, None)  # another thread may have imported them already
        _fall_back(device_type, error)
        return None
    return result


def _import_kernels(device_type: str) -> dict[str, Kernel]:
    try:
        return BACKENDS.get(device_type, Backend).kernels()
    except Exception as error:  # a missing or broken package
        _fall_back(device_type, error)
        return {}


def _fall_back(device_type: str, error: Exception) -> None:
    lines = str(error).strip().splitlines()
    reason = lines[0][:200] if lines else type(error).__name__
    if device_type not in fallbacks:
        fallbacks[device_type] = reason
        log.warning("AMPscope: statistics on %s come from plain torch, which is slower: %s", device_type, reason)
