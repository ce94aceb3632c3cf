"""Detects 16-bit states that are multiplied, again and again in one step, by a number so near 1 that rounding decides.

    states = SlowStates()
    states.check("mul", (state, 0.998), out)      # at the `MIN_STEPS`th time: 1 - 0.998, the limit and the dtype

A state h = a h + b x in bfloat16 that loses 0.2 % in each step loses nothing, or an eighth of its last bits' unit: the
product is rounded to a multiple of 2^-8 to 2^-7 of it. Learned decays are inspected in `decays`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from amp_core.record.model.narrow_dtypes import NARROW
from amp_core.record.observers.signals.decays import MIN_STEPS
from amp_core.record.observers.signals.marks import Marks

MAX_ROUNDED_DECAY = 0.57
"""The largest 1 - a, in units of a dtype's eps, that rounding makes wrong by a quarter or more on average. A number of
mantissa m loses d = m (1 - a) / eps units in the last place, of which round(d) remain; the average of
|round(d) - d| / d over 1 <= m < 2 is 0.39 at 0.5, and 0.25 at 0.57."""
SUMS = ("add", "sub", "lerp")


class _Carried(NamedTuple):
    factor: float
    times: int


class SlowState(NamedTuple):
    """A state and what it is multiplied by."""

    lost: float
    """1 - a: what each step takes from it."""
    limit: float
    """The largest that `dtype` rounds so."""
    dtype: torch.dtype


class SlowStates:
    """The operators of one step, in their order."""

    def __init__(self) -> None:
        self._marks: Marks[_Carried] = Marks()

    def check(self, op: str, args: Sequence[Any], out: Any) -> SlowState | None:
        """Inspect an operator that has run."""
        if not isinstance(out, torch.Tensor) or out.dtype not in NARROW or out.numel() < 2 or len(args) < 2:
            return None
        name = op.rstrip("_")
        if name == "mul" and (factor := _number(args[1])) is not None:
            limit = MAX_ROUNDED_DECAY * torch.finfo(out.dtype).eps
            if 0 < 1 - factor <= limit:
                before = self._marks.of(args[0])
                times = before.times + 1 if before is not None and before.factor == factor else 1
                self._marks.put(out, _Carried(factor, times))
                return SlowState(1 - factor, limit, out.dtype) if times == MIN_STEPS else None
        elif name in SUMS:
            carried = [mark for a in args[:2] if (mark := self._marks.of(a)) is not None]
            if carried:
                self._marks.put(out, max(carried, key=lambda mark: mark.times))
        return None


def _number(value: Any) -> float | None:
    """A factor that is one number on the host; None for anything else."""
    if isinstance(value, torch.Tensor) and value.dim() == 0 and value.is_cpu:
        value = value.item()
    return value if isinstance(value, float) else None
