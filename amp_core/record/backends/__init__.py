"""Everything that depends on the device, one class per device type: clock, memory, kernels, sampler, precision flags.

    >>> backend = backend_of(torch.device("cuda:0"))
    >>> backend.memory_bytes()
    (1310720, 4194304)

`base.Backend` is the interface and its defaults; `cpu`, `cuda` (ROCm included) implement it. A recorder gets its
backend once. `torch.cuda` is used only here.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from amp_core.record.backends.base import Backend
from amp_core.record.backends.cpu import Cpu
from amp_core.record.backends.cuda import Cuda

BACKENDS: dict[str, type[Backend]] = {backend.type: backend for backend in (Cuda, Cpu)}
"""By device type; those that `auto` prefers come first. A type that is not here is recorded with the defaults."""

_instances: dict[torch.device, Backend] = {}


def backend_of(device: torch.device) -> Backend:
    """The `Backend` of that device, always the same object."""
    if device not in _instances:
        _instances[device] = BACKENDS.get(device.type, Backend)(device)
    return _instances[device]


def widened(tensor: torch.Tensor, *, copy: bool = False) -> torch.Tensor:
    """`tensor` as float64, or as float32 if its device has no float64; with `copy`, never the same memory."""
    return tensor.to(torch.float64 if backend_of(tensor.device).has_float64 else torch.float32, copy=copy)


def accelerators() -> list[type[Backend]]:
    """Device types other than the CPU that torch can use here."""
    return [backend for backend in BACKENDS.values() if backend is not Cpu and backend.available()]


def backend_named(device: str) -> type[Backend]:
    """The backend class for the device of a training: `auto`, `cpu`, `cuda` or `cuda:N`."""
    if device == "auto":
        return next(iter(accelerators()), Cpu)
    return BACKENDS[device.partition(":")[0]]


@contextmanager
def fp32_precision_restored() -> Iterator[list[tuple[Any, str]]]:
    """The switches that let FP32 products use fewer bits are afterwards as before. Gives `tf32_switches` of all
    backends but those that the program has superseded with a newer one.

    PyTorch has three sets of them: `allow_tf32`, `set_float32_matmul_precision` and, from 2.9 on, `fp32_precision`.
    Each sets others too, and the older two cannot be read where the newest one disagrees; so the newest is restored
    last.
    """
    switches = [switch for backend in BACKENDS.values() for switch in backend.tf32_switches()]
    owners = [owner for backend in BACKENDS.values() for owner in backend.fp32_precision_owners()]
    older = {switch: value for switch in switches if (value := _or_none(partial(getattr, *switch))) is not None}
    matmul = _or_none(torch.get_float32_matmul_precision)
    newest = [(owner, owner.fp32_precision) for owner in owners]
    try:
        yield list(older)
    finally:
        for (owner, name), value in older.items():
            setattr(owner, name, value)
        if matmul is not None:
            torch.set_float32_matmul_precision(matmul)
        for owner, value in newest:
            owner.fp32_precision = value


def _or_none(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except RuntimeError:
        return None


def forget_peaks() -> None:
    """Restart the tracking of peak memory, for a process that trains again. torch's own peak stays unchanged."""
    for backend in _instances.values():
        backend.forget_peaks()
