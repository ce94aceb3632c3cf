"""Detects parameters that the program converts to 16 bits while it trains, as `model.half().state_dict()` does."""

from collections import Counter

import torch

from amp_core.record.model.narrow_dtypes import NARROW
from amp_core.record.model.parameters import named_parameters, unwrapped
from amp_core.record.observer import Observer
from amp_core.record.stats.layout import dtype_name
from amp_core.store.writer import RunWriter

MAX_LOOKED_AT = 64
"""Parameters whose dtype is read in one step; of a larger model others at each turn."""


class ConvertedWeights(Observer):
    """Writes an event when parameters get a 16-bit dtype, and what `StartFacts` has written of dtypes anew."""

    def __init__(self, writer: RunWriter, model: torch.nn.Module) -> None:
        self._writer = writer
        self._model = unwrapped(model)
        self._before: list[tuple[str, torch.nn.Parameter, torch.dtype]] = []
        self._turns = 1

    def step_began(self, step: int) -> None:
        if not self._before:
            self._begin()
            return
        if any(
            p.dtype != dtype and p.dtype in NARROW for _, p, dtype in self._before[step % self._turns :: self._turns]
        ):
            self._report(step)

    def _begin(self) -> None:
        self._before = [(n, p, p.dtype) for n, p in named_parameters(self._model) if type(p) is torch.nn.Parameter]
        self._turns = -(-len(self._before) // MAX_LOOKED_AT) or 1
        self.awake = bool(self._before)

    def _report(self, step: int) -> None:
        converted = [(n, p) for n, p, dtype in self._before if p.dtype != dtype and p.dtype in NARROW]
        to, count = Counter(p.dtype for _, p in converted).most_common(1)[0]
        first = next(n for n, p in converted if p.dtype == to)
        self._writer.event("converted weights", first, step=step, count=count, dtype=dtype_name(to))
        model = dict(self._writer.head.model)
        for kind, trained in (("dtypes", True), ("frozen_dtypes", False)):
            now = {n: dtype_name(p.dtype) for n, p in converted if p.requires_grad == trained}
            model[kind] = dict(model.get(kind) or {}) | now
        self._writer.update_head(model=model)
        self._begin()
