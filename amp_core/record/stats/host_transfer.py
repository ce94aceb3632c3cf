"""Copies all measurements of a step from the device to the host at once.

    >>> transfer = HostTransfer()
    >>> transfer.put("loss", loss.detach())
    >>> transfer.send()
    >>> transfer.ready() and transfer.value("loss")

The backend of the device does the copy. On CUDA it goes to pinned memory on the current stream, and the host does not
wait: a transfer is ready once its event has passed. Values on the host are ready at once.

Tensors travel as they are, in words of 32 bits: a conversion of each to one dtype would be a launch of its own.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from amp_core.record.backends import backend_of, widened
from amp_core.record.backends.base import Event

_NUMPY = {torch.float64: np.float64, torch.float32: np.float32, torch.int32: np.int32}
"""Dtypes that travel as they are, and what they are on the host. Others are widened."""


class HostTransfer:
    """Named tensors, concatenated and copied to the host together. Their values are float64 there."""

    def __init__(self) -> None:
        self._here: dict[str, float | npt.NDArray[np.float64]] = {}
        self._parts: dict[str, tuple[torch.dtype, torch.Tensor]] = {}  # as words on other devices, until they are sent
        self._slices: dict[str, slice] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        self._host: torch.Tensor | None = None
        self._numbers: npt.NDArray[np.int32] | None = None
        self._event: Event | None = None

    def put(self, key: str, value: torch.Tensor | float) -> None:
        """Add a number, or a tensor of any shape. Clone tensors that the training may still modify."""
        if not isinstance(value, torch.Tensor):
            self._here[key] = value
        elif not value.is_cpu:
            self._parts[key] = _words(value)
        elif value.numel() == 1:
            self._here[key] = float(value.item())
        else:
            as_it_is = value.dtype is torch.float64 and value.dim() == 1
            self._here[key] = (value if as_it_is else value.reshape(-1).to(torch.float64)).detach().numpy()

    def put_copies(self, values: Mapping[str, torch.Tensor]) -> None:
        """`put` of single numbers that the training may still modify: one launch copies all of a device."""
        by_device: dict[torch.device, dict[str, tuple[torch.dtype, torch.Tensor]]] = {}
        for key, value in values.items():
            if value.is_cpu:
                self.put(key, value)  # a number from now on
            else:
                by_device.setdefault(value.device, {})[key] = _words(value)
        for here in by_device.values():
            copied = torch.cat([words for _, words in here.values()])
            parts = copied.split([len(words) for _, words in here.values()])
            self._parts |= {key: (here[key][0], part) for key, part in zip(here, parts, strict=True)}

    def send(self) -> None:
        """Start the copy. Tensors of several devices are first moved to one of them."""
        position = 0
        parts, self._parts = sorted(self._parts.items(), key=_is_narrow), {}  # float64 is aligned then
        for key, (dtype, words) in parts:
            self._slices[key], self._dtypes[key] = slice(position, position + len(words)), dtype
            position += len(words)
        if parts:
            together = [words for _, (_, words) in parts]
            self._host, self._event = backend_of(together[0].device).copy_to_host(together)

    def ready(self, wait: bool = False) -> bool:
        """Whether the copy was sent and has arrived; with `wait`, blocks until one that was sent has."""
        if self._parts:
            return False
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
            return self._arrived(self._slices[key], self._dtypes[key])
        return here if isinstance(here, np.ndarray) else np.array([here], np.float64)

    def joined(self, keys: Sequence[str]) -> npt.NDArray[np.float64]:
        """The tensors of those names, flat, one after another."""
        if len(keys) == 1:
            return self.values(keys[0])
        parts = [self._slices[key] for key in keys if key in self._slices]
        dtypes = {self._dtypes[key] for key in keys if key in self._slices}
        if len(dtypes) == 1 and len(parts) == len(keys) and all(a.stop == b.start for a, b in pairwise(parts)):
            return self._arrived(slice(parts[0].start, parts[-1].stop), *dtypes)  # adjacent: nothing to copy
        return np.concatenate([self.values(key) for key in keys])

    def value(self, key: str) -> float | None:
        """The single number of that name; None if there is none."""
        here = self._here.get(key)
        if here is None and key not in self._slices:
            return None
        return float(here if isinstance(here, int | float) else self.values(key)[0])

    def _arrived(self, place: slice, dtype: torch.dtype) -> npt.NDArray[np.float64]:
        if self._numbers is None:
            assert self._host is not None, "send() comes before values()"
            self._numbers = self._host.numpy()
        return self._numbers[place].view(_NUMPY[dtype]).astype(np.float64, copy=False)


def _words(value: torch.Tensor) -> tuple[torch.dtype, torch.Tensor]:
    """The dtype in which a tensor travels, and its values as words."""
    value = value.detach()
    if value.dtype not in _NUMPY:
        value = widened(value)
    return value.dtype, value.reshape(-1).contiguous().view(torch.int32)


def _is_narrow(part: tuple[str, tuple[torch.dtype, torch.Tensor]]) -> bool:
    return part[1][0] != torch.float64
