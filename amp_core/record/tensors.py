"""What is measured tensor by tensor at a sampled step, and added to its attempt."""

from collections.abc import Callable, Iterator, Mapping

import torch

from amp_core.record.attempt import Attempt
from amp_core.record.gradients import local_values
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
            weights = [p for group in optimizer.param_groups for p in group["params"]]
            self._measure(
                attempt, "weight", [(self._names[id(p)], local_values(p)) for p in weights if id(p) in self._names]
            )
        for name, kind, dtype, packed in self._outputs.take():
            attempt.add(kind, [(name, dtype)], packed)
        if alike and self._kinds >= {"weight_grad", "output_grad"}:
            self._sample_capped(attempt, optimizer)

    def _measure(self, attempt: Attempt, kind: str, tensors: list[tuple[str, torch.Tensor]]) -> None:
        chosen = [(name, tensor) for name, tensor in tensors if self._wanted(name) and measurable(tensor)]
        for named, packed in _together(chosen):
            attempt.add(kind, named, packed)

    def _sample_capped(self, attempt: Attempt, optimizer: torch.optim.Optimizer) -> None:
        """Measure weight gradients once more, capped by the output gradients of their channels; see `outputs`."""
        found: list[tuple[str, torch.Tensor]] = []
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            capped = self._outputs.capped(parameter)
            name = self._names.get(id(parameter))
            if capped is not None and name is not None and self._wanted(name):
                found.append((name, capped))
        for named, packed in _together(found):
            attempt.add_capped(named, packed)


def _together(named: list[tuple[str, torch.Tensor]]) -> Iterator[tuple[list[tuple[str, str]], torch.Tensor]]:
    """Device by device: names and dtypes of the tensors there, and their packed vectors one after another."""
    for device in {tensor.device: None for _, tensor in named}:
        here = [(name, tensor) for name, tensor in named if tensor.device == device]
        yield [(name, dtype_name(t.dtype)) for name, t in here], measure_together([t for _, t in here])
