"""Operators of the first forward and loss that are unsafe in 16 bits, detected by intercepting that one step.

Constants are checked in the dtype in which the operator runs, below autocast: an `eps` that rounds to zero in FP16 does
not keep a divisor from being zero, and a mask of -1e9 is -inf there. The module is determined only if there is
something to report, from the Python frames of the operator's callers.
"""

import contextlib
import functools
import math
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves

from amp_core.record.backends import BACKENDS
from amp_core.record.environment import with_autocast
from amp_core.record.model.frames import local_variables
from amp_core.record.model.modules import is_compiled
from amp_core.record.model.narrow_dtypes import NARROW
from amp_core.record.model.parameters import named_buffers, named_modules, unwrapped
from amp_core.record.observer import Observer
from amp_core.record.observers.signals.marks import Marks
from amp_core.record.observers.signals.narrow_ops import NarrowOps
from amp_core.record.observers.signals.router_choices import SELECTIONS, size_by_row
from amp_core.record.observers.signals.step_operators import (
    StepMode,
    StepOperators,
    report_error,
    running_module,
    running_optimizer,
)
from amp_core.record.op_trace.call_sites import CallSite, call_site
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
PRODUCTS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1, "convolution": 1, "_convolution": 1}
"""Products that autocast runs in 16 bits, with the argument whose size says how many terms each output sums. Not those
with a vector, such as the power iteration of spectral norm: no Tensor Core runs them."""
RECURRENT = ("mkldnn_rnn_layer", "_cudnn_rnn", "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "miopen_rnn")
"""Layers that are one operator; those of a CPU in other cases are made of products."""
ATTENTION = ("_scaled_dot_product_", "_flash_attention", "_efficient_attention")
"""How the names of fused attention begin."""


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
        # Module, multiplications, output size and shape of the factor of each product in FP32 in an autocast region.
        self._wide: list[tuple[str, float, tuple[int, int], tuple[int, ...]]] = []
        self._in_16_bits: set[tuple[str, tuple[int, ...]]] = set()  # modules and factors of products in 16 bits
        # Elements and a size of scores among which a maximum was selected.
        self._selected: set[tuple[int, int]] = set()
        self._all = 0.0
        self._in_region = self._cast = False  # whether autocast was on for an operator, and any result was in 16 bits
        self._outside: Counter[str] = Counter()  # FP32 results of products outside of any autocast region, by module
        self._narrow: dict[torch.dtype, float] = {}  # multiplications that autocast did in 16 bits
        self._widened: tuple[int, int] | None = None  # the call site whose operator last widened 16-bit values
        self._widened_by_hand: Marks[bool] = Marks()  # of what the program itself widened

    def pause(self) -> None:
        """Inspect no more operators."""
        self._left = 0

    def _running(self) -> str:
        return running_module(self._model, outside=self.outside)

    def inspect_op(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        if self._left and not self._at_own_work():
            self._left -= 1
            self._cut = self._left == 0
            # Operators of the same call site are parts of one call that torch decomposed.
            call = call_site((__name__, StepMode.__module__, QuietMode.__module__))
            if _widens(out, args):
                self._widened = call.key
                if not call.module.startswith("torch."):
                    self._widened_by_hand.put(out, True)
            elif any(map(self._widened_by_hand.of, args)) and not _is_cast_again(func.overloadpacket.__name__):
                self._widened_by_hand.put(out, True)
            self._check(call, func.overloadpacket.__name__, args, kwargs, out)

    def _check(self, call: CallSite, op: str, args: Any, kwargs: Any, out: Any) -> None:
        self._in_region = self._in_region or _autocast_enabled()
        self._cast = self._cast or any(_is_narrow(one) for one in (out if isinstance(out, (list, tuple)) else [out]))
        self.narrow_ops.check(op, args, out, self._running)
        if op.rstrip("_") in SELECTIONS and args and isinstance(args[0], torch.Tensor):
            self._selected |= {(args[0].numel(), size) for size in args[0].shape}  # by expert or by token
        if op in PRODUCTS and isinstance(out, torch.Tensor) and _inside_autocast():
            # An operator that widens its own inputs, such as unfused attention, does so on purpose.
            wide = out.dtype == torch.float32 and call.key != self._widened and _is_trained(args)
            self._count(op, args, out, wide=wide and not self._is_intended(call, args))
        elif (op in RECURRENT or op.startswith(ATTENTION)) and _inside_autocast():
            self._count_fused(op, args, out)
        elif (op in PRODUCTS or op in RECURRENT) and _is_trained(args):
            made = out[0] if isinstance(out, tuple | list) else out
            if made.dtype == torch.float32:
                self._outside[self._running()] += made.numel()
        if op in BANNED and _inside_autocast():
            self._report("banned op", op, 0.0, dtype=None, limit=None)
            return
        if not _is_narrow(out) or op.startswith("_foreach"):
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

    def _is_intended(self, call: CallSite, args: Any) -> bool:
        """Whether the program wrote a product in FP32 on purpose: of values that it widened itself, without autocast.
        A layer of torch's may be in such a region by mistake; what comes before it has to be widened to fit."""
        by_hand = any(map(self._widened_by_hand.of, args))
        return by_hand and not call.module.startswith("torch.nn.") and not _autocast_enabled()

    def _count(self, op: str, args: Any, out: torch.Tensor, wide: bool) -> None:
        factor = args[PRODUCTS[op]]
        terms = factor.shape[-1] if "conv" not in op else factor.numel() // max(1, factor.shape[0])
        work = out.numel() * terms
        self._all += work
        if out.dtype in NARROW and _autocast_enabled():
            self._narrow[out.dtype] = self._narrow.get(out.dtype, 0.0) + work
            self._in_16_bits.add((self._running(), tuple(factor.shape)))
        if wide and work:  # an empty tensor takes no work
            self._wide.append((self._running(), work, size_by_row(out), tuple(factor.shape)))

    def _count_fused(self, op: str, args: Any, out: Any) -> None:
        """A recurrent layer multiplies each vector of its input, or of its state, by each of its matrices; attention
        each query by all keys, and their shares by all values."""
        given = [t for t in tree_leaves(args) if isinstance(t, torch.Tensor)]
        if op in RECURRENT:
            work = given[0].numel() // max(1, given[0].shape[-1]) * sum(t.numel() for t in given[1:] if t.dim() == 2)
        else:
            work = 2 * given[0].numel() * given[1].shape[-2]
        self._all += work
        made = out[0] if isinstance(out, tuple | list) else out
        if made.dtype in NARROW and _autocast_enabled():
            self._narrow[made.dtype] = self._narrow.get(made.dtype, 0.0) + work

    def write(self) -> None:
        """Write the modules with most FP32 products, as shares of all. What operators lose in 16 bits is on its way.

        A router's product is in FP32 on purpose: its scores are compared. So is that of a layer which ran in 16 bits
        too, as a critic does whose gradient penalty is computed in FP32.
        """
        self.narrow_ops.send()
        wide: dict[str, float] = {}
        for name, work, size, factor in self._wide:
            if size not in self._selected and (name, factor) not in self._in_16_bits:
                wide[name] = wide.get(name, 0.0) + work
        for name, work in sorted(wide.items(), key=lambda item: -item[1])[:MAX_EVENTS]:
            self._writer.event("wide product", name, step=self._step, value=work / self._all, dtype="float32")
        if self._in_region and not self._cast and not self._cut:
            most = next((name for name, _ in self._outside.most_common() if name != self.outside), "")
            self._writer.event("nothing cast", most, step=self._step, count=len(self._outside))
        seen = dict(self._writer.head.config) | {"products_seen": self._all}
        if self._narrow and not seen.get("autocast_dtype"):  # the region is inside forward, not around it
            seen = with_autocast(seen, dtype_name(max(self._narrow, key=self._narrow.__getitem__)))
        self._writer.update_head(config=seen)

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
    in_model = False
    """Whether the model runs: its operators are not inspected, nor do they count."""

    def inspect_op(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        if not self.in_model:
            super().inspect_op(func, args, kwargs, out)

    def _count(self, op: str, args: Any, out: torch.Tensor, wide: bool) -> None:
        pass

    def write(self) -> None:
        self.narrow_ops.send()

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


def _is_narrow(out: Any) -> bool:
    return isinstance(out, torch.Tensor) and out.dtype in NARROW


def _widens(out: Any, args: Any) -> bool:
    return isinstance(out, torch.Tensor) and out.dtype == torch.float32 and bool(args) and _is_narrow(args[0])


def _is_cast_again(op: str) -> bool:
    """Whether an operator is a product of which autocast casts the arguments, so that it is not of what was widened."""
    return op in PRODUCTS and _autocast_enabled()


def _inside_autocast() -> bool:
    """Whether an autocast region is open, be it one that disables it within another."""
    depth = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return depth > 0


def _is_trained(args: Any) -> bool:
    """Whether a gradient may flow through an operator: not of a teacher without gradients, which runs as it likes. A
    custom autograd function computes without them, of tensors that have some."""
    return torch.is_grad_enabled() or any(isinstance(a, torch.Tensor) and a.requires_grad for a in args)


def _autocast_enabled() -> bool:
    """Whether autocast was on when Python called the present operator. Within an operator that autocast handles,
    `is_autocast_enabled` is False."""
    with torch._C._RestorePythonTLSSnapshot():  # type: ignore[attr-defined]
        return any(torch.is_autocast_enabled(kind) for kind in BACKENDS)


_OF_MODES = ("torch._compile", "torch._dynamo")
"""Modules whose functions call those of a mode."""


class FailedIn(Observer):
    """Reports the module that was running when an exception ended the run, from the exception's traceback."""

    def __init__(self, writer: RunWriter, model: torch.nn.Module) -> None:
        self._writer = writer
        self._model = unwrapped(model)
        self._step: int | None = None
        self._before = getattr(sys, "last_value", None)

    def step_began(self, step: int) -> None:
        self._step = step

    def close(self) -> None:
        error = sys.exc_info()[1]
        if error is None:  # uncaught, while Python exits: it keeps the last exception
            error = getattr(sys, "last_value", None)
            if error is self._before:
                return
        names = {id(m): n for n, m in named_modules(self._model)}
        module: str | None = None
        function = ""
        in_backward = False
        trace = error.__traceback__ if error is not None else None
        while trace is not None:
            frame, trace = trace.tb_frame, trace.tb_next
            within = str(frame.f_globals.get("__name__"))
            if within == QuietMode.__module__:  # what it calls is the operator
                break
            if within.startswith(_OF_MODES):
                continue
            owner = local_variables(frame).get("self")
            function = frame.f_code.co_qualname
            if isinstance(owner, torch.nn.Module) and id(owner) in names:
                module = names[id(owner)]
            elif function == "BackwardCFunction.apply":  # a custom autograd function's backward
                in_backward, module = True, None
        if error is not None:
            phase = "backward" if in_backward and module else None
            self._writer.event("failed in", module or "", type(error).__name__, self._step, op=function, phase=phase)
