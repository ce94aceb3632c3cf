"""Measures module outputs and their gradients: the kinds `activation` and `output_grad`.

Modules have hooks only during a sampled step. Each output tensor gets its own tensor hook, so in-place modules, reused
modules, and nested, dict and dataclass outputs all work. Each tensor is measured as it passes, and none is kept alive,
except output gradients on a GPU: they are measured together, and at most 64 MiB of them are held; see `held_outputs`.

Measured modules are those that compute: without children, or with parameters of their own.

For linear and convolutional layers, the largest output gradient of each channel is kept until the weight gradients are
measured: see `channels`.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from amp_core.record.model import own
from amp_core.record.model.modules import computes, tensors_in
from amp_core.record.model.parameters import named_modules, real_values
from amp_core.record.stats.channels import ChannelLargest, Row, Rows, cap_for, channel_of
from amp_core.record.stats.held_outputs import HeldOutputs, LayerChannel
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
        self._largest: dict[int, ChannelLargest] = {}  # by the weight's id
        self._rows = Rows()
        self._held: dict[torch.device, HeldOutputs] = {}

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
            caps = self._caps(names)
            return [caps[name](grad) if name in caps else None for name, grad in named]

        held = self._held.get(grads[0].device)
        if held is not None:
            return held.measure_with(grads, caps_of)
        caps = caps_of()
        return measure_together(grads, caps), caps

    def _caps(self, names: Mapping[int, str]) -> dict[str, Callable[[torch.Tensor], Cap | None]]:
        """By the name of the weight: what gives the cap for its gradient."""
        values = self._rows.all_values()
        present = ((names[i], one) for i, one in self._largest.items() if one.present and i in names)
        return {
            name: partial(
                cap_for,
                largest=values[one.held.dtype][one.held.index] if isinstance(one.held, Row) else one.held,
                row=one.row,
                dims=one.dims,
                dtype=one.dtype,
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
                if measurable(real_values(grad)) and not self._hold(name, module, grad, channels):
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

    def _hold(self, name: str, module: torch.nn.Module, grad: torch.Tensor, channels: tuple[int, int] | None) -> bool:
        """Measure an output gradient together with others. False where it has to be measured now."""
        if grad.is_cpu or grad.is_complex():
            return False
        held = self._held.get(grad.device)
        if held is None:
            held = self._held[grad.device] = HeldOutputs(grad.device, self._largest)
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
            known = self._largest[id(weight)] = ChannelLargest(held, channels[1], weight.dim(), grad.dtype)
        return known

    def _forget_largest(self) -> None:
        """Those of an earlier step, but for the memory of those that may come again."""
        if all(largest.present for largest in self._largest.values()):
            self._rows.clear()
        else:  # shapes change, or not every layer is used
            self._largest.clear()  # `HeldOutputs` holds it too
            self._rows = Rows()
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
