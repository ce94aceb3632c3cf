"""What a step measured on the device, on its way to the host in one copy.

    >>> parcel = Parcel()
    >>> parcel.put("loss", loss.detach())
    >>> parcel.send()
    >>> parcel.ready() and parcel.value("loss")

On CUDA the copy goes to pinned memory on the current stream and nobody waits for it: a parcel is opened when its
event has passed. On the CPU it is ready at once.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch


class Parcel:
    """Named tensors, gathered into one float64 vector and copied to the host together."""

    def __init__(self) -> None:
        self._parts: dict[str, torch.Tensor] = {}
        self._slices: dict[str, slice] = {}
        self._host: torch.Tensor | None = None
        self._numbers: npt.NDArray[np.float64] | None = None
        self._event: torch.cuda.Event | None = None

    def put(self, key: str, tensor: torch.Tensor) -> None:
        """Add a tensor of any shape. It must not change any more: clone what the training goes on using."""
        self._parts[key] = tensor

    def send(self) -> None:
        """Start the copy. Tensors of several devices meet on the first CUDA device among them."""
        position = 0
        for key, tensor in self._parts.items():
            self._slices[key] = slice(position, position + tensor.numel())
            position += tensor.numel()
        parts = [t.reshape(-1).to(torch.float64) for t in self._parts.values()]
        self._parts = {}
        device = next((p.device for p in parts if p.device.type == "cuda"), torch.device("cpu"))
        if device.type == "cpu":
            self._host = torch.cat(parts) if parts else torch.empty(0, dtype=torch.float64)
            return
        whole = torch.cat([p.to(device, non_blocking=True) for p in parts])
        self._host = torch.empty(whole.shape, dtype=whole.dtype, pin_memory=True)
        self._host.copy_(whole, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()

    def ready(self, wait: bool = False) -> bool:
        """Whether the copy has arrived; with `wait`, stay until it has."""
        if self._event is None:
            return True
        if wait:
            self._event.synchronize()
        return bool(self._event.query())

    def has(self, key: str) -> bool:
        """Whether anything was put in under `key`."""
        return key in self._slices

    def values(self, key: str) -> npt.NDArray[np.float64]:
        """The tensor of that name, flat."""
        return self._all()[self._slices[key]]

    def joined(self, keys: Sequence[str]) -> npt.NDArray[np.float64]:
        """The tensors of those names, flat, one after another."""
        parts = [self._slices[key] for key in keys]
        if all(one.stop == two.start for one, two in pairwise(parts)):  # put in one after another: nothing to copy
            return self._all()[parts[0].start : parts[-1].stop]
        return np.concatenate([self._all()[part] for part in parts])

    def _all(self) -> npt.NDArray[np.float64]:
        if self._numbers is None:
            assert self._host is not None, "send() comes before values()"
            self._numbers = self._host.numpy()
        return self._numbers

    def value(self, key: str) -> float | None:
        """The one number of that name; None where nothing was put in."""
        return float(self.values(key)[0]) if self.has(key) else None
