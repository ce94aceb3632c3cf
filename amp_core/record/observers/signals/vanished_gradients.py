"""Tells output gradients of which nothing is left in float16 from those that are zero in any format.

    vanished = VanishedGradients(writer, model)
    vanished.gradients_vanished(10, ["up"])      # the output gradient of `up` was all zeros in step 10

The gradient of a query is zero in any format where there is one key alone, and so is that of a loss whose weight is
zero. In the next step's backward each operator whose float16 result is all zeros is computed again in FP32. The zeros
of one that is not zero then are followed to the modules.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves, tree_map

from amp_core.record.model.modules import tensors_in
from amp_core.record.model.parameters import in_backward, named_modules, unwrapped
from amp_core.record.observers.signals.marks import Marks
from amp_core.record.observers.signals.step_operators import StepMode, StepOperators
from amp_core.record.torch_internals import patched_functions
from amp_core.record.torch_internals.compiling import mode_would_uncompile
from amp_core.record.torch_internals.module_calls import Handle, after_call
from amp_core.record.torch_internals.tensor_hooks import TensorHooks
from amp_core.store.writer import RunWriter

MAX_INSPECTED_STEPS = 8
"""Steps that are inspected in a run, each for modules that were not inspected before."""
MAX_NUMEL = 2**24
"""Elements of the operands of an operator that is computed again."""
MIN_RATIO = {
    **dict.fromkeys(("mm", "bmm", "addmm", "baddbmm", "convolution", "sum", "mean"), 2.0**-20),
    **dict.fromkeys(("softmax", "attention", "norm"), 2.0**-10),
}
"""Results in FP32 of operators with such words in their names that are smaller, beside their terms, are rounding errors
of terms that cancel: some ten terms of 2^-24, or outputs that forward has rounded to float16 (2^-11)."""


class VanishedGradients(StepOperators):
    """Writes an event for each module whose output gradient vanishes, in a step after the one that had it."""

    def __init__(self, writer: RunWriter, model: torch.nn.Module) -> None:
        super().__init__(writer)
        self._model = unwrapped(model)
        self._known: set[str] = set()
        self._due: list[str] = []
        self._left = MAX_INSPECTED_STEPS
        self._handles: list[Handle] = []
        self._hooks = TensorHooks()
        self._step = 0
        self.awake = False

    def gradients_vanished(self, step: int, names: Sequence[str]) -> None:
        """Inspect those that are new in the next step."""
        self._due += [name for name in names if name not in self._known]
        self._known.update(names)

    def step_began(self, step: int) -> None:
        self._end()
        self._step = step
        if self._due and self._left and not mode_would_uncompile():
            self._left -= 1
            modules = dict(named_modules(self._model))
            for name in set(self._due) & modules.keys():
                listener = functools.partial(self._on_output, functools.partial(self._on_grad, name))
                self._handles.append(after_call(modules[name], listener))
            self._due = []
            if self._handles:
                patched_functions.backward.listen(self._on_backward)
        self.awake = bool(self._handles)

    def backward_began(self) -> None:
        self._reached = True  # the mode stays until backward is over

    def step_ended(self, step: int) -> None:
        self._end()

    def close(self) -> None:
        self._end()

    def _end(self) -> None:
        self.stop()
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._hooks.remove()
        patched_functions.backward.unlisten(self._on_backward)

    def _on_backward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._mode is None and not self.at_own_work():
            self.inspect(UnderflowOrigins(self.at_own_work))

    def _on_output(
        self, on_grad: Callable[[torch.Tensor], None], module: torch.nn.Module, args: Any, kwargs: Any, output: Any
    ) -> None:
        for tensor in tensors_in(output):
            if tensor.requires_grad and not self.at_own_work():
                self._hooks.attach(tensor, on_grad, on_grad)

    def _on_grad(self, name: str, grad: torch.Tensor) -> None:
        origin = self._mode.origin_of(grad) if isinstance(self._mode, UnderflowOrigins) else None
        if origin is not None:
            self._writer.event(
                "vanished gradient", name=name, op=origin.op, dtype="float16", value=origin.largest, step=self._step
            )


class Origin(NamedTuple):
    """An operator whose results are all zero in float16 and not in FP32."""

    op: str
    largest: float
    """The largest magnitude in FP32."""


class UnderflowOrigins(StepMode):
    """Follows such zeros through a backward."""

    of_backward = True

    def __init__(self, at_own_work: Callable[[], bool]) -> None:
        super().__init__()
        self._at_own_work = at_own_work
        self._marks: Marks[Origin] = Marks()
        self._paused = False

    def pause(self) -> None:
        self._paused = True

    def origin_of(self, grad: torch.Tensor) -> Origin | None:
        """The operator that a gradient's zeros come from; None if it is not all zeros, or would be in FP32 too."""
        origin = self._marks.of(grad)
        return None if origin is None or grad.any() else origin

    def inspect_op(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        if self._paused or self._at_own_work() or not in_backward():
            return
        zeros = [t if _is_zero(t) else None for t in tree_leaves(out)]
        given = [t for t in tree_leaves((args, dict(kwargs))) if isinstance(t, torch.Tensor) and t.is_floating_point()]
        if all(t is None for t in zeros):
            return
        before = next((mark for t in given if (mark := self._marks.of(t)) is not None and not t.any()), None)
        if before is not None:
            self._mark(zeros, [before] * len(zeros))
        elif not func._schema.is_mutable and sum(t.numel() for t in given) <= MAX_NUMEL:
            wide = tree_leaves(func(*tree_map(_widened, tuple(args)), **tree_map(_widened, dict(kwargs))))
            name = func.overloadpacket.__name__
            self._mark(zeros, [_origin(name, t, given) if isinstance(t, torch.Tensor) else None for t in wide])

    def _mark(self, zeros: Sequence[torch.Tensor | None], origins: Sequence[Origin | None]) -> None:
        for tensor, origin in zip(zeros, origins, strict=True):
            if tensor is not None and origin is not None:
                self._marks.put(tensor, origin)


def _is_zero(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.float16 and value.numel() > 0 and not value.any()


def _widened(value: Any) -> Any:
    """A tensor, or a dtype, in FP32 in place of float16."""
    if isinstance(value, torch.Tensor):
        return value.detach().float() if value.dtype == torch.float16 else value.detach()
    return torch.float32 if value is torch.float16 else value


def _origin(name: str, wide: torch.Tensor, given: Sequence[torch.Tensor]) -> Origin | None:
    """None if `wide`, a result in FP32, is zero or a rounding error of the terms `given`."""
    largest = float(wide.abs().max())
    terms = [float(t.detach().float().abs().max()) for t in given if t.numel()]
    ratio = max((MIN_RATIO[word] for word in name.split("_") if word in MIN_RATIO), default=0.0)
    return Origin(name, largest) if largest > ratio * math.prod(sorted(terms)[-2:]) else None
