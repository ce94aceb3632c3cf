"""Finds the operator that makes a loss non-finite although the output of every module is finite.

`ForwardCheck` reports such a loss on a CPU; on other devices it is known once the row of its step was written. The
operators between the modules and the loss are then inspected in the next steps: a loss that overflows mostly does so
again.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from amp_core.record.model.parameters import has_values, unwrapped
from amp_core.record.observers.signals.step_operators import StepMode, StepOperators, running_module
from amp_core.record.stats.layout import dtype_name
from amp_core.record.torch_internals import patched_functions
from amp_core.record.torch_internals.compiling import mode_would_uncompile
from amp_core.schema.event_kinds import OF_ZERO
from amp_core.store.writer import RunWriter

MAX_STEPS = 3
"""Steps that are inspected after a loss that was not finite."""
MAX_INSPECTED_STEPS = 12
"""Steps that are inspected in a run."""
LOGARITHMS = ("log", "log2", "log10")
_VIEWS = ("t", "transpose", "permute", "view", "_unsafe_view", "expand", "select", "slice", "unsqueeze", "squeeze",
          "detach", "alias", "as_strided")  # fmt: skip


class LossOperators(StepOperators):
    """Inspects a few steps after `arm` was called."""

    def __init__(self, writer: RunWriter, model: torch.nn.Module, device: torch.device) -> None:
        super().__init__(writer)
        self._on_cpu = device.type == "cpu"
        self._reported: int | None = None  # the first step whose row had a non-finite loss
        self._model = unwrapped(model)
        self._step = 0
        self._due = 0
        self._left = MAX_INSPECTED_STEPS
        self._listening = False
        self.awake = False

    def arm(self) -> None:
        """Inspect the next steps, until the operator is found."""
        self._due = MAX_STEPS

    def loss_nonfinite(self, step: int) -> None:
        if not self._on_cpu:
            self._reported = step if self._reported is None else self._reported
            self.arm()

    def step_began(self, step: int) -> None:
        self.stop()
        self._step = step
        if self._due and self._left and not mode_would_uncompile():
            self._due, self._left = self._due - 1, self._left - 1
            if not self._listening:
                self._listening = True
                patched_functions.backward.listen(self._on_backward)
            self.inspect(NonfiniteOrigins(self._model, self.at_own_work))
        self.awake = self.active

    def close(self) -> None:
        self.stop()
        patched_functions.backward.unlisten(self._on_backward)

    def _on_backward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        mode = self._mode
        if not isinstance(mode, NonfiniteOrigins) or self.at_own_work():
            return
        position = next((origin for t in tree_leaves(args[:1]) if (origin := mode.origin_of(t)) is not None), None)
        if position is not None:
            self._due = self._left = 0
            if self._reported is not None:  # from finite inputs, so the outputs of the modules were finite
                facts = {name: position[name] for name in ("dtype", "limit")}
                self._writer.event(
                    "non-finite output", step=self._reported, op="loss", phase="forward", count=0, **facts
                )
            self._writer.event("non-finite operator", step=self._step, phase="forward", **position)


class NonfiniteOrigins(StepMode):
    """Follows non-finite tensors of the loss back to the operator that made the first of them from finite ones."""

    def __init__(self, model: torch.nn.Module, at_own_work: Any) -> None:
        super().__init__()
        self._model = model
        self._at_own_work = at_own_work
        self._paused = False
        self._origins: dict[int, tuple[torch.Tensor, dict[str, Any]]] = {}  # by the id of a non-finite tensor

    def pause(self) -> None:
        self._paused = True
        self._origins = {}

    def origin_of(self, tensor: Any) -> dict[str, Any] | None:
        """The operator that a non-finite tensor comes from; None if the tensor is finite or came so from a module."""
        return self._origins[id(tensor)][1] if id(tensor) in self._origins else None

    def inspect_op(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        if self._paused or self._at_own_work():
            return
        bad = [t for t in _floating(out) if not bool(t.isfinite().all())]
        if not bad:
            return
        made = {id(t) for t in bad}
        given = [t for t in _floating((args, dict(kwargs))) if id(t) not in made]
        known = next((self._origins[id(t)][1] for t in given if id(t) in self._origins), None)
        if known is None:
            name = func.overloadpacket.__name__.rstrip("_")
            constants = [v for v in tree_leaves((args, dict(kwargs))) if isinstance(v, float)]
            if name in _VIEWS or not all(map(math.isfinite, constants)) or running_module(self._model) != "loss":
                return
            if not given or not all(bool(t.isfinite().all()) for t in given):
                return
            if name in LOGARITHMS and any(bool((t == 0).any()) for t in given):
                name += OF_ZERO
            known = {
                "op": "cast" if name == "_to_copy" else name,
                "dtype": dtype_name(bad[0].dtype),
                "value": max(float(t.detach().abs().max()) for t in given),
                "limit": float(torch.finfo(bad[0].dtype).max),
            }
        self._origins |= {id(t): (t, known) for t in bad}


def _floating(tree: Any) -> list[torch.Tensor]:
    """The floating-point tensors in a tree that have values."""
    return [
        t for t in tree_leaves(tree)
        if isinstance(t, torch.Tensor) and t.is_floating_point() and t.numel() and has_values(t)
    ]  # fmt: skip
