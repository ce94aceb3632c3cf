"""The parameters of an optimizer and their names, as a list that is built once and not at every step.

    >>> plan = ParameterPlan(optimizer, names, "optimizer0")
    >>> plan.gradients()
    (['0.weight', '0.bias'], [tensor(...), tensor(...)])

A loop may add parameter groups, replace parameters or reorder groups at any time. So the list is compared with the
groups at every use, parameter by parameter, which takes some tens of nanoseconds per parameter.
"""

from collections.abc import Mapping
from itertools import repeat
from operator import attrgetter, is_

import torch

_grad = attrgetter("grad")


class ParameterPlan:
    """The plan of one optimizer. `names` maps the `id` of the model's parameters to their names; a parameter that is
    not the model's is called `<prefix>.group<group>.<index>`."""

    def __init__(self, optimizer: torch.optim.Optimizer, names: Mapping[int, str], prefix: str) -> None:
        self._optimizer = optimizer
        self._model_names = names
        self._prefix = prefix
        self._parameters: list[torch.Tensor] = []
        self._names: list[str] = []

    def gradients(self) -> tuple[list[str], list[torch.Tensor]]:
        """Names and tensors of the current gradients, in the order of the groups, as backward left them. The caller
        must not modify the lists."""
        self._update()
        grads = list(map(_grad, self._parameters))
        if not any(map(is_, grads, repeat(None))):
            return self._names, grads
        names = [name for name, g in zip(self._names, grads, strict=True) if g is not None]
        return names, [g for g in grads if g is not None]

    def _update(self) -> None:
        given = [p for group in self._optimizer.param_groups for p in group["params"]]
        if len(given) == len(self._parameters) and all(map(is_, given, self._parameters)):
            return
        self._parameters = given
        places = [(g, i) for g, group in enumerate(self._optimizer.param_groups) for i in range(len(group["params"]))]
        self._names = [
            self._model_names.get(id(p)) or f"{self._prefix}.group{g}.{i}"
            for p, (g, i) in zip(given, places, strict=True)
        ]
