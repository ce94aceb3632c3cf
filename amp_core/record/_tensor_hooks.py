"""Hooks on tensors as they pass, at most one for each purpose, however often the same tensor passes.

    hooks = TensorHooks()
    hooks.put_on(tensor, "layer.1", told)       # told(grad), from backward
    hooks.take_off_leaves()
    hooks.remove()

Most tensors that pass are gone with their step, and their hooks with them. A parameter that a forward returns stays,
as does a tensor that the program keeps: on these the hooks of all steps would add up.
"""

from collections.abc import Callable
from typing import Any

import torch

from amp_core.record._own import without_torch_function

FEWEST = 64
"""Handles that are kept before those of tensors that are gone are looked for."""


class _Hook:
    # torch.save warns of a tensor with hooks unless they say that they need not be saved.
    __torch_unserializable__ = True

    def __init__(self, owner: "TensorHooks", purpose: Any, told: Callable[[torch.Tensor], None]) -> None:
        self.owner = owner
        self.purpose = purpose
        self.told = told

    def __call__(self, grad: torch.Tensor) -> None:
        with without_torch_function():
            self.told(grad)


class TensorHooks:
    """The hooks of one listener."""

    def __init__(self) -> None:
        self._leaves: list[Any] = []
        self._others: list[Any] = []
        self._look_at = FEWEST

    def put_on(self, tensor: torch.Tensor, purpose: Any, told: Callable[[torch.Tensor], None]) -> None:
        """Call `told(grad)` when the gradient of `tensor` arrives, in the place of an earlier one for `purpose`."""
        for hook in (tensor._backward_hooks or {}).values():
            if type(hook) is _Hook and hook.owner is self and hook.purpose == purpose:
                hook.told = told
                return
        handle = tensor.register_hook(_Hook(self, purpose, told))
        if tensor.grad_fn is None:
            self._leaves.append(handle)
        else:
            self._others.append(handle)
            if len(self._others) >= self._look_at:
                self._others = [h for h in self._others if h.hooks_dict_ref() is not None]
                self._look_at = max(FEWEST, 2 * len(self._others))

    def take_off_leaves(self) -> None:
        """Remove the hooks from leaves, which may live longer than the step. Others may yet see their backward."""
        for handle in self._leaves:
            handle.remove()
        self._leaves = []

    def remove(self) -> None:
        """Remove every hook."""
        self.take_off_leaves()
        for handle in self._others:
            handle.remove()
        self._others = []
