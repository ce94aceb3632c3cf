"""Finds the operator of a module, or of the loss, that makes a loss non-finite.

`ForwardCheck` asks for it on a CPU where the graph of the loss does not show the operator; on other devices a loss that
is not finite is known once the row of its step was written. The operators of the next steps are then inspected: a loss
that overflows mostly does so again.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from amp_core.record.model.modules import is_layer
from amp_core.record.model.parameters import has_values, named_modules, unwrapped
from amp_core.record.observers.signals.graph_origins import Origin, origin_of_call, write_origin
from amp_core.record.observers.signals.step_operators import StepMode, StepOperators, running_module
from amp_core.record.stats.layout import dtype_name
from amp_core.record.torch_internals import patched_functions
from amp_core.record.torch_internals.compiling import mode_would_uncompile
from amp_core.store.writer import RunWriter

MAX_STEPS = 3
"""Steps that are inspected after a loss that was not finite."""
MAX_INSPECTED_STEPS = 12
"""Steps that are inspected in a run."""
_LOSS = "the loss"  # no module has this name
_NAMES = {"_to_copy": "cast"}
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
        origins = [found for t in tree_leaves(args[:1]) if (found := mode.origin_of(t)) is not None]
        if origins:
            self._due = self._left = 0
            module, origin = origins[0]
            if self._reported is not None and module is None:  # so the outputs of the modules were finite
                facts: dict[str, Any] = {"dtype": dtype_name(origin.dtype)}
                facts |= {"limit": float(torch.finfo(origin.dtype).max), "phase": "forward", "count": 0}
                self._writer.event("non-finite output", step=self._reported, op="loss", **facts)
            write_origin(self._writer, self._step, module, origin)


class NonfiniteOrigins(StepMode):
    """Follows non-finite tensors of the loss back to the operator that made the first of them from finite ones, and to
    the module that it ran in. A layer of `torch.nn` that overflows as a whole is known already."""

    def __init__(self, model: torch.nn.Module, at_own_work: Any) -> None:
        super().__init__()
        self._model = model
        self._at_own_work = at_own_work
        self._paused = False
        self._origins: dict[int, tuple[torch.Tensor, _Found]] = {}  # by the id of a non-finite tensor

    def pause(self) -> None:
        self._paused = True
        self._origins = {}

    def origin_of(self, tensor: Any) -> "_Found | None":
        """The operator that a non-finite tensor comes from, and its module, None for the loss; None if the tensor is
        finite, or came so into the step."""
        return self._origins[id(tensor)][1] if id(tensor) in self._origins else None

    def inspect_op(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        if self._paused or self._at_own_work():
            return
        bad = [t for t in _floating(out) if not bool(t.isfinite().all())]
        if not bad:
            return
        made = {id(t) for t in bad}
        given = _floating((args, dict(kwargs)))
        known = next((self._origins[id(t)][1] for t in given if id(t) in self._origins), None)
        if known is None:
            name = func.overloadpacket.__name__.rstrip("_")
            constants = [v for v in tree_leaves((args, dict(kwargs))) if isinstance(v, float)]
            if name in _VIEWS or not all(map(math.isfinite, constants)):
                return
            given = [t for t in given if id(t) not in made]  # what an operator changed in place is lost
            if not given or not all(bool(t.isfinite().all()) for t in given):
                return
            module = running_module(self._model, outside=_LOSS)
            if module != _LOSS and is_layer(dict(named_modules(self._model))[module]):
                return
            origin = origin_of_call(_NAMES.get(name, name), given, bad[0].dtype)
            known = (None if module == _LOSS else module, origin)
        self._origins |= {id(t): (t, known) for t in bad}


_Found = tuple[str | None, Origin]
"""A module and its operator; None for the loss."""


def _floating(tree: Any) -> list[torch.Tensor]:
    """The floating-point tensors in a tree that have values."""
    return [
        t for t in tree_leaves(tree)
        if isinstance(t, torch.Tensor) and t.is_floating_point() and t.numel() and has_values(t)
    ]  # fmt: skip
