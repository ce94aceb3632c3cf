"""Autocast regions that begin inside of a model's forward, where hooks on the model do not see them.

    seen = RegionSeen("cuda")
    model(x)
    seen.stop()          # torch.float16 if some region was entered meanwhile and is on, else None

Accelerate and the Transformers Trainer wrap `model.forward` itself, and some models open a region of their own.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.amp.autocast_mode import autocast

from amp_core.record._patch import Patches


class RegionSeen:
    """Looks on, from its making until `stop`, at every autocast region that is entered for one kind of device."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._dtype: torch.dtype | None = None
        self._patches = Patches()
        self._patches.wrap(autocast, "__enter__", self._around)

    def stop(self) -> torch.dtype | None:
        """Look no longer. The dtype of the first region that was on."""
        self._patches.restore()
        return self._dtype

    def _around(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def enter(region: Any) -> Any:
            result = original(region)
            if self._dtype is None and torch.is_autocast_enabled(self._kind):
                self._dtype = torch.get_autocast_dtype(self._kind)
            return result

        return enter
