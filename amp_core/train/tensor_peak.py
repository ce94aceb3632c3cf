"""The most bytes that tensors hold at once while a function runs, on fake tensors as on real ones.

>>> with PeakBytes(model.parameters()) as peak:
...     loss_fn(model, batch).backward()
>>> peak.most
5120000

The storages are counted, each once, from the operator that makes them until Python and autograd release them, as
`torch.distributed._tools.mem_tracker.MemTracker` does. Workspaces within an operator are not seen.
"""

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from amp_core.record.torch_internals.quiet_mode import QuietMode


class PeakBytes(QuietMode):
    """Counts the bytes of live storages; `held` are tensors that exist already."""

    def __init__(self, held: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.now = 0
        self.most = 0
        self._live: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._add(held)

    def on_op(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:  # noqa: ARG002
        self._add(leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor))

    def _add(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            known = self._live.get(key)
            if known is not None and known() is storage:
                continue

            def released(_: Any, key: int = key, size: int = size) -> None:
                self._live.pop(key, None)
                self.now -= size

            self._live[key] = weakref.ref(storage, released)
            self.now += size
        self.most = max(self.most, self.now)
