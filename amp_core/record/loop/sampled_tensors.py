"""What is measured tensor by tensor at a sampled step, and added to its attempt."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from amp_core.record.loop.attempt import Attempt
from amp_core.record.model.parameters import has_values, local_values
from amp_core.record.stats.layout import Cap, dtype_name, measurable
from amp_core.record.stats.measure import Key, key_of, measure_together
from amp_core.record.stats.module_outputs import Outputs

Found = dict[torch.device, tuple[list[Key], list[torch.Tensor]]]
"""By device what was measured there, and its packed vectors, in the same order."""


class Tensors:
    """Measures gradients and weights under their names, and collects what passed the hooks on module outputs."""

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
        """Measure the kinds asked for. `alike`: weight and output gradients are multiplied by the same factor."""
        found: Found = {}
        if "weight_grad" in self._kinds:
            self._measure("weight_grad", gradients, found)
        if "weight" in self._kinds:
            self._measure("weight", [(name, local_values(p)) for name, p in self._weights(optimizer)], found)
        for key, packed in zip(*self._outputs.take(), strict=True):
            _add(found, packed.device, (key,), packed)
        for keys, vectors in found.values():
            attempt.add_all(keys, torch.cat(vectors))
        if alike and self._kinds >= {"weight_grad", "output_grad"}:
            self._sample_capped(attempt, optimizer)

    def _measure(self, kind: str, tensors: list[tuple[str, torch.Tensor]], into: Found) -> None:
        chosen = [pair for pair in tensors if self._wanted(pair[0]) and measurable(pair[1])]
        for device in {tensor.device: None for _, tensor in chosen}:
            here = [pair for pair in chosen if pair[1].device == device]
            keys = [key_of(name, kind, dtype_name(tensor.dtype)) for name, tensor in here]
            _add(into, device, keys, measure_together([tensor for _, tensor in here]))

    def _sample_capped(self, attempt: Attempt, optimizer: torch.optim.Optimizer) -> None:
        """Measure weight gradients once more, capped by the output gradients of their channels; see `channels`."""
        found: dict[torch.device, list[tuple[str, torch.Tensor, Cap]]] = {}
        for name, weight in self._weights(optimizer):
            if weight.grad is not None and self._wanted(name):
                grad = local_values(weight.grad)
                cap = self._outputs.cap(weight, grad)
                if cap is not None:
                    found.setdefault(grad.device, []).append((name, grad, cap))
        for here in found.values():
            packed = measure_together([grad for _, grad, _ in here], [cap for _, _, cap in here])
            attempt.add_capped([(name, dtype_name(grad.dtype)) for name, grad, _ in here], packed)

    def _weights(self, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if id(parameter) in self._names and has_values(parameter):
                yield self._names[id(parameter)], parameter


def _add(to: Found, device: torch.device, keys: Sequence[Key], packed: torch.Tensor) -> None:
    here = to.get(device)
    if here is None:
        here = to[device] = [], []
    here[0].extend(keys)
    here[1].append(packed)
