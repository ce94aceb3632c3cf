"""Operators of the first forward and loss that are unsafe in 16 bits, detected by intercepting that one step.

Constants are checked in the dtype in which the operator runs, below autocast: an `eps` that rounds to zero in FP16 does
not keep a divisor from being zero, and a mask of -1e9 is -inf there. The module is determined only if there is
something to report, from the Python frames of the operator's callers.
"""

import contextlib
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from amp_core.record.model.modules import is_compiled
from amp_core.record.model.parameters import named_buffers, unwrapped
from amp_core.record.observers.signals.narrow_ops import NarrowOps
from amp_core.record.observers.signals.product_counts import ProductCounts, inside_autocast, is_narrow
from amp_core.record.observers.signals.step_operators import (
    StepMode,
    StepOperators,
    report_error,
    running_module,
    running_optimizer,
)
from amp_core.record.op_trace.call_sites import call_site
from amp_core.record.stats.layout import dtype_name
from amp_core.record.torch_internals.compiling import mode_would_uncompile
from amp_core.record.torch_internals.quiet_mode import QuietMode
from amp_core.store.writer import RunWriter

FLOORS = ("add", "clamp_min", "clamp", "maximum")
"""Operators by which a small constant keeps a divisor, a root or a logarithm away from zero."""
FACTORS = ("mul", "div")
MAX_EPS = 1e-3
"""Larger constants do not serve as an eps."""
MAX_EVENTS = 50
MAX_EVALUATIONS = 2
MAX_OPERATORS = 20_000
"""Operators that are inspected; of a longer first step, only these."""
OPERATORS = "operators"
"""The name of the event that reports an inspection in an audit."""
UNSEEN_OPERATORS = (
    "operators within compiled graphs: logits, routers, norms, positions, masks, eps and long sums are not inspected "
    "there; `rec.audit(lambda: loss_fn(model(x), y), forward=True)` inspects those of one batch, in eager mode"
)
BANNED = ("binary_cross_entropy",)


@contextlib.contextmanager
def operators_inspected(writer: RunWriter, model: torch.nn.Module, step: int) -> Iterator[None]:
    """Inspect the operators within likewise, for code that the observer cannot see into: compiled code that runs in
    eager mode here."""
    checker = _OpChecker(writer, model, step, lambda: False)
    with checker:
        yield
    report_error(writer, checker)
    checker.write()
    checker.narrow_ops.finish(True)
    writer.event("audited", OPERATORS, "the operators of one batch, in eager mode", step)


class FirstOperators(StepOperators):
    """Inspects the operators from the first forward to the backward that follows."""

    def __init__(self, writer: RunWriter, model: torch.nn.Module, device: torch.device) -> None:
        super().__init__(writer)
        self._model = unwrapped(model)
        self._arriving: _OpChecker | None = None  # what it measured is still on the device
        self._done = mode_would_uncompile()  # a mode around a graph would cause a recompilation
        if is_compiled(model):
            self._done = True
            writer.event("warning", name="not recorded", detail=UNSEEN_OPERATORS)

    def step_began(self, step: int) -> None:
        self.stop()
        self._collect()
        self.awake = not self._done or self.active or self._arriving is not None
        if not self._done:
            self._done = True
            self.inspect(_OpChecker(self._writer, self._model, step, self.at_own_work))

    def close(self) -> None:
        self.stop()
        self._collect(wait=True)

    def inspected(self, mode: Any) -> None:
        mode.write()
        self._arriving = mode
        self._collect()

    def _collect(self, wait: bool = False) -> None:
        if self._arriving is not None and self._arriving.narrow_ops.finish(wait):
            self._arriving = None


class LoopOperators:
    """Inspects what the loop itself does in the first steps between its backward and the next forward, such as losses'
    weights, targets and metrics. `on_op` is called with each operator, by the mode of another observer."""

    def __init__(self, writer: RunWriter, model: torch.nn.Module) -> None:
        self._checker: _LoopChecker | None = None
        self._make = functools.partial(_LoopChecker, writer, unwrapped(model))
        self._writer = writer
        self._sent = False

    def on_op(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        """Inspect an operator that has run. Never raises."""
        if self._sent:
            return
        if self._checker is None:
            self._checker = self._make(0, lambda: False)
        self._checker.on_op(func, args, kwargs, out)

    def end(self, wait: bool = False) -> bool:
        """Inspect no more, and report; False while values are not on the host yet."""
        checker = self._checker
        if checker is not None and not self._sent:
            checker.pause()
            report_error(self._writer, checker)
            checker.write()
        self._sent = True
        return checker is None or checker.narrow_ops.finish(wait)


class EvaluationOperators(StepOperators):
    """Inspects what the loop itself does from a forward without gradients to the next one with them: metrics of an
    evaluation, or returns and advantages of a rollout. The first `MAX_EVALUATIONS` times."""

    def __init__(self, writer: RunWriter, model: torch.nn.Module) -> None:
        super().__init__(writer)
        self._model = unwrapped(model)
        self._left = 0 if is_compiled(model) else MAX_EVALUATIONS
        self._step = 0
        self._arriving: list[NarrowOps] = []
        self.awake = False

    def evaluation_began(self) -> None:
        # A mode of the program's own might end before this one does, and a profiler records operators under a mode.
        apart = _get_current_dispatch_mode_stack() or torch._C._autograd._profiler_enabled()
        if self._left and not (self.active or apart or torch.is_inference_mode_enabled() or mode_would_uncompile()):
            self._left -= 1
            self.inspect(_LoopChecker(self._writer, self._model, self._step, self.at_own_work))
        self._in_model(True)

    def evaluation_returned(self) -> None:
        self._in_model(False)

    def _in_model(self, inside: bool) -> None:
        if isinstance(self._mode, _LoopChecker):
            self._mode.in_model = inside

    def step_began(self, step: int) -> None:
        self.stop()
        self._step = step
        self._arriving = [ops for ops in self._arriving if not ops.finish()]
        self.awake = self.active

    def inspected(self, mode: Any) -> None:
        mode.write()
        self._arriving.append(mode.narrow_ops)

    def close(self) -> None:
        self.stop()
        for ops in self._arriving:
            ops.finish(wait=True)
        self._arriving = []


class _OpChecker(StepMode):
    outside = "loss"
    """What operators outside of the model belong to."""
    phase: str | None = "forward"
    counts_products = True

    def __init__(self, writer: RunWriter, model: torch.nn.Module, step: int, at_own_work: Any) -> None:
        super().__init__()
        self._writer = writer
        self._model = model
        self._step = step
        self._at_own_work = at_own_work
        self._left = MAX_OPERATORS
        self._cut = False  # whether there were more
        self._written = 0
        self._reported: set[tuple[str, str, float | None]] = set()
        self.narrow_ops = NarrowOps(self._write_event, model)
        self.products = ProductCounts(self._running) if self.counts_products else None

    def pause(self) -> None:
        """Inspect no more operators."""
        self._left = 0

    def _running(self) -> str:
        return running_module(self._model, outside=self.outside)

    def inspect_op(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        if self._left and not self._at_own_work():
            self._left -= 1
            self._cut = self._left == 0
            self._check(func.overloadpacket.__name__, args, kwargs, out)

    def _check(self, op: str, args: Any, kwargs: Any, out: Any) -> None:
        self.narrow_ops.check(op, args, out, self._running)
        if self.products is not None:
            call = call_site((__name__, StepMode.__module__, QuietMode.__module__))
            self.products.add(call, op, args, out)
        if op in BANNED and inside_autocast():
            self._report("banned op", op, 0.0, dtype=None, limit=None)
            return
        if not is_narrow(out) or op.startswith("_foreach"):
            return
        info = torch.finfo(out.dtype)
        lost = float(info.tiny) * float(info.eps) / 2  # half of the smallest subnormal rounds to even, to 0
        for value in (*args[1:], *(kwargs or {}).values()):
            if isinstance(value, torch.Tensor) and value.dim() == 0 and value.device.type == "cpu":
                value = value.item()
            if not isinstance(value, float) or not math.isfinite(value) or value == 0:
                continue
            # A factor may be large as long as the product is not; only masks multiply by such negative numbers.
            if value < -float(info.max) or (value > float(info.max) and op.rstrip("_") not in FACTORS):
                self._report("constant overflow", op, value, out.dtype, float(info.max))
            elif 0 < value <= min(lost, MAX_EPS) and op.rstrip("_") in FLOORS:
                self._report("eps lost", op, value, out.dtype, lost)
            elif op.rstrip("_") == "mul" and 0 < 1 - value < float(info.eps) / 4:
                self._check_decay(args[0], value)

    def _check_decay(self, average: Any, decay: float) -> None:
        """A buffer that is multiplied by what rounds to 1."""
        name = next((n for n, b in named_buffers(self._model) if b is average), None)
        if name is not None:
            self._write_event("rounded decay", "mul", name, None, 1 - decay, average.dtype)

    def write(self) -> None:
        """Write the products. What operators lose in 16 bits is on its way."""
        self.narrow_ops.send()
        if self.products is not None:
            self.products.write(self._writer, self._step, self.outside, cut=self._cut)

    def _report(self, kind: str, op: str, value: float, dtype: torch.dtype | None, limit: float | None) -> None:
        self._write_event(kind, op, self._running(), value or None, limit, dtype)

    def _write_event(
        self, kind: str, op: str, name: str, value: float | None, limit: float | None, dtype: torch.dtype | None
    ) -> None:
        if self._written < MAX_EVENTS and (kind, name, value) not in self._reported:
            self._reported.add((kind, name, value))
            self._written += 1
            word = dtype_name(dtype) if dtype is not None else None
            more: dict[str, Any] = {"value": value, "limit": limit, "dtype": word, "phase": self.phase}
            self._writer.event(kind, name, step=self._step, op=op, **more)


class _LoopChecker(_OpChecker):
    """Inspects operators outside of the forward and the loss; those within modules of the model were inspected there,
    where they matter to the training."""

    outside = "the loop"
    phase = None
    counts_products = False
    in_model = False
    """Whether the model runs: its operators are not inspected, nor do they count."""

    def inspect_op(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        if not self.in_model:
            super().inspect_op(func, args, kwargs, out)

    def _report(self, kind: str, op: str, value: float, dtype: torch.dtype | None, limit: float | None) -> None:
        optimizer = running_optimizer()
        if optimizer and self._running() == self.outside:  # within the step of an optimizer of the program's own
            super()._write_event(kind, op, f"optimizer.step of {optimizer}", value or None, limit, dtype)
        else:
            super()._report(kind, op, value, dtype, limit)

    def _write_event(
        self, kind: str, op: str, name: str, value: float | None, limit: float | None, dtype: torch.dtype | None
    ) -> None:
        if name == self.outside and kind != "narrow statistics":  # those are of normalization layers
            super()._write_event(kind, op, name, value, limit, dtype)
