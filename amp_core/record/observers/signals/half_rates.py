"""Learning rates that an optimizer holds as a 16-bit tensor: a schedule that changes them by little has no effect.

    HalfRates(writer, optimizers)

An event for each such optimizer tells how often its first learning rate was written, and how often it changed. The
values themselves are in the column `lr`; on a device they are not read.
"""

from collections.abc import Sequence
from typing import Any

import torch

from amp_core.record.model.narrow_dtypes import NARROW
from amp_core.record.model.parameters import learning_rate
from amp_core.record.observer import Observer
from amp_core.record.stats.layout import dtype_name
from amp_core.store.writer import RunWriter

FIRST_STEPS = 3
"""Steps after which an optimizer without such a learning rate is no longer watched."""


class HalfRates(Observer):
    """Compares version and value of each learning rate in every step."""

    def __init__(self, writer: RunWriter, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._writer = writer
        self._optimizers = optimizers
        self._dtypes: dict[int, torch.dtype] = {}
        self._last: dict[int, tuple[tuple[int, int], float | None]] = {}  # identity and version; value
        self._written: dict[int, int] = {}
        self._changed: dict[int, int] = {}

    def step_began(self, step: int) -> None:
        if not self.awake:
            return
        for index, optimizer in enumerate(self._optimizers):
            rate = _rate(optimizer)
            if rate is not None and rate.dtype in NARROW:
                self._compare(index, rate, learning_rate(optimizer))
        self.awake = bool(self._dtypes) or step < FIRST_STEPS

    def close(self) -> None:
        for index, dtype in self._dtypes.items():
            name = type(self._optimizers[index]).__name__
            more: dict[str, Any] = {"count": self._written[index], "value": float(self._changed[index])}
            self._writer.event("half rate", name, step=0, optimizer=index, dtype=dtype_name(dtype), **more)

    def _compare(self, index: int, rate: torch.Tensor, value: float | None) -> None:
        mark, before = (id(rate), rate._version), self._last.get(index)
        self._last[index] = mark, value
        if before is None:
            self._dtypes[index], self._written[index], self._changed[index] = rate.dtype, 0, 0
            return
        self._written[index] += before[0] != mark
        self._changed[index] += before[1] != value or (value is None and before[0] != mark)


def _rate(optimizer: torch.optim.Optimizer) -> torch.Tensor | None:
    rate = optimizer.param_groups[0].get("lr")
    return rate if isinstance(rate, torch.Tensor) else None
