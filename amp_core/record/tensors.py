"""What is measured tensor by tensor at a sampled step, and added to its attempt."""

from collections.abc import Callable, Iterator, Mapping

import torch

from amp_core.record.attempt import Attempt
from amp_core.record.channels import Cap
from amp_core.record.gradients import has_values, local_values
from amp_core.record.measure import dtype_name, measurable, measure_together
from amp_core.record.outputs import Outputs


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
        if "weight_grad" in self._kinds:
            self._measure(attempt, "weight_grad", gradients)
        if "weight" in self._kinds:
            self._measure(attempt, "weight", [(name, local_values(p)) for name, p in self._weights(optimizer)])
        passed: dict[torch.device, list[tuple[tuple[str, str, str], torch.Tensor]]] = {}
        for *key, packed in self._outputs.take():
            passed.setdefault(packed.device, []).append(((key[0], key[1], key[2]), packed))
        for here in passed.values():
            attempt.add_all([key for key, _ in here], torch.cat([packed for _, packed in here]))
        if alike and self._kinds >= {"weight_grad", "output_grad"}:
            self._sample_capped(attempt, optimizer)

    def _measure(self, attempt: Attempt, kind: str, tensors: list[tuple[str, torch.Tensor]]) -> None:
        chosen = [(name, tensor) for name, tensor in tensors if self._wanted(name) and measurable(tensor)]
        for named, packed in _together(chosen):
            attempt.add(kind, named, packed)

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


def _together(named: list[tuple[str, torch.Tensor]]) -> Iterator[tuple[list[tuple[str, str]], torch.Tensor]]:
    """Device by device: names and dtypes of the tensors there, and their packed vectors one after another."""
    for device in {tensor.device: None for _, tensor in named}:
        here = [(name, tensor) for name, tensor in named if tensor.device == device]
        yield [(name, dtype_name(t.dtype)) for name, t in here], measure_together([t for _, t in here])
