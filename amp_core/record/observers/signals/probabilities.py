"""Detects losses of probabilities that were rounded to 16 bits, where a probability near 1 becomes 1.

    found = RoundedProbabilities()
    found.check("sigmoid", args, out, module)       # after each operator; `module()` names the module that runs
    for op, name, dtype in found.losses: ...

A binary cross-entropy takes the logarithm of p and of 1 - p. A p that was rounded stays so in FP32, as in a model whose
last layer is a sigmoid. An entropy, the product of 1 - p and its logarithm, is 0 there anyway.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from amp_core.record.model.narrow_dtypes import NARROW
from amp_core.record.observers.signals.marks import Marks

PROBABILITIES = ("sigmoid", "_softmax")
KEEPING = ("_to_copy", "clone", "clamp", "clamp_min", "clamp_max", "add", "gather", "index", "index_select")
"""Operators whose result has the same mark as their first argument."""


class _Mark(NamedTuple):
    """What is known of a tensor."""

    what: str
    """`p`, `1 - p`, `-p`, or `log` of one of the last two."""
    dtype: torch.dtype | None
    """The dtype to which p was rounded; None of one in FP32."""


class RoundedProbabilities:
    """The operators of one step, in their order."""

    def __init__(self) -> None:
        self._marks: Marks[_Mark] = Marks()
        self._logs: Marks[int] = Marks()  # number of the loss to which a logarithm belongs
        self._losses: list[tuple[str, str, torch.dtype] | None] = []

    @property
    def losses(self) -> list[tuple[str, str, torch.dtype]]:
        """Operator, module and the dtype of the probabilities, of each loss."""
        return [loss for loss in self._losses if loss is not None]

    def check(self, op: str, args: Sequence[Any], out: Any, module: Callable[[], str]) -> None:
        """Inspect an operator that has run."""
        if not isinstance(out, torch.Tensor) or not args:
            return
        name, narrow = op.rstrip("_"), out.dtype if out.dtype in NARROW else None
        if name in PROBABILITIES:
            self._marks.put(out, _Mark("p", narrow))
            return
        if name == "mul" and len(args) > 1:
            self._leave_out_entropy(args[0], args[1])
        mark = self._marks.of(args[0])
        if mark is None:
            return
        if name in KEEPING:
            self._marks.put(out, mark if mark.dtype or mark.what != "p" else _Mark("p", narrow))
        elif mark.dtype is None:
            return
        elif name == "rsub" and mark.what == "p":
            self._marks.put(out, _Mark("1 - p", mark.dtype))
        elif name == "neg" and mark.what == "p":
            self._marks.put(out, _Mark("-p", mark.dtype))
        elif (name, mark.what) in (("log", "1 - p"), ("log1p", "-p"), ("binary_cross_entropy", "p")):
            self._logs.put(out, len(self._losses))
            self._losses.append((op, module(), mark.dtype))

    def _leave_out_entropy(self, first: Any, second: Any) -> None:
        for log, factor in ((first, second), (second, first)):
            number, mark = self._logs.of(log), self._marks.of(factor)
            if number is not None and mark is not None and mark.what == "1 - p":
                self._losses[number] = None


def logit_of_one(dtype: torch.dtype) -> float:
    """The logit from which a probability rounds to 1: 6.2 for bfloat16."""
    return math.log(4 / torch.finfo(dtype).eps - 1)
