"""Detects choices among 16-bit scores, as a router of experts makes them.

Whether a choice is a router's is known once a softmax or sigmoid of as many scores was seen, or by the module's name.
Scores that were cast to FP32 keep the ties that they had in 16 bits. FP32 scores of the same sizes are those, perhaps
divided or masked since, if their largest stand in the same places.
"""

from collections.abc import Sequence
from typing import Any

import torch

from amp_core.record.model.narrow_dtypes import NARROW
from amp_core.record.observers.signals.op_reports import Module, OpReports

MAX_EXPERTS = 4096
SELECTIONS = ("topk", "max", "sort", "argmax")
"""Operators that select experts by their scores."""
ROUTERS = ("rout", "gate", "moe", "expert")
"""Parts of the names of modules that choose experts."""
MIN_SAME_FRAC = 0.5
"""Rows whose largest score stands where that of the 16-bit scores did: of others as many as a guess would hit."""


class RouterChoices:
    """The operators of one step, in their order."""

    def __init__(self, reports: OpReports) -> None:
        self._reports = reports
        self._softmax_sizes: set[int] = set()
        # 16-bit values cast to FP32, by elements and last size: their dtype, and where the largest of each row are.
        self._widened: dict[tuple[int, int], tuple[torch.dtype, torch.Tensor]] = {}
        # Kind, operator, module, scores, how many are chosen, ties and rows with the same largest, and dtype.
        self._choices: list[tuple[str, str, str, int, int, torch.Tensor, torch.dtype]] = []

    def check(self, op: str, args: Sequence[Any], out: Any, module: Module) -> None:
        """Inspect an operator that has run: a softmax or sigmoid, a cast, or a selection along the last dimension."""
        scores, dim = args[0], args[2 if op == "topk" else 1] if len(args) > (2 if op == "topk" else 1) else -1
        if op.rstrip("_") in SELECTIONS and isinstance(dim, int) and dim not in (-1, scores.dim() - 1):
            return
        name, result = op.rstrip("_"), out[0] if isinstance(out, tuple | list) and out else out
        if not isinstance(result, torch.Tensor):
            return
        if scores.dtype in NARROW:
            if name in ("_softmax", "sigmoid") and result.dtype in NARROW:
                self._softmax_sizes.add(_last_size(scores))
            elif name in ("_softmax", "_to_copy"):  # an operator may cast too
                self._widen(name, result, scores.dtype)
            elif name == "argmax" or (name in SELECTIONS and isinstance(out, tuple | list)):
                self._choose(op, scores, result.shape[-1] if name == "topk" else 1, module)
        elif (source := self._widened.get(size_by_row(scores))) is not None and result.dtype not in NARROW:
            if name in ("_softmax", "sigmoid"):
                self._softmax_sizes.add(_last_size(scores))
            elif name == "argmax" or (name in SELECTIONS and isinstance(out, tuple | list)):
                self._choose(op, scores, result.shape[-1] if name == "topk" else 1, module, source)

    def send(self) -> None:
        """Put the numbers of ties on the way to the host."""
        for place, (*_, ties, _) in enumerate(self._choices):
            self._reports.transfer.put(f"ties {place}", ties)

    def finish(self) -> None:
        """Report the choices of routers; the numbers are on the host."""
        for place, (kind, op, module, experts, chosen, _, dtype) in enumerate(self._choices):
            ties, same = map(float, self._reports.transfer.values(f"ties {place}"))
            if same < MIN_SAME_FRAC:
                continue
            if self._softmax_sizes & ({experts, chosen} - {1}) or any(part in module.lower() for part in ROUTERS):
                self._reports.write(kind, op, module, ties, float(experts), dtype)
        self._choices = []

    def _widen(self, name: str, wide: torch.Tensor, source: torch.dtype) -> None:
        """Note that 16-bit values were cast to FP32, where those that were equal stay so."""
        if wide.dtype == torch.float32 and wide.dim() > 1 and wide.shape[-1] <= MAX_EXPERTS:
            self._widened[size_by_row(wide)] = source, wide.detach().argmax(-1).flatten()
            if name == "_softmax":
                self._softmax_sizes.add(wide.shape[-1])

    def _choose(
        self,
        op: str,
        scores: torch.Tensor,
        chosen: int,
        module: Module,
        source: tuple[torch.dtype, torch.Tensor] | None = None,
    ) -> None:
        """Note a choice among scores. `source`: the 16-bit dtype that FP32 scores had before, and the places of their
        largest."""
        experts = scores.shape[-1] if 1 < scores.dim() < 4 else 1  # those of attention have a dimension of heads
        if not chosen < experts <= MAX_EXPERTS or not torch.is_grad_enabled() or (name := module()) == "loss":
            return
        best, places = scores.detach().topk(chosen + 1)
        tied = (best[..., -1] == best[..., -2]) & (best[..., -1] > torch.finfo(best.dtype).min)  # not among masked ones
        # Of FP32 scores the share of ties tells whether they matter.
        kind, ties = ("narrow router", tied.sum()) if source is None else ("rounded logits", tied.float().mean())
        same = (places[..., 0].flatten() == source[1]).float().mean() if source is not None else torch.ones_like(ties)
        dtype = scores.dtype if source is None else source[0]
        self._choices.append((kind, op, name, experts, chosen, torch.stack([ties.float(), same.float()]), dtype))


def size_by_row(tensor: torch.Tensor) -> tuple[int, int]:
    """Number of elements and last size, which views with other leading sizes keep."""
    return tensor.numel(), tensor.shape[-1] if tensor.dim() else 1


def _last_size(tensor: torch.Tensor) -> int:
    return tensor.shape[-1] if tensor.dim() else 1
