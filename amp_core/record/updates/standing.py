"""Weights that an optimizer's step leaves as they are, where the step itself is not repeated.

    standing = Standing(step, index, parts)     # after the step; `parts` were held before it
    standing.write(writer)                                 # once its transfer is ready

What was lost is not known without the update, but one thing is certain: if a tensor was written to, and none of the
larger half of its elements changed although they had gradients, its updates are below half a unit in the last place.
"""

from collections.abc import Sequence

import torch

from amp_core.record.stats.host_transfer import HostTransfer
from amp_core.record.stats.layout import dtype_name
from amp_core.record.updates.comparison import other_views
from amp_core.record.updates.held import Part
from amp_core.store.writer import RunWriter

MAX_MOVED_FRAC = 1e-3
"""A tensor is unchanged if a smaller share of the larger half of its elements changed. Stochastic rounding moves more,
unless updates are below a thousandth of a unit in the last place."""
MIN_ELEMENTS = 16


def may_stand(part: Part, optimizer: torch.optim.Optimizer) -> bool:
    """Whether a weight that does not change is a loss: its learning rate is not 0, and the optimizer holds neither an
    FP32 master of it nor what Kahan summation still has to add."""
    rate = optimizer.param_groups[part.group].get("lr")
    moves = not isinstance(rate, int | float) or rate != 0
    return moves and part.taken >= MIN_ELEMENTS and next(other_views([part], optimizer), None) is None


class Standing:
    """The weights of one optimizer around one step."""

    def __init__(self, step: int, index: int, parts: Sequence[Part]) -> None:
        self.step = step
        self.optimizer = index
        self.transfer = HostTransfer()
        self._parts = parts
        self._written = [part.version != part.parameter._version for part in parts]
        counts = [_counts(part).to(parts[0].weight.device) for part in parts]
        self.transfer.put("counts", torch.stack(counts))
        self.transfer.send()

    def write(self, writer: RunWriter) -> None:
        """Write an event that names the largest tensor that stops changing; its value is 0 if others have more elements
        together."""
        counts = self.transfer.values("counts").reshape(-1, 3)
        still, every = [], 0
        for part, written, (considered, moved, any_moved) in zip(self._parts, self._written, counts, strict=True):
            if considered and (written or any_moved):
                every += part.parameter.numel()
                if moved <= MAX_MOVED_FRAC * considered:
                    still.append((part, 1 - moved / considered))
        if not every:
            return
        most = sum(part.parameter.numel() for part, _ in still) * 2 >= every
        named = max(still, key=lambda item: item[0].parameter.numel(), default=(self._parts[0], 0.0))
        writer.event(
            "unmoved weights",
            named[0].name,
            step=self.step,
            value=float(named[1]) if most else 0.0,
            count=named[0].taken,
            dtype=dtype_name(named[0].weight.dtype),
            optimizer=self.optimizer,
        )


def _counts(part: Part) -> torch.Tensor:
    """Of the elements that had a gradient: how many of the larger half there are, how many of those changed, and how
    many of all did."""
    before = part.weight.reshape(-1).to(torch.float32)
    changed = (part.now().reshape(-1) != part.weight.reshape(-1)) & (part.grad.reshape(-1) != 0)
    larger = (before.abs() >= before.abs().median()) & (part.grad.reshape(-1) != 0)
    return torch.stack([larger.sum(), (larger & changed).sum(), changed.sum()])
