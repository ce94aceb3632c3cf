"""Second moments that were restored from a checkpoint in which they had underflowed.

    torch.save({k: v.half() for k, v in optimizer_state.items()}, path)     # 1e-9 becomes 0 in float16

Beside a first moment that is not zero, a second moment is not zero either: it is a mean of the squares of the same
gradients. A checkpoint in float16 keeps first moments down to 6e-8 and loses second moments below that, which are the
squares of gradients below 2.4e-4. The first updates after it divide by almost nothing.
"""

from collections.abc import Sequence
from typing import Any

import torch

from amp_core.record.model.parameters import has_values, named_parameters, unwrapped
from amp_core.record.observer import Observer
from amp_core.record.observers.signals.second_moments import MAX_TENSORS, second_moment, vanished
from amp_core.record.stats.host_transfer import HostTransfer
from amp_core.store.writer import RunWriter

MAX_INSPECTIONS = 16
"""Times that states are inspected: an optimizer of the program's own may make its state anew at each access."""
RESTORED = "restored"
"""The detail of an event on restored second moments."""


class RestoredMoments(Observer):
    """Inspects the state of each optimizer when a step begins with another one than the step before ended with:
    `load_state_dict` replaces it."""

    def __init__(self, writer: RunWriter, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._writer = writer
        self._names = {id(p): n for n, p in named_parameters(unwrapped(model))}
        self._optimizers = optimizers
        # By the number of an optimizer. An id alone: to hold the state would keep its tensors alive.
        self._states: dict[int, int] = {}
        self._sent: list[tuple[int, int, str, HostTransfer]] = []
        self._inspected = 0

    def step_began(self, step: int) -> None:
        for index, optimizer in enumerate(self._optimizers):
            if self._states.get(index) != id(optimizer.state) and self._inspected < MAX_INSPECTIONS:
                self._states[index] = id(optimizer.state)
                self._inspect(step, index, optimizer)
        if self._sent:
            self._write(wait=False)

    def close(self) -> None:
        self._write(wait=True)

    def _inspect(self, step: int, index: int, optimizer: Any) -> None:
        counts: list[torch.Tensor] = []
        name = ""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                state = optimizer.state.get(parameter)
                second = second_moment(state) if isinstance(state, dict) and len(counts) < MAX_TENSORS else None
                if second is not None and second.dtype is torch.float32 and has_values(second):
                    counts.append(vanished(second, state.get("exp_avg")))
                    name = name or self._names.get(id(parameter), "")
        if counts:
            self._inspected += 1
            transfer = HostTransfer()
            transfer.put("counts", torch.stack([count.to(counts[0].device) for count in counts]))
            transfer.send()
            self._sent.append((step, index, name, transfer))

    def _write(self, *, wait: bool) -> None:
        while self._sent and self._sent[0][-1].ready(wait):
            step, index, name, transfer = self._sent.pop(0)
            zeros, known = transfer.values("counts").reshape(-1, 2).sum(axis=0)
            if zeros:
                more: dict[str, Any] = {"value": float(zeros / known), "optimizer": index, "dtype": "float32"}
                self._writer.event("second moments", name, RESTORED, step, **more)
