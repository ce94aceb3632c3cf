"""The metric by which `ReduceLROnPlateau` judges a training: it may be a loss that is still scaled.

    ScheduledMetric(writer, optimizers)

An event for each of the first metrics has its value, and the step after which the scheduler got it.
"""

from collections.abc import Sequence
from typing import Any

import torch

from amp_core.record.model import own
from amp_core.record.model.unwrap import unwrap_optimizer
from amp_core.record.observer import Observer
from amp_core.record.torch_internals import patched_functions
from amp_core.store.writer import RunWriter

MAX_EVENTS = 64
"""Metrics of a run that are written."""


class ScheduledMetric(Observer):
    """Writes the first metrics of schedulers of these optimizers. Those on a device are left out: nothing waits."""

    def __init__(self, writer: RunWriter, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._writer = writer
        self._optimizers = optimizers
        self._step = 0
        self._written = 0
        patched_functions.scheduled_on_plateau.listen(self._on_metric)

    def step_began(self, step: int) -> None:
        self._step = step

    def close(self) -> None:
        patched_functions.scheduled_on_plateau.unlisten(self._on_metric)

    def _on_metric(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        metric = patched_functions.argument(args, kwargs, "metrics")
        if isinstance(metric, torch.Tensor) and metric.is_cpu and metric.numel() == 1:
            metric = float(metric)
        ours = unwrap_optimizer(own.held(args[0], "optimizer")) in self._optimizers
        if ours and isinstance(metric, int | float) and self._written < MAX_EVENTS:
            self._written += 1
            self._writer.event("scheduled metric", "ReduceLROnPlateau", step=self._step, value=float(metric))
