"""Copies all measurements of a step from the device to the host at once.

    >>> transfer = HostTransfer()
    >>> transfer.put("loss", loss.detach())
    >>> transfer.send()
    >>> transfer.ready() and transfer.value("loss")

The backend of the device does the copy. On CUDA it goes to pinned memory on the current stream, and the host does not
wait: a transfer is ready once its event has passed. Values on the host are ready at once.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from amp_core.record.backends import backend_of
from amp_core.record.backends.base import Event


class HostTransfer:
    """Named tensors, concatenated into one float64 vector and copied to the host together."""

    def __init__(self) -> None:
        self._here: dict[str, float | npt.NDArray[np.float64]] = {}
        self._parts: dict[str, torch.Tensor] = {}  # on other devices, until they are sent
        self._slices: dict[str, slice] = {}
        self._host: torch.Tensor | None = None
        self._numbers: npt.NDArray[np.float64] | None = None
        self._event: Event | None = None

    def put(self, key: str, value: torch.Tensor | float) -> None:
        """Add a number, or a tensor of any shape. Clone tensors that the training may still modify."""
        if not isinstance(value, torch.Tensor):
            self._here[key] = value
        elif not value.is_cpu:
            self._parts[key] = value
        elif value.numel() == 1:
            self._here[key] = float(value.item())
        else:
            as_it_is = value.dtype is torch.float64 and value.dim() == 1
            self._here[key] = (value if as_it_is else value.reshape(-1).to(torch.float64)).detach().numpy()

    def send(self) -> None:
        """Start the copy. Tensors of several devices are first moved to one of them."""
        position = 0
        for key, tensor in self._parts.items():
            self._slices[key] = slice(position, position + tensor.numel())
            position += tensor.numel()
        parts, self._parts = list(self._parts.values()), {}
        if parts:
            self._host, self._event = backend_of(parts[0].device).copy_to_host(parts)

    def ready(self, wait: bool = False) -> bool:
        """Whether the copy has arrived; with `wait`, blocks until it has."""
        if self._event is None:
            return True
        if wait:
            self._event.synchronize()
        return bool(self._event.query())

    def has(self, key: str) -> bool:
        """Whether a value was put under `key`."""
        return key in self._here or key in self._slices

    def values(self, key: str) -> npt.NDArray[np.float64]:
        """The tensor of that name, flat."""
        here = self._here.get(key)
        if here is None:
            return self._arrived()[self._slices[key]]
        return here if isinstance(here, np.ndarray) else np.array([here], np.float64)

    def joined(self, keys: Sequence[str]) -> npt.NDArray[np.float64]:
        """The tensors of those names, flat, one after another."""
        if len(keys) == 1:
            return self.values(keys[0])
        parts = [self._slices[key] for key in keys if key in self._slices]
        if len(parts) == len(keys) and all(one.stop == two.start for one, two in pairwise(parts)):
            return self._arrived()[parts[0].start : parts[-1].stop]  # adjacent: nothing to copy
        return np.concatenate([self.values(key) for key in keys])

    def value(self, key: str) -> float | None:
        """The single number of that name; None if there is none."""
        here = self._here.get(key)
        if here is None and key not in self._slices:
            return None
        return float(here if isinstance(here, int | float) else self.values(key)[0])

    def _arrived(self) -> npt.NDArray[np.float64]:
        if self._numbers is None:
            assert self._host is not None, "send() comes before values()"
            self._numbers = self._host.numpy()
        return self._numbers
