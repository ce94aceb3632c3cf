"""Measuring what modules put out and what comes back to it: the kinds `activation` and `output_grad`.

Modules are listened to only during a sampled step. A module's output tensors get tensor hooks of their own, so
in-place modules, reused modules, nested, dict and dataclass outputs all work, and nothing is kept alive: each tensor is
measured the moment it passes.

Watched are the modules that compute: those without children, and those with parameters of their own.

Of linear and convolutional layers the largest output gradient of each channel is kept for a moment too: see `channels`.
"""

from collections.abc import Callable
from typing import Any

import torch

from amp_core.record.model import own
from amp_core.record.model.modules import computes, tensors_in
from amp_core.record.model.parameters import named_modules, real_values
from amp_core.record.stats.channels import cap_for, channel_largest, channel_of
from amp_core.record.stats.layout import Cap, dtype_name, measurable
from amp_core.record.stats.measure import Key, key_of, measure_together
from amp_core.record.step_phases import Phases
from amp_core.record.torch_internals.compiling import untraced
from amp_core.record.torch_internals.module_calls import Switch
from amp_core.record.torch_internals.tensor_hooks import TensorHooks


class Outputs:
    """Listens to the modules of one model for a step, and leaves them alone after it."""

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
        self._switches = [
            Switch(m, self._listener(n, self._on_grad(n, m)))
            for n, m in named_modules(model)
            if n and computes(m) and wanted(n)
        ]
        self._on = False
        self._on_tensors = TensorHooks()
        self._keys: list[Key] = []  # of what was measured, and, in the same order, the packed measurements
        self._packed: list[torch.Tensor] = []
        self._channels: dict[type, tuple[int, int] | None] = {}
        self._largest: dict[int, tuple[torch.Tensor, int]] = {}  # and which dimension of the weight it goes with

    def attach(self) -> None:
        """Measure what passes from now on."""
        if self._kinds and not self._on:
            self._largest.clear()
            self._on = True
            for switch in self._switches:
                switch.on()

    def detach(self) -> None:
        """Leave the modules alone again."""
        if self._on:
            self._on = False
            for switch in self._switches:
                switch.off()
        self._on_tensors.detach_leaves()

    def remove(self) -> None:
        """Leave everything alone: tensors of earlier forwards too."""
        self.detach()
        self._on_tensors.remove()

    def take(self) -> tuple[list[Key], list[torch.Tensor]]:
        """Name, kind and dtype of all that passed since the last `take`, and its packed measurements."""
        keys, packed = self._keys, self._packed
        self._keys, self._packed = [], []
        return keys, packed

    def cap(self, weight: torch.Tensor, grad: torch.Tensor) -> Cap | None:
        """The largest output gradients of this step by channel, as a cap for `grad`, the gradient of `weight`.

        None where they were not seen or do not fit.
        """
        seen = self._largest.get(id(weight))
        return cap_for(grad, *seen) if seen is not None and grad.dim() == weight.dim() else None

    def _listener(self, name: str, on_grad: Callable[[torch.Tensor], None]) -> Callable[..., None]:
        def after_forward(module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if not torch.is_grad_enabled() or self._paused():
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
        @untraced
        def hook(grad: torch.Tensor) -> None:
            with self._phases.watching():
                if measurable(real_values(grad)):
                    self._measure(name, "output_grad", grad)
                    kind = type(module)
                    if kind not in self._channels:
                        self._channels[kind] = channel_of(module)
                    channels = self._channels[kind]
                    if channels is None or grad.is_complex():
                        return
                    # The gradient of a parametrized weight reaches its parameters through another map.
                    weight = own.parameter(module, "weight")
                    if weight is not None:
                        self._keep_largest(weight, grad, *channels)

        return hook

    def _keep_largest(self, weight: Any, grad: torch.Tensor, channel: int, row: int) -> None:
        """Dimension `channel` of an output gradient, counted from the end, is dimension `row` of its weight."""
        channel += grad.dim()
        # Of no values there is no largest, and FP8 has no arithmetic.
        if grad.dim() < 2 or not 0 <= channel < grad.dim() or not grad.numel() or grad.element_size() < 2:
            return
        largest = channel_largest(grad, channel)
        before = self._largest.get(id(weight))  # a layer used twice, or for several micro-batches
        self._largest[id(weight)] = (largest if before is None else torch.maximum(before[0], largest), row)

    def _measure(self, name: str, kind: str, tensor: torch.Tensor) -> None:
        values = real_values(tensor.detach() if tensor.requires_grad else tensor)
        self._packed.append(measure_together([values]))
        self._keys.append(key_of(name, kind, dtype_name(values.dtype)))
