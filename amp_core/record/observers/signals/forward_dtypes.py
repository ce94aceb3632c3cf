"""Compares the dtypes that modules return in one kind of forward with those in another: with gradients, without them (a
rollout of reinforcement learning), and recomputed in backward by a checkpoint."""

from typing import Any

import torch

from amp_core.record.model.modules import tensors_in
from amp_core.record.model.narrow_dtypes import NARROW
from amp_core.record.stats.layout import dtype_name
from amp_core.store.writer import RunWriter

ROLLOUT_STEPS = 10
"""Steps after the first in which forwards without gradients are looked at."""
CHECKPOINT_STEPS = 3
"""Steps in which a forward without gradients may be one that a checkpoint recomputes."""


class ForwardDtypes:
    """The dtypes of the outputs of one model's modules, which are numbered as in `names`."""

    def __init__(self, writer: RunWriter, names: list[str]):
        self._writer = writer
        self._names = names
        self._step = 0
        self._with_grad: dict[int, list[torch.dtype]] = {}  # in this step
        self._without_grad: dict[int, list[torch.dtype]] = {}  # in this step
        self._rollout: dict[int, list[torch.dtype]] = {}  # of the first outputs without gradients
        self._recomputed = False  # reported
        self._compared = False  # reported

    def step_began(self, step: int) -> None:
        self._step = step
        self._with_grad, self._without_grad = {}, {}

    def with_gradients(self, index: int, outputs: list[torch.Tensor]) -> None:
        """A module returned these floating-point tensors in a forward that backward follows."""
        self._with_grad[index] = [t.dtype for t in outputs]

    def without_gradients(self, index: int, output: Any) -> None:
        """A module returned this in a forward without gradients, perhaps in a checkpoint of the program's own."""
        if self._step > ROLLOUT_STEPS:
            return
        dtypes = _dtypes_in(output)
        self._rollout.setdefault(index, dtypes)
        if self._step < CHECKPOINT_STEPS:
            self._without_grad[index] = dtypes

    def in_backward(self, index: int, output: Any) -> None:
        """A module returned this when it was recomputed; report it if its forward returned another dtype."""
        before = self._with_grad.get(index) or self._without_grad.get(index)
        dtypes = _dtypes_in(output)
        if before is not None and dtypes != before and not self._recomputed:
            self._recomputed = True
            was, now = (" ".join(dtype_name(d) for d in kinds) for kinds in (before, dtypes))
            self._writer.event("recomputed", self._names[index], was, self._step, dtype=now, phase="backward")

    def compare_rollout(self) -> None:
        """Report the first module that returned 16 bits without gradients and FP32 with them, or the reverse."""
        if self._compared:
            return
        for index, without in self._rollout.items():
            dtypes = set(self._with_grad.get(index, ())), set(without)
            narrow = [kinds & set(NARROW) for kinds in dtypes]
            if all(dtypes) and bool(narrow[0]) != bool(narrow[1]):
                self._compared = True
                found = dtype_name(next(iter(narrow[0] or narrow[1])))
                detail = "training" if narrow[0] else ""
                self._writer.event(
                    "other forward", self._names[index], detail, self._step, dtype=found, phase="forward"
                )
                return


def _dtypes_in(output: Any) -> list[torch.dtype]:
    return [t.dtype for t in tensors_in(output) if t.is_floating_point()]
