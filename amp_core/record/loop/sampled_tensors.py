"""Tensor statistics of a sampled step, added to its attempt."""

from collections.abc import Callable, Iterator, Mapping

import torch

from amp_core.record.loop.attempt import Attempt
from amp_core.record.model.parameters import has_values, local_values
from amp_core.record.stats.layout import dtype_name, key_of, measurable, packed_length
from amp_core.record.stats.measure import measure_together
from amp_core.record.stats.module_outputs import Outputs


class Tensors:
    """Measures gradients and weights by name, and collects the statistics of module outputs."""

    def __init__(
        self, names: Mapping[int, str], kinds: frozenset[str], wanted: Callable[[str], bool], outputs: Outputs
    ) -> None:
        self._names = names
        self._kinds = kinds
        self._wanted = wanted
        self._outputs = outputs

    def sample(
        self,
        attempt: Attempt,
        optimizer: torch.optim.Optimizer,
        gradients: list[tuple[str, torch.Tensor]],
        *,
        alike: bool,
    ) -> None:
        """Measure the requested kinds. `alike`: weight and output gradients are multiplied by the same factor, so that
        the latter cap the former; see `channels`."""
        if "weight_grad" in self._kinds:
            self._measure("weight_grad", gradients, attempt, capped=alike and "output_grad" in self._kinds)
        if "weight" in self._kinds:
            self._measure("weight", [(name, local_values(p)) for name, p in self._weights(optimizer)], attempt)
        for keys, vectors in self._outputs.take():
            attempt.add_all(keys, vectors[0] if len(vectors) == 1 else torch.cat(vectors))

    def _measure(
        self, kind: str, tensors: list[tuple[str, torch.Tensor]], attempt: Attempt, *, capped: bool = False
    ) -> None:
        by_device: dict[torch.device, list[tuple[str, torch.Tensor]]] = {}
        for name, tensor in tensors:
            if self._wanted(name) and measurable(tensor):
                by_device.setdefault(tensor.device, []).append((name, tensor))
        for here in by_device.values():
            named = [(name, dtype_name(tensor.dtype)) for name, tensor in here]
            if capped:
                packed, caps = self._outputs.measure_weights(here, self._names)
                limited = [one for one, cap in zip(named, caps, strict=True) if cap is not None]
                if limited:
                    length = sum(packed_length(dtype) for _, dtype in named)
                    packed, behind = packed[:length], packed[length:]
                    attempt.add_capped(limited, behind)
            else:
                packed = measure_together([tensor for _, tensor in here])
            attempt.add_all([key_of(name, kind, dtype) for name, dtype in named], packed)

    def _weights(self, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if id(parameter) in self._names and has_values(parameter):
                yield self._names[id(parameter)], parameter
