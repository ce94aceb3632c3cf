"""Measures module outputs and their gradients: the kinds `activation` and `output_grad`.

Modules have hooks only during a sampled step. Each output tensor gets its own tensor hook, so in-place modules, reused
modules, and nested, dict and dataclass outputs all work. Each tensor is measured as it passes, and none is kept alive,
except output gradients on a GPU: they are measured together; see `held_outputs`.

Measured modules are those that compute: without children, or with parameters of their own.

For linear and convolutional layers, the largest output gradient of each channel is kept until the weight gradients are
measured: see `channels`.
"""

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any, NamedTuple

import torch

from amp_core.record.model import own
from amp_core.record.model.modules import computes, tensors_in
from amp_core.record.model.parameters import named_modules, real_values
from amp_core.record.stats.channels import ChannelLargest, Row, Rows, cap_for, channel_of
from amp_core.record.stats.held_outputs import HeldOutputs, LayerChannel
from amp_core.record.stats.layout import Cap, Key, dtype_name, key_of, measurable
from amp_core.record.stats.measure import measure_together, passing_tensors
from amp_core.record.step_phases import Phases, called, calling, count_watched
from amp_core.record.torch_internals.captures import out_of_sight, transformed
from amp_core.record.torch_internals.compiling import not_compiled, untraced
from amp_core.record.torch_internals.module_calls import Switches
from amp_core.record.torch_internals.tensor_hooks import TensorHooks

PASSING = frozenset({torch.float32, torch.float16, torch.bfloat16})
"""Dtypes that `PassingTensors` measures."""
Packed = tuple[list[Key], list[torch.Tensor]]
"""What was measured on one device, and the packed vectors, in the same order."""


class Outputs:
    """Hooks on the modules of one model that are attached for one step at a time."""

    def __init__(
        self,
        model: torch.nn.Module,
        wanted: Callable[[str], bool],
        kinds: frozenset[str],
        phases: Phases,
        paused: Callable[[], bool] = lambda: False,
    ) -> None:
        self._kinds = kinds & {"output_grad", "activation"}
        self._phases = phases
        self._paused = paused
        self._switches = Switches(
            (m, _AfterForward(self, n, _OutputGrad(self, n, m)))
            for n, m in named_modules(model)
            if n and computes(m) and wanted(n)
        )
        self._on = False
        self._on_tensors = TensorHooks(direct=True)
        self._passing = passing_tensors("cpu") if phases.adds_up else None
        self._spent_forward_s = 0.0  # by outputs that needed a hook at most, in the current step
        self._spent_s = 0.0  # by output gradients that were measured by their plan, in the current backward
        self._laid_out = 0  # how often `_rows` was laid out anew
        self._alone = self._kinds == {"output_grad"}
        self._passing_keys: list[Key] = []
        self._measured: dict[torch.device, Packed] = {}  # tensors that `_passing` does not take
        self._largest: dict[int, ChannelLargest] = {}  # by the weight's id
        self._rows = Rows()
        self._held: dict[torch.device, HeldOutputs] = {}

    def attach(self) -> None:
        """Attach to the modules: measure outputs and their gradients from now on."""
        for held in self._held.values():
            held.forward_begins()
        if self._kinds and not self._on:
            self._forget_largest()
            self._on = True
            self._switches.on()

    def detach(self) -> None:
        """Detach from the modules."""
        if self._on:
            self._on = False
            self._switches.off()
        self._on_tensors.detach_leaves()
        if self._spent_s or self._spent_forward_s:
            count_watched("forward", self._spent_forward_s)
            count_watched("backward", self._spent_s)
            self._spent_forward_s = self._spent_s = 0.0

    def remove(self) -> None:
        """Detach from everything, including tensors of earlier forwards."""
        self.detach()
        self._on_tensors.remove()

    def take(self) -> list[Packed]:
        """All measurements since the last `take`, by device."""
        measured, self._measured = list(self._measured.values()), {}
        for held in self._held.values():
            measured += [(keys, [packed]) for keys, packed in held.take()]
        if self._passing is not None and self._passing_keys:
            measured.append((self._passing_keys, self._passing.take()))
            self._passing_keys = []
        return measured

    def forget(self) -> None:
        """Leave out all measurements since the last `take`."""
        for held in self._held.values():
            held.forget()
        self.take()

    def measure_weights(
        self, named: Sequence[tuple[str, torch.Tensor]], names: Mapping[int, str]
    ) -> tuple[torch.Tensor, list[Cap | None]]:
        """Measure weight gradients of one device, each with the cap that the largest output gradients of this step by
        channel are. Returns the packed vectors, as `measure_together` does, and the caps. `names` has the names of
        parameters by their ids.
        """
        grads = [grad for _, grad in named]

        def caps_of() -> list[Cap | None]:
            present = {names[i]: one for i, one in self._largest.items() if one.present and i in names}
            rows = self._rows.all_values()
            return [self._cap(grad, present.get(name), rows) for name, grad in named]

        held = self._held.get(grads[0].device)
        if held is not None:
            return held.measure_with(grads, caps_of)
        caps = caps_of()
        return measure_together(grads, caps), caps

    @staticmethod
    def _cap(
        grad: torch.Tensor, largest: ChannelLargest | None, rows: Mapping[torch.dtype, Sequence[torch.Tensor]]
    ) -> Cap | None:
        if largest is None:
            return None
        held = largest.held
        values = rows[held.dtype][held.index] if isinstance(held, Row) else held
        return cap_for(grad, values, largest.row, largest.dims, largest.dtype)

    def _after_forward(self, name: str, on_grad: Callable[[torch.Tensor], None], output: Any) -> None:
        """A module returned `output`."""
        if self._paused() or not torch.is_grad_enabled() or out_of_sight():
            return
        with self._phases.watching():
            for leaf in tensors_in(output):
                if measurable(real_values(leaf)):
                    if "activation" in self._kinds:
                        self._measure(name, "activation", leaf)
                    if "output_grad" in self._kinds and leaf.requires_grad:
                        self._on_tensors.attach(leaf, name, on_grad)

    @untraced
    def _on_grad(self, name: str, module: torch.nn.Module, grad: torch.Tensor, channels: tuple[int, int] | None) -> Any:
        """Measure an output gradient. Returns the plan by which more of its sort can be measured, or None."""
        if grad._is_zerotensor():
            grad = grad.clone()  # kernels read addresses, and it has none
        if self._passing is not None and grad.is_cpu:
            try:
                plan = self._add_quickly(name, module, grad, channels)
            except Exception as error:
                self._phases.report(error)
                return None
            if plan is not None:
                return plan
        try:
            if not measurable(real_values(grad)) or self._hold(name, module, grad, channels):
                return None
        except Exception as error:
            self._phases.report(error)
            return None
        with self._phases.watching():
            self._measure(name, "output_grad", grad)
            largest = self._largest_for(module, grad, channels)
            if largest is not None and channels is not None:
                largest.take_in(grad, channels[0] + grad.dim(), self._rows)
        return None

    def _add_quickly(
        self, name: str, module: torch.nn.Module, grad: torch.Tensor, channels: tuple[int, int] | None
    ) -> "_Plan | None":
        """Measure a small output gradient, and take it into the largest ones of its layer. None where that takes
        more."""
        dtype = grad.dtype
        if dtype not in PASSING or self._passing is None:
            return None
        largest = self._largest_for(module, grad, channels)
        if largest is None or channels is None or not isinstance(largest.held, Row):
            largest, of = None, (0, 1, 0)
        else:
            of = largest.held.count, grad.shape[grad.dim() + channels[0] + 1 :].numel(), largest.held.address
        if not self._passing.add(grad, *of):
            return None
        key = key_of(name, "output_grad", dtype_name(dtype))
        self._passing_keys.append(key)
        if largest is not None:
            largest.present = True
        weight = id(own.parameter(module, "weight"))
        return _Plan(dtype, grad.shape, self._passing.arguments(grad, *of), key, largest, weight, self._laid_out)

    def _hold(self, name: str, module: torch.nn.Module, grad: torch.Tensor, channels: tuple[int, int] | None) -> bool:
        """Measure an output gradient together with others. False where it has to be measured now."""
        if grad.is_cpu or grad.is_complex():
            return False
        held = self._held.get(grad.device)
        if held is None:
            held = self._held[grad.device] = HeldOutputs(grad.device, self._largest, self._phases.watching)
        weight = self._capped_weight(module, grad, channels)
        layer = None
        if weight is not None and channels is not None:
            layer = LayerChannel(id(weight), channels[0] + grad.dim(), channels[1], weight.dim())
        return held.add(key_of(name, "output_grad", dtype_name(grad.dtype)), grad, layer)

    @staticmethod
    def _capped_weight(module: torch.nn.Module, grad: torch.Tensor, channels: tuple[int, int] | None) -> Any:
        """The weight whose gradient is bounded by the output gradient, or None.

        A dimension of the output, counted from the end, is one of the weight: see `channel_of`.
        """
        if channels is None or grad.is_complex():
            return None
        # The gradient of a parametrized weight reaches its parameters through another map.
        weight = own.parameter(module, "weight")
        # An empty tensor has no maximum, and FP8 has no arithmetic.
        unbounded = grad.dim() < 2 or channels[0] + grad.dim() < 0 or not grad.numel() or grad.dtype.itemsize < 2
        return None if unbounded else weight

    def _largest_for(
        self, module: torch.nn.Module, grad: torch.Tensor, channels: tuple[int, int] | None
    ) -> ChannelLargest | None:
        """Where the largest output gradients of the module are kept, among them `grad`; None where they are not."""
        weight = self._capped_weight(module, grad, channels)
        if weight is None or channels is None:
            return None
        channel = channels[0] + grad.dim()
        known = self._largest.get(id(weight))
        if known is None or not known.fits(grad, channel):
            count = grad.shape[channel]
            held = self._rows.add(count, grad.dtype) if grad.is_cpu else grad.new_zeros(count)
            self._laid_out += 1
            known = self._largest[id(weight)] = ChannelLargest(held, channels[1], weight.dim(), grad.dtype)
        return known

    def _forget_largest(self) -> None:
        """Those of an earlier step, but for the memory of those that may come again."""
        if all(largest.present for largest in self._largest.values()):
            self._rows.clear()
        else:  # shapes change, or not every layer is used
            self._largest.clear()  # `HeldOutputs` holds it too
            self._rows = Rows()
            self._laid_out += 1
        for largest in self._largest.values():
            largest.present = False

    def _measure(self, name: str, kind: str, tensor: torch.Tensor) -> None:
        if self._passing is not None and tensor.is_cpu and self._passing.add(tensor):
            self._passing_keys.append(key_of(name, kind, dtype_name(tensor.dtype)))
            return
        values = real_values(tensor.detach() if tensor.requires_grad else tensor)
        keys, packed = self._measured.setdefault(values.device, ([], []))
        packed.append(measure_together([values]))
        keys.append(key_of(name, kind, dtype_name(values.dtype)))


class _AfterForward:
    """Called with the output of one module.

    A sampled step has a thousand of them between the forward's own work: `quick` makes as few calls as possible.
    """

    __slots__ = ("_name", "_on_grad", "_outputs")

    def __init__(self, outputs: Outputs, name: str, on_grad: Callable[[torch.Tensor], None]) -> None:
        self._outputs, self._name, self._on_grad = outputs, name, on_grad

    def quick(self, output: Any) -> bool:
        """Where a single usual tensor needs a hook at most."""
        outputs = self._outputs
        if type(output) is not torch.Tensor or outputs._phases.present != "forward" or not outputs._alone:
            return False
        begun = perf_counter()
        if output.dtype not in PASSING or output.is_meta or outputs._paused():
            return False
        if transformed() if output.is_cpu else out_of_sight():
            return False
        if output.requires_grad and torch.is_grad_enabled():
            outputs._on_tensors.attach(output, self._name, self._on_grad)
        outputs._spent_forward_s += perf_counter() - begun
        return True

    def __call__(self, module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._outputs._after_forward(self._name, self._on_grad, output)


class _Plan(NamedTuple):
    """How an output gradient of a module was measured: another one of the same shape, dtype and weight is measured
    alike."""

    dtype: torch.dtype
    shape: torch.Size
    arguments: tuple[int, ...]
    """Of `PassingTensors.add_at`, after the address."""
    key: Key
    largest: ChannelLargest | None
    weight: int
    """The `id` of the module's weight."""
    laid_out: int
    """`Outputs._laid_out` when it was made."""


class _OutputGrad:
    """Called by autograd with the gradient of an output of one module.

    A sampled step has a thousand of them, between autograd's own work: it makes as few calls as possible.
    """

    __torch_unserializable__ = True
    __slots__ = ("_attributes", "_channels", "_module", "_name", "_outputs", "_plan")

    def __init__(self, outputs: Outputs, name: str, module: torch.nn.Module) -> None:
        self._outputs, self._name, self._module = outputs, name, module
        self._attributes = own.attributes(module)
        self._channels = channel_of(module)
        self._plan: _Plan | None = None

    def __call__(self, grad: torch.Tensor | None) -> None:
        if grad is None:  # such as that of a state of cuDNN's LSTM that no loss depends on
            return
        plan, outputs = self._plan, self._outputs
        if (
            plan is not None
            and type(grad) is torch.Tensor
            and grad.dtype is plan.dtype
            and grad.is_cpu
            and plan.laid_out == outputs._laid_out
            and grad.shape == plan.shape
            and grad.is_contiguous()
            and not grad._is_zerotensor()
            and outputs._passing is not None
            and type(parameters := self._attributes.get("_parameters")) is dict
            and id(parameters.get("weight")) == plan.weight
        ):
            begun = perf_counter()
            try:
                outputs._passing.add_at(grad.data_ptr(), *plan.arguments)
                outputs._passing_keys.append(plan.key)
                if plan.largest is not None:
                    plan.largest.present = True
            except Exception as error:
                outputs._phases.report(error)
            outputs._spent_s += perf_counter() - begun
            return
        since = calling()
        with own.without_torch_function():
            self._plan = outputs._on_grad(self._name, self._module, grad, self._channels)
        called(since)


not_compiled(_OutputGrad.__call__)
