"""Detects decays of a recurrent state that are 1 in 16 bits, so that the state forgets nothing.

    decays = RoundedDecays()
    decays.check("exp", args, out)
    decays.check("mul", args, out)      # at the `MIN_STEPS`th multiplication: the share of the decays that are 1

Beyond 1 - 2^-9, every number is 1 in bfloat16: exp(-0.001), or 1 minus it, as in state-space models (mamba pull request
923) and leaky neurons, or a buffer of 0.9985 that is cast. A factor that multiplies a few times only, such as a learned
scale, changes little.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from amp_core.record.model.narrow_dtypes import NARROW
from amp_core.record.observers.signals.lost_factors import may_be_factors
from amp_core.record.observers.signals.marks import Found, Marks

MIN_STEPS = 64
"""Multiplications by the same decays: from there on, a decay of 0.999 halves a state within ten times as many."""
MIN_ROUNDED_FRAC = 0.5
"""Share of decays that are 1 although they were computed from another number than 0."""


class _Decays(NamedTuple):
    rounded_frac: torch.Tensor
    dtype: torch.dtype


class RoundedDecays:
    """The operators of one step, in their order."""

    def __init__(self) -> None:
        self._marks: Marks[_Decays] = Marks()
        self._times: dict[int, int] = {}  # multiplications, by the id of the decays' share

    def check(self, op: str, args: Sequence[Any], out: Any) -> Found | None:
        """Inspect an operator that has run."""
        if not isinstance(out, torch.Tensor) or not out.is_floating_point() or not args:
            return None
        first = args[0]
        if op in ("exp", "rsub") and out.dtype in NARROW and isinstance(first, torch.Tensor):
            rounded = ((out.detach() == 1) & (first.detach() != 0)).to(torch.float32).mean()
            self._marks.put(out, _Decays(rounded, out.dtype))
        elif op == "_to_copy" and (mark := self._marks.of(first)) is not None:
            self._marks.put(out, mark)
        elif op == "_to_copy" and out.dtype in NARROW and may_be_factors(first):
            rounded = ((out.detach() == 1) & (first.detach() != 1)).to(torch.float32).mean()
            self._marks.put(out, _Decays(rounded, out.dtype))
        elif op.rstrip("_") == "mul":
            for factor in args[:2]:
                if (mark := self._marks.of(factor)) is not None:
                    times = self._times[id(mark.rounded_frac)] = self._times.get(id(mark.rounded_frac), 0) + 1
                    if times == MIN_STEPS:
                        return Found("rounded factors", op, mark.dtype, mark.rounded_frac, MIN_ROUNDED_FRAC)
        return None
