"""Detects the module with the first non-finite output, in forward order, in the step in which it occurs.

On a CPU the inputs and outputs of modules are kept until backward begins, and inspected only if the loss is not finite.
A hook takes some microseconds, every call of a module of a class that has one takes longer, and an output that is kept
occupies memory that the next one would otherwise reuse, still in the cache. So of a model of more than `MAX_ALL`
modules only its own input and output are kept, and of any model in a step that the recorder runs bare (see
`calibration`). If those are not finite, the step after names the module: all modules have a hook in the first steps and
after a non-finite value. In every `EVERY`th step `MAX_SPREAD` modules have one, evenly spread, and others at each turn.

On a GPU the host would have to wait to check whether a loss is finite. So there outputs are measured on the device, in
every `EVERY`th step, in the steps after a non-finite value, and with `each_step` in all; the numbers are read when they
have arrived.
"""

import functools
import math
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from amp_core.record.environment import with_autocast
from amp_core.record.model import own
from amp_core.record.model.modules import is_layer, tensors_in
from amp_core.record.model.narrow_dtypes import NARROW
from amp_core.record.model.parameters import has_values, in_backward, local_values, named_modules, unwrapped
from amp_core.record.observer import Observer
from amp_core.record.observers.signals.forward_dtypes import ForwardDtypes
from amp_core.record.observers.signals.graph_constants import constant_in_graph, write_constant
from amp_core.record.observers.signals.graph_origins import origin_in_graph, write_origin
from amp_core.record.observers.signals.loss_dtype import loss_dtype
from amp_core.record.observers.signals.masked_rows import masked_rows
from amp_core.record.observers.signals.output_sizes import OutputSizes
from amp_core.record.stats.layout import dtype_name
from amp_core.record.torch_internals import patched_functions
from amp_core.record.torch_internals.module_calls import Switches
from amp_core.store.writer import RunWriter

EVERY = 10
"""Interval in steps: on a GPU between measured steps while all is finite; on all devices for outputs near the limit."""
ARMED_STEPS = 3
"""Steps that are measured after one with a non-finite loss or gradient."""
MAX_BYTES = 64 * 2**20
"""Total size of the tensors that are kept on a CPU; later ones in the step are not inspected."""
MAX_EVENTS = 100
MAX_EXPLAINED = 10
"""Values whose operator is searched in the graph."""
MAX_ALL = 64
"""Modules of a model that all have a hook on a CPU while nothing is wrong."""
MAX_SPREAD = 16
"""Modules of a larger model that have a hook in every `EVERY`th step."""


class ModuleCall(NamedTuple):
    """A call of a module with its arguments; tensors in them are extracted only on access."""

    number: int
    """Index of the module among all."""
    given: Any
    output: Any

    @property
    def inputs(self) -> list[torch.Tensor]:
        """Tensors among the arguments."""
        return [t for t in tree_leaves(self.given) if isinstance(t, torch.Tensor)]

    @property
    def outputs(self) -> list[torch.Tensor]:
        """Floating-point tensors in the output."""
        return [t for t in tensors_in(self.output) if t.is_floating_point()]


class ForwardCheck(Observer):
    """Hooks on all modules of one model; on a CPU they only keep inputs and outputs."""

    def __init__(
        self,
        writer: RunWriter,
        model: torch.nn.Module,
        device: torch.device,
        each_step: bool,
        on_unexplained: Callable[[], None] = lambda: None,
    ):
        self._writer = writer
        self._on_unexplained = on_unexplained  # called if no operator of the loss, or of a module, was found
        self._model = unwrapped(model)
        self._device = device
        self._each_step = each_step
        self._modules = list(named_modules(self._model))
        self._kept: list[ModuleCall] = []
        self._bytes = 0  # of those
        self._sizes = OutputSizes(self, device)
        self._dtypes = ForwardDtypes(writer, [name for name, _ in self._modules])
        self._step = 0
        self._armed = ARMED_STEPS  # the first steps are measured: most faults show at once
        self._measuring = False
        self._written = 0
        self._explained = 0
        self._unnamed: tuple[int, dict[str, Any]] | None = None  # the model's own output was not finite; and that step
        self._near: set[int] = set()
        self._finite_step = -1  # the last step with a backward of a finite loss
        self._masked = False  # rows that a mask made -inf were reported
        self._thread = threading.get_ident()
        self._threaded = False
        self._undescribed = False  # the model itself was not called, so autocast was not detected yet
        self._hooks = Switches((m, self._hook(i)) for i, (_, m) in enumerate(self._modules))
        self._on: frozenset[int] = frozenset()
        self._all = frozenset(range(len(self._modules)))
        self._on_cpu = device.type == "cpu"
        if self._on_cpu:
            patched_functions.backward.listen(self._on_backward)

    def step_began(self, step: int) -> None:
        self._step = step
        self._forget()
        self._sizes.step_began()
        self._dtypes.step_began(step)
        closely = self._each_step or self._armed > 0
        if self._on_cpu and not closely:
            few = self.bare or (len(self._modules) > MAX_ALL and step % EVERY != 0)
            self._attach(_ROOT if few else _some_of(len(self._modules), step // EVERY))
        else:
            due = closely or step % EVERY == 0
            self._measuring = due and not self._on_cpu
            self.bare = self.bare and not due
            self._attach(self._all if due else frozenset())
        self._armed -= self._armed > 0

    def step_ended(self, step: int) -> None:
        self._sizes.step_ended(step)
        self._forget()
        if self._unnamed is not None and step > self._unnamed[0]:
            self._report_unnamed()
        self._undescribed = "autocast_dtype" not in self._writer.head.config
        self._read(max_pending=ARMED_STEPS)

    def close(self) -> None:
        self._attach(frozenset())
        patched_functions.backward.unlisten(self._on_backward)
        self._forget()
        self._report_unnamed()
        self._read(max_pending=0)

    def _attach(self, wanted: frozenset[int]) -> None:
        """Attach hooks to these modules, and detach those of all others."""
        if self._on != wanted:
            self._hooks.off(self._on - wanted)
            self._hooks.on(sorted(wanted - self._on))
            self._on = wanted

    def _forget(self) -> None:
        self._kept, self._bytes = [], 0

    # as modules run

    def _hook(self, index: int) -> Callable[..., None]:
        def after_forward(module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if self.at_own_work():
                return
            if threading.get_ident() != self._thread and not in_backward():
                self._on_other_thread(index)
                return
            if not torch.is_grad_enabled():  # perhaps a checkpoint of the program's own
                if not in_backward():
                    self._dtypes.without_gradients(index, output)
                return
            if in_backward():  # checkpointing: on a GPU in an autograd thread
                self._dtypes.in_backward(index, output)
                return
            if self._undescribed:
                self._describe()
            call = ModuleCall(index, (args, kwargs), output)
            if self._measuring:
                self._dtypes.with_gradients(index, call.outputs)
                self._sizes.add(index, call.outputs, last=index == 0)
            elif self._bytes < MAX_BYTES:
                if index == 0:
                    self._check_abandoned()
                self._kept.append(call)
                self._bytes += output.nbytes if isinstance(output, torch.Tensor) else _bytes(call.outputs)

        return after_forward

    def _check_abandoned(self) -> None:
        """The model is called again, and no backward followed its call before: perhaps the loop drops the batch because
        its loss is not finite."""
        last = next((k for k, call in enumerate(self._kept) if call.number == 0), None)
        if last is None:
            return
        calls, self._kept, self._bytes = self._kept[: last + 1], self._kept[last + 1 :], 0
        if self._written < MAX_EVENTS and not all(map(is_finite, calls[-1].outputs)):
            first = next(call for call in calls if not all(map(is_finite, call.outputs)))
            name, module = self._modules[first.number]
            dtype = next(t.dtype for t in first.outputs if not is_finite(t))
            facts = {"op": type(module).__name__, "dtype": dtype_name(dtype), "phase": "forward"}
            self._writer.event("abandoned forward", name, step=self._step, **facts)
            self._written += 1

    def _describe(self) -> None:
        """Record autocast's dtype after the first call of a module, in a loop that calls parts of the model."""
        self._undescribed = False
        kind = self._device.type
        dtype = dtype_name(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else None
        self._writer.update_head(config=with_autocast(self._writer.head.config, dtype))

    def _on_other_thread(self, index: int) -> None:
        if not self._threaded and not torch.is_autocast_enabled(self._device.type):
            self._threaded = True
            self._writer.event("threaded forward", self._modules[index][0], step=self._step)

    # on a CPU: before backward

    def _on_backward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.at_own_work() or threading.get_ident() != self._thread or not (self._kept or self._on == _ROOT):
            return
        if bad := self._nonfinite_losses(args):
            self._report_masked(bad[0])
            self._report_first(bad[0])
        else:  # perhaps of another model, as of a critic before the loss of its generator
            self._finite_step = self._step
            if self._step % EVERY == 0:
                self._report_large()
        if self._armed or self._step % EVERY == 0:
            for call in self._kept:
                self._dtypes.with_gradients(call.number, call.outputs)
            self._dtypes.compare_rollout()
        if bad:
            self._forget()

    @staticmethod
    def _nonfinite_losses(args: tuple[Any, ...]) -> list[torch.Tensor]:
        """Those of the numbers that backward was called with that are not finite."""
        roots = [t for t in tree_leaves(args[:1]) if isinstance(t, torch.Tensor) and t.numel() == 1 and not t.is_meta]
        return [t for t in roots if not math.isfinite(t.item())]

    def backward_began(self) -> None:
        self._forget()

    def _report_masked(self, loss: torch.Tensor) -> None:
        if not self._masked and (rows := masked_rows(loss)):
            self._masked = True
            self._writer.event("masked rows", step=self._step, value=float(rows), phase="forward")

    def _report_first(self, loss: torch.Tensor) -> None:
        """Report the first kept call whose output is not finite."""
        if self._written >= MAX_EVENTS:
            return
        bad = [k for k, call in enumerate(self._kept) if not all(is_finite(t) for t in call.outputs)]
        if not self._kept:  # the loop calls parts of the model, and none of them has a hook
            self._armed = ARMED_STEPS
            return
        if not bad:
            self._write(self._step, "", "loss", loss_dtype(loss), value=None, count=0, detail="")
            self._explain(loss, None)
            return
        first = self._kept[bad[0]]
        floating = [t for t in first.inputs if t.is_floating_point() and t.numel() and not t.is_meta]
        detail = ""
        if self._has_bad_weights(first.number):
            detail = "weights"
        elif not all(is_finite(t) for t in floating):
            last = self._kept[-1]  # the model's own call is the last, unless the kept size was exceeded
            detail = "data" if last.number == 0 and not all(is_finite(t) for t in last.inputs) else "input"
        nonfinite: dict[str, Any] = {
            # A tensor made between two modules is not the output of the second.
            "dtype": next(t.dtype for t in (floating if detail == "input" else first.outputs) if not is_finite(t)),
            "value": max((float(t.detach().abs().max()) for t in floating), default=None),
            "count": len({self._kept[k].number for k in bad}),
            "detail": detail,
        }
        number = self._entered_by(bad[0]) if detail == "input" else first.number
        if detail == "weights" and self._finite_step == self._step and self._on != _ROOT:
            self._writer.event("weights broken within step", self._modules[number][0], step=self._step)
        if self._on == _ROOT and len(self._modules) > 1 and not detail:
            number = next((i for i in range(len(self._modules)) if self._has_bad_weights(i)), 0)
            if not number:
                self._armed, self._unnamed = ARMED_STEPS, (self._step, nonfinite)
                return
            nonfinite["detail"] = "weights"
        if nonfinite["detail"] != "weights":  # those may be the result of the step before
            self._unnamed = None
        self._report_unnamed()
        self._report(self._step, number, **nonfinite)
        self._report_narrow_input(self._kept[-1])
        if nonfinite["detail"] == "input":
            around = self._modules[number][0].rpartition(".")[0]
            self._explain(next(t for t in floating if not is_finite(t)), around)
        elif not nonfinite["detail"] and not is_layer(self._modules[number][1]):
            self._explain(next(t for t in first.outputs if not is_finite(t)), self._modules[number][0])

    def _report_narrow_input(self, call: ModuleCall) -> None:
        """Whether the model itself was given 16-bit values, which were rounded before autocast could decide."""
        narrow = next((t.dtype for t in call.inputs if t.dtype in NARROW), None)
        if call.number == 0 and narrow is not None:
            self._writer.event("narrow input", step=self._step, dtype=dtype_name(narrow), phase="forward")

    def _explain(self, tensor: torch.Tensor, module: str | None) -> None:
        """Name the operator, or the constant, that made a tensor of this module, or of the loss, non-finite."""
        known = [t for call in self._kept for t in (*call.inputs, *call.outputs) if is_finite(t)]
        if self._explained < MAX_EXPLAINED:
            constant, origin = constant_in_graph(tensor, known), None
            if constant is not None:
                write_constant(self._writer, self._step, module, constant)
            elif (origin := origin_in_graph(tensor, known)) is not None:
                write_origin(self._writer, self._step, module, origin)
            if constant is not None or origin is not None:
                self._explained += 1
                return
        self._on_unexplained()

    def _entered_by(self, place: int) -> int:
        """The module that was called with the input of this call that is not finite: the outermost one around it, if
        its own input is not finite either."""
        number = self._kept[place].number
        for call in self._kept[place + 1 :]:
            around = self._modules[number][0].startswith(f"{self._modules[call.number][0]}.")
            if around and not all(map(is_finite, call.inputs)):
                number = call.number
        return number

    def _report_unnamed(self) -> None:
        """Report that the model's output was not finite in a step, where the step after has not shown the module."""
        if self._unnamed is not None:
            (step, nonfinite), self._unnamed = self._unnamed, None
            self._report(step, 0, **nonfinite)

    def _has_bad_weights(self, index: int) -> bool:
        return not all(is_finite(p) for p in own.parameters(self._modules[index][1], recurse=False))

    def _report(self, step: int, index: int, dtype: torch.dtype, **more: Any) -> None:
        name, module = self._modules[index]
        self._write(step, name, type(module).__name__, dtype, **more)

    def _write(self, step: int, name: str, op: str, dtype: torch.dtype, **more: Any) -> None:
        self._written += 1
        self._armed = ARMED_STEPS
        limit = float(torch.finfo(dtype).max)
        facts: dict[str, Any] = {"limit": limit, "dtype": dtype_name(dtype), "phase": "forward", "op": op}
        self._writer.event("non-finite output", name, step=step, **facts, **more)

    def _report_large(self) -> None:
        """Report FP16 outputs within a factor of 2 of the largest finite value, once for each module."""
        for call in self._kept:
            for tensor in call.outputs:
                if (
                    tensor.dtype == torch.float16
                    and tensor.numel()
                    and not tensor.is_meta
                    and call.number not in self._near
                ):
                    self._report_if_near_limit(self._step, call.number, float(tensor.detach().abs().max()))

    def _report_if_near_limit(self, step: int, index: int, size: float) -> None:
        largest = float(torch.finfo(torch.float16).max)
        if largest / 2 <= size <= largest and index not in self._near:
            self._near.add(index)
            name, module = self._modules[index]
            more: dict[str, Any] = {"value": size, "limit": largest, "dtype": "float16", "phase": "forward"}
            self._writer.event("near overflow", name, step=step, op=type(module).__name__, **more)

    # on a GPU: when the numbers have arrived

    def _read(self, max_pending: int) -> None:
        for step, outputs in self._sizes.arrived(max_pending):
            for number, dtype, size in outputs:
                if dtype == torch.float16:
                    self._report_if_near_limit(step, number, size)
            bad = [k for k, output in enumerate(outputs) if not math.isfinite(output.size)]
            if bad and self._written < MAX_EVENTS:
                first = outputs[bad[0]]
                self._report(
                    step,
                    first.number,
                    first.dtype,
                    value=outputs[bad[0] - 1].size if bad[0] else None,  # the module before, mostly its input
                    count=len({outputs[k].number for k in bad}),
                    detail="weights" if self._has_bad_weights(first.number) else "",
                )


_ROOT = frozenset((0,))


@functools.lru_cache(maxsize=4)
def _some_of(number: int, turn: int) -> frozenset[int]:
    """All of at most `MAX_ALL` modules; else about `MAX_SPREAD`, evenly spread, with the first; others at each turn."""
    if number <= MAX_ALL:
        return frozenset(range(number))
    stride = -(-number // (MAX_SPREAD - 1))
    return frozenset((0, *range(turn % stride, number, stride)))


def _bytes(tensors: list[torch.Tensor]) -> int:
    return sum(t.nbytes for t in tensors)


def is_finite(tensor: torch.Tensor) -> bool:
    if not tensor.is_floating_point() or not has_values(tensor):
        return True
    return bool(local_values(tensor.detach()).isfinite().all())  # of all shards, a collective would tell
