"""Measures module outputs and their gradients: the kinds `activation` and `output_grad`.

Modules have hooks only during a sampled step. Each output tensor gets its own tensor hook, so in-place modules, reused
modules, and nested, dict and dataclass outputs all work. No tensor is kept alive: each is measured as it passes.

Measured modules are those that compute: without children, or with parameters of their own.

For linear and convolutional layers, the largest output gradient of each channel is kept until the step's caps are read:
see `channels`.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from amp_core.record.model import own
from amp_core.record.model.modules import computes, tensors_in
from amp_core.record.model.parameters import named_modules, real_values
from amp_core.record.stats.channels import Row, Rows, cap_for, channel_largest, channel_of
from amp_core.record.stats.layout import Cap, Key, dtype_name, key_of, measurable
from amp_core.record.stats.measure import measure_together, passing_tensors
from amp_core.record.step_phases import Phases
from amp_core.record.torch_internals.compiling import untraced
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
            (m, self._listener(n, self._on_grad(n, m)))
            for n, m in named_modules(model)
            if n and computes(m) and wanted(n)
        )
        self._on = False
        self._on_tensors = TensorHooks()
        self._passing = passing_tensors("cpu")
        self._quick = self._passing is not None and phases.adds_up
        self._alone = phases.adds_up and self._kinds == {"output_grad"}
        self._passing_keys: list[Key] = []
        self._measured: dict[torch.device, Packed] = {}  # tensors that `_passing` does not take
        self._largest: dict[int, _Largest] = {}  # by the weight's id
        self._rows = Rows()

    def attach(self) -> None:
        """Attach to the modules: measure outputs and their gradients from now on."""
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

    def remove(self) -> None:
        """Detach from everything, including tensors of earlier forwards."""
        self.detach()
        self._on_tensors.remove()

    def take(self) -> list[Packed]:
        """All measurements since the last `take`, by device."""
        measured, self._measured = list(self._measured.values()), {}
        if self._passing is not None and self._passing_keys:
            measured.append((self._passing_keys, self._passing.take()))
            self._passing_keys = []
        return measured

    def caps(self, names: Mapping[int, str]) -> dict[str, Callable[[torch.Tensor], Cap | None]]:
        """By the name of the weight: what gives the cap for its gradient, from the largest output gradients of this
        step by channel. `names` has the names of parameters by their ids.
        """
        values = self._rows.all_values()
        present = ((names[i], one) for i, one in self._largest.items() if one.present and i in names)
        return {
            name: partial(
                cap_for,
                largest=values[one.held.dtype][one.held.index] if isinstance(one.held, Row) else one.held,
                row=one.row,
                dims=one.dims,
            )
            for name, one in present
        }

    def _listener(self, name: str, on_grad: Callable[[torch.Tensor], None]) -> Callable[..., None]:
        def after_forward(module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if not torch.is_grad_enabled() or self._paused():
                return
            if self._alone and type(output) is torch.Tensor and output.dtype in PASSING:
                if output.requires_grad and not output.is_meta:
                    self._on_tensors.attach(output, name, on_grad)
                return
            with self._phases.watching():
                for leaf in tensors_in(output):
                    if measurable(real_values(leaf)):
                        if "activation" in self._kinds:
                            self._measure(name, "activation", leaf)
                        if "output_grad" in self._kinds and leaf.requires_grad:
                            self._on_tensors.attach(leaf, name, on_grad)

        return after_forward

    def _on_grad(self, name: str, module: torch.nn.Module) -> Callable[[torch.Tensor], None]:
        channels = channel_of(module)

        @untraced
        def hook(grad: torch.Tensor) -> None:
            if self._quick and grad.is_cpu:
                try:
                    if self._add_quickly(name, module, grad, channels):
                        return
                except Exception as error:
                    self._phases.report(error)
                    return
            with self._phases.watching():
                if measurable(real_values(grad)):
                    self._measure(name, "output_grad", grad)
                    largest = self._largest_for(module, grad, channels)
                    if largest is not None and channels is not None:
                        largest.take_in(grad, channels[0] + grad.dim(), self._rows)

        return hook

    def _add_quickly(
        self, name: str, module: torch.nn.Module, grad: torch.Tensor, channels: tuple[int, int] | None
    ) -> bool:
        """Measure a small output gradient, and take it into the largest ones of its layer. False where that takes
        more."""
        dtype = grad.dtype
        if dtype not in PASSING or self._passing is None:
            return False
        largest = self._largest_for(module, grad, channels)
        if largest is None or channels is None or not isinstance(largest.held, Row):
            done = self._passing.add(grad)
        else:
            inner = grad.shape[grad.dim() + channels[0] + 1 :].numel()
            done = self._passing.add(grad, largest.held.count, inner, largest.held.address)
            largest.present = largest.present or done
        if done:
            self._passing_keys.append(key_of(name, "output_grad", dtype_name(dtype)))
        return done

    def _largest_for(
        self, module: torch.nn.Module, grad: torch.Tensor, channels: tuple[int, int] | None
    ) -> "_Largest | None":
        """Where the largest output gradients of the module are kept, to which `grad` belongs; None where they are not.

        A dimension of the output, counted from the end, is one of the weight: see `channel_of`.
        """
        if channels is None or grad.is_complex():
            return None
        # The gradient of a parametrized weight reaches its parameters through another map.
        weight = own.parameter(module, "weight")
        channel = channels[0] + grad.dim()
        # Of no values there is no largest, and FP8 has no arithmetic.
        if weight is None or grad.dim() < 2 or channel < 0 or not grad.numel() or grad.dtype.itemsize < 2:
            return None
        known = self._largest.get(id(weight))
        if known is None or not known.fits(grad, channel):
            count = grad.shape[channel]
            held = self._rows.add(count, grad.dtype) if grad.is_cpu else grad.new_zeros(count)
            known = self._largest[id(weight)] = _Largest(held, channels[1], weight.dim())
        return known

    def _forget_largest(self) -> None:
        """Those of an earlier step, but for the memory of those that may come again."""
        if all(largest.present for largest in self._largest.values()):
            self._rows.clear()
        else:  # shapes change, or not every layer is used
            self._largest, self._rows = {}, Rows()
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


class _Largest:
    """The largest output gradient of each channel of a layer, whose weight has `dims` dimensions; `row` is the channel.

    They are a row of `Rows` on a CPU, else a tensor.
    """

    __slots__ = ("dims", "held", "present", "row")

    def __init__(self, held: Row | torch.Tensor, row: int, dims: int) -> None:
        self.held = held
        self.row = row
        self.dims = dims
        self.present = False
        """Whether the values are of the present step."""

    def fits(self, grad: torch.Tensor, channel: int) -> bool:
        """Whether number of channels, dtype and device are those of `grad`."""
        held = self.held
        if isinstance(held, Row):
            return grad.is_cpu and grad.dtype is held.dtype and grad.shape[channel] == held.count
        return grad.device == held.device and grad.dtype is held.dtype and grad.shape[channel] == len(held)

    def take_in(self, grad: torch.Tensor, channel: int, rows: Rows) -> None:
        """Take in an output gradient that fits; `rows` has the rows. On a device the first one of a step takes the
        place of those before it."""
        if isinstance(self.held, Row):
            values = rows.values(self.held)
            largest = channel_largest(grad, channel, into=values)
            if largest is not values:
                values.copy_(largest)
        else:
            self.held = channel_largest(grad, channel, into=self.held if self.present else None)
        self.present = True
