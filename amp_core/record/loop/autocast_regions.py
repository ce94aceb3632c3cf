"""Detects the autocast dtype that a loop uses, in its first step.

    detector = RegionDetector("cuda")
    model(x)
    detector.stop()      # torch.float16 if an enabled region was entered meanwhile, else None

A region may begin inside a model's forward, where hooks on the model do not see it: Accelerate and the Transformers
Trainer wrap `model.forward` itself, and some models open their own region.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.amp.autocast_mode import autocast

from amp_core.record.environment import recipe_in_use
from amp_core.record.stats.layout import dtype_name
from amp_core.record.torch_internals import patched_functions
from amp_core.store.writer import RunWriter


class RegionDetector:
    """Detects autocast regions of one device type that are entered between creation and `stop`."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._dtype: torch.dtype | None = None
        self._entries = patched_functions.method_of_class(autocast, "__enter__")
        self._entries.listen_after(self._on_entry)

    def stop(self) -> torch.dtype | None:
        """Restore autocast. Returns the dtype of the first enabled region, or None."""
        self._entries.unlisten(self._on_entry)
        return self._dtype

    def _on_entry(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if self._dtype is None and torch.is_autocast_enabled(self._kind):
            self._dtype = torch.get_autocast_dtype(self._kind)


class PrecisionDetector:
    """Writes what the loop uses into the head of its run: `device`, `autocast_dtype` and `precision`.

    A `device` or `precision` that is already in the head was given by the caller, and stays.
    """

    def __init__(
        self,
        writer: RunWriter,
        model: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        scaler: Any,
        device: torch.device,
    ) -> None:
        self._writer = writer
        self._model = model
        self._optimizers = optimizers
        self._scaler = scaler
        self._device = device
        self._given = {k: v for k, v in writer.head.config.items() if k in ("device", "precision")}
        self._region: RegionDetector | None = None  # until the first backward
        self.known = False
        """Whether the first forward has begun."""
        self.autocast_dtype: torch.dtype | None = None
        self.in_fp16 = False
        """Whether forward computes in FP16."""

    def adopt(self, scaler: Any) -> None:
        """The loop uses `scaler`."""
        self._scaler = scaler
        self.refresh()

    def refresh(self) -> None:
        """The optimizers or the scaler have changed."""
        if self.known:
            self._update_head(self.autocast_dtype)

    def forward_began(self) -> None:
        """Inspect the first forward: autocast as it begins, or else the regions within it."""
        if self.known:
            return
        self.known = True
        kind = self._device.type
        autocast = torch.is_autocast_enabled(kind)
        self._update_head(torch.get_autocast_dtype(kind) if autocast else None)
        if not autocast:
            self._region = RegionDetector(kind)

    def stop(self) -> None:
        """The first forward is over."""
        if self._region is not None:
            region, self._region = self._region, None
            dtype = region.stop()
            if dtype is not None:
                self._update_head(dtype)

    def _update_head(self, autocast_dtype: torch.dtype | None) -> None:
        self.autocast_dtype = autocast_dtype
        dtype = dtype_name(autocast_dtype) if autocast_dtype is not None else None
        config = {"device": str(self._device), **self._given, "autocast_dtype": dtype}
        recipe = recipe_in_use(self._model, self._optimizers, self._scaler, dtype, self._device)
        self.in_fp16 = recipe.startswith("fp16")
        config.setdefault("precision", recipe)
        self._writer.update_head(config=dict(self._writer.head.config) | config)
