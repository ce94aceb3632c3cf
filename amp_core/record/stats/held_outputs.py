"""Output gradients of one device that are held until there are enough of them for one batch of launches.

    >>> held = HeldOutputs(torch.device("cuda:0"))
    >>> held.add(key, grad, LayerChannel(id(layer.weight), channel=2, row=0, dims=2))
    >>> packed, caps = held.measure_with(weight_grads, caps_of)     # fills `largest`, by weight
    >>> for keys, packed in held.take():

A launch for each gradient would cost the host more than the gradient costs the GPU. What still waits when the weight
gradients are measured shares its table and its zeroed memory with them. Holding a gradient has a price too:
its memory is not free yet, which `holding` limits; and its values must not change until they are read.
Autograd itself never writes into a gradient that someone else holds, but a hook or a function of the program may. A
gradient that was written to is left out, and nothing is held from then on. A CUDA graph writes into the same memory at
each replay, unnoticed by torch; so the gradients of a micro-batch are measured before the forward of the next.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

from amp_core.record.backends import backend_of
from amp_core.record.stats.channels import ChannelLargest, ChannelMax, channel_maxima, in_channels
from amp_core.record.stats.dispatch import by_kernel, kernel_of
from amp_core.record.stats.holding import HoldingLimit
from amp_core.record.stats.layout import Cap, Key
from amp_core.record.stats.measure import measure_together

Measured = tuple[list[Key], torch.Tensor]


class LayerChannel(NamedTuple):
    """Dimension `channel` of an output gradient is dimension `row` of the weight, which has `dims`."""

    weight: int
    """Its id."""
    channel: int
    row: int
    dims: int


class _Held(NamedTuple):
    key: Key
    grad: torch.Tensor
    version: int
    layer: LayerChannel | None


class HeldOutputs:
    """Those of one device. Work on it is launched within the context of `watching`."""

    def __init__(
        self,
        device: torch.device,
        largest: dict[int, ChannelLargest],
        watching: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._backend = backend_of(device)
        self._watching = watching
        self._limit = HoldingLimit(self._backend)
        self._largest = largest
        self._waiting: list[_Held] = []
        self._bytes = 0
        self._stream: Any = None
        self._measured: list[Measured] = []
        self._may_hold = True

    def add(self, key: Key, grad: torch.Tensor, layer: LayerChannel | None) -> bool:
        """Measure a gradient, now or later. False where no kernel takes it."""
        if not self._may_hold or grad.dtype == torch.float64 or kernel_of("outputs", grad.device.type) is None:
            return False
        stream = self._backend.current_stream()
        if self._waiting and stream != self._stream:
            self._measure()
        self._stream = stream
        self._waiting.append(_Held(key, grad, grad._version, layer))
        self._bytes += grad.numel() * grad.element_size()
        if self._limit.reached(self._bytes):
            self._measure()
        return True

    def measure_with(
        self, weights: Sequence[torch.Tensor], caps_of: Callable[[], list[Cap | None]]
    ) -> tuple[torch.Tensor, list[Cap | None]]:
        """Measure what waits, and weight gradients of the device with their caps, as `measure_together` does.

        `caps_of` reads `largest`, which is then complete, and is called at least once. Returns the packed vectors and
        the caps.
        """
        # Caps are made before their values are there, so none may have to be converted.
        dtypes = {held.grad.dtype for held in self._waiting}
        if weights and all(t.dtype == torch.float32 or {t.dtype} == dtypes for t in weights):
            measured = self._measure(weights, caps_of) if self._waiting else None
            if measured is not None:
                return measured
        elif self._waiting:
            self._measure()
        caps = caps_of()
        return measure_together(weights, caps), caps

    def forward_begins(self) -> None:
        """Measure what waits of an earlier backward."""
        if self._waiting:
            self._measure()

    def forget(self) -> None:
        """Leave out what waits and what was measured since the last `take`."""
        self._waiting, self._bytes, self._measured = [], 0, []
        self._limit.restart()

    def take(self) -> list[Measured]:
        """All measurements since the last `take`."""
        if self._waiting:
            self._measure()
        measured, self._measured = self._measured, []
        return measured

    def _measure(
        self, weights: Sequence[torch.Tensor] = (), caps_of: Callable[[], list[Cap | None]] = list
    ) -> tuple[torch.Tensor, list[Cap | None]] | None:
        """Measure what waits, and weights with it. Returns their packed vectors and caps; None if nothing was left to
        measure them with."""
        waiting, self._waiting, self._bytes = self._waiting, [], 0
        self._limit.restart()
        unchanged = [held for held in waiting if held.grad._version == held.version]
        self._may_hold = len(unchanged) == len(waiting)
        if not unchanged:
            return None
        with self._watching():
            return self._measure_all(unchanged, weights, caps_of)

    def _measure_all(
        self, unchanged: list[_Held], weights: Sequence[torch.Tensor], caps_of: Callable[[], list[Cap | None]]
    ) -> tuple[torch.Tensor, list[Cap | None]]:
        grads = [held.grad for held in unchanged]
        self._backend.come_after(self._stream, grads)
        wanted, places = self._wanted(unchanged)
        caps: list[Cap | None] = []

        def take_in(largest: Sequence[torch.Tensor]) -> list[Cap | None]:
            for place, layer in places.values():
                dtype = wanted[place].grad.dtype
                cap = self._largest[layer.weight] = ChannelLargest(largest[place], layer.row, layer.dims, dtype)
                cap.present = True
            caps[:] = caps_of()
            return caps

        result: Any = by_kernel("outputs", grads[0].device.type, grads, wanted, weights, take_in)
        if result is None:
            largest = channel_maxima(wanted)
            result = measure_together(grads), largest, measure_together(weights, take_in(largest))
        self._measured.append(([held.key for held in unchanged], result[0]))
        return result[2], caps

    def _wanted(self, held: list[_Held]) -> tuple[list[ChannelMax], dict[int, tuple[int, LayerChannel]]]:
        """What is wanted by channel, and by weight the last place in it."""
        wanted: list[ChannelMax] = []
        places: dict[int, tuple[int, LayerChannel]] = {}
        for one in held:
            layer = one.layer
            if layer is None:
                continue
            values, channels, inner = in_channels(one.grad, layer.channel)
            into: torch.Tensor | int | None = None
            before = self._largest.get(layer.weight)
            at = places.get(layer.weight)
            if at is not None:
                other = wanted[at[0]]
                into = at[0] if other.channels == channels and other.grad.dtype == values.dtype else None
            elif before is not None and before.present and before.fits(one.grad, layer.channel):
                into = before.held.to(torch.float32) if isinstance(before.held, torch.Tensor) else None
            places[layer.weight] = len(wanted), layer
            wanted.append(ChannelMax(values, channels, inner, into))
        return wanted, places
