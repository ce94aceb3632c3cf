"""The largest magnitude of modules' outputs, measured on a GPU without making the host wait."""

from typing import Any, NamedTuple

import torch

from amp_core.record.backends import backend_of
from amp_core.record.observer import Observer
from amp_core.record.stats.holding import HoldingLimit
from amp_core.record.stats.host_transfer import HostTransfer
from amp_core.record.stats.layout import measurable
from amp_core.record.stats.norms import largest


class OutputSize(NamedTuple):
    """One measured output."""

    number: int
    """Index of the module among all."""
    dtype: torch.dtype
    size: float
    """Its largest magnitude."""


class _Sent(NamedTuple):
    step: int
    measured: list[tuple[int, torch.dtype]]
    keys: list[str]
    """Of the magnitudes in the transfer."""
    transfer: HostTransfer


class OutputSizes:
    """Outputs of one step wait to be measured together: a launch for each takes the host longer than the GPU.

    `HoldingLimit` says how much may wait. As on a CPU, an output that the program changes in place meanwhile counts as
    changed.
    """

    def __init__(self, owner: Observer, device: torch.device):
        self._owner = owner
        self._waiting: list[tuple[int, torch.Tensor]] = []  # of one device and stream
        self._bytes = 0  # of those
        self._stream: Any = None
        self._limit = HoldingLimit(backend_of(device))
        self._measured: list[tuple[int, torch.dtype]] = []  # in this step
        self._sizes: list[torch.Tensor] = []  # of those, one after another
        self._sent: list[_Sent] = []

    def step_began(self) -> None:
        self._waiting, self._bytes = [], 0

    def add(self, index: int, outputs: list[torch.Tensor], last: bool) -> None:
        """Measure the outputs of a module, now or with those of others; `last`: no module follows."""
        for tensor in outputs:
            if measurable(tensor) and tensor.element_size() > 1 and tensor.numel():
                stream = backend_of(tensor.device).current_stream()
                if self._waiting and (tensor.device != self._waiting[-1][1].device or stream != self._stream):
                    self._measure()
                self._stream = stream
                self._waiting.append((index, tensor))
                self._bytes += tensor.nbytes
        if last or self._limit.reached(self._bytes):
            self._measure()

    def step_ended(self, step: int) -> None:
        """Measure what still waits and send what the step measured to the host."""
        self._measure()
        transfer, measured, parts = self._owner.transfer(), self._measured, self._sizes
        self._measured, self._sizes = [], []
        if measured and transfer is not None:
            keys = [f"largest outputs {step}:{number}" for number in range(len(parts))]
            for key, part in zip(keys, parts, strict=True):
                transfer.put(key, part)
            self._sent.append(_Sent(step, measured, keys, transfer))

    def arrived(self, max_pending: int) -> list[tuple[int, list[OutputSize]]]:
        """The steps whose numbers have arrived, with the outputs in forward order; at most `max_pending` steps remain,
        and for those beyond, the host waits."""
        steps = []
        while self._sent and self._sent[0].transfer.ready(wait=len(self._sent) > max_pending):
            step, measured, keys, transfer = self._sent.pop(0)
            sizes = transfer.joined(keys).tolist()
            steps.append((step, [OutputSize(*one, size) for one, size in zip(measured, sizes, strict=True)]))
        return steps

    def _measure(self) -> None:
        waiting, self._waiting, self._bytes = self._waiting, [], 0
        self._limit.restart()
        if not waiting:
            return
        tensors = [tensor for _, tensor in waiting]
        with self._owner.watching():  # within it no operator trace counts these launches
            backend_of(tensors[0].device).come_after(self._stream, tensors)
            self._sizes.append(largest(tensors))
        self._measured += [(index, tensor.dtype) for index, tensor in waiting]
