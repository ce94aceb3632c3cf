"""A GradScaler that is at work although `watch` knows of none: it was made after `watch`, or somewhere else.

    ScalerUnseen(writer)

The run then holds scaled losses and gradients without their scale, and says so: an event, and `scaler_unseen` in
`config`. Otherwise a training that is in order would look like FP16 without a scaler.
"""

from typing import Any

from torch.amp.grad_scaler import GradScaler

from amp_core.record.notices_patch import Shared
from amp_core.record.observers import Observer
from amp_core.runlog import RunWriter

scales = Shared(GradScaler, "scale")
"""`scaler.scale(loss)`, of whatever scaler."""


class ScalerUnseen(Observer):
    """Looks on until a scaler that is enabled scales anything. For runs that were given none."""

    def __init__(self, writer: RunWriter) -> None:
        self._writer = writer
        self._step = 0
        scales.listen(self._on_scale)

    def step_began(self, step: int) -> None:
        self._step = step

    def close(self) -> None:
        scales.unlisten(self._on_scale)

    def _on_scale(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not args[0].is_enabled():
            return
        scales.unlisten(self._on_scale)
        detail = "loss scale and skipped steps: a GradScaler is at work that watch was not given"
        self._writer.event("warning", name="not recorded", detail=detail, step=self._step)
        self._writer.update_head(config=dict(self._writer.head.config) | {"scaler_unseen": True})
