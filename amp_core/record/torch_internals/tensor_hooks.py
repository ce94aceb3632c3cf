"""Hooks on tensors as they pass, at most one for each purpose, however often the same tensor passes.

    hooks = TensorHooks()
    hooks.attach(tensor, "layer.1", told)       # told(grad), from backward
    hooks.detach_leaves()
    hooks.remove()

Most tensors that pass are gone with their step, and their hooks with them. A parameter that a forward returns stays,
as does a tensor that the program keeps: on these the hooks of all steps would add up.
"""

import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from amp_core.record.model.own import without_torch_function

FEWEST = 64
"""Hooks that are kept before those of tensors that are gone are looked for."""

Told = Callable[[torch.Tensor], None]


class _Hook:
    # torch.save warns of a tensor with hooks unless they say that they need not be saved.
    __torch_unserializable__ = True

    __slots__ = ("owner", "purpose", "told")

    def __init__(self, owner: "TensorHooks", purpose: Any, told: Told) -> None:
        self.owner = owner
        self.purpose = purpose
        self.told = told

    def __call__(self, grad: torch.Tensor) -> None:
        with without_torch_function():
            self.told(grad)


class TensorHooks:
    """The hooks of one listener.

    They stand where `Tensor.register_hook` puts its own. That makes a handle and a weak reference for each besides;
    in a sampled step, with a hook for each output, these alone would start Python's garbage collector several times.
    """

    def __init__(self) -> None:
        self._made: dict[Any, _Hook] = {}  # the last for each purpose, which is mostly the next one too
        self._leaves: list[Any] = []  # weak references to the tensors' tables of hooks
        self._others: list[Any] = []
        self._look_at = FEWEST

    def attach(self, tensor: torch.Tensor, purpose: Any, told: Told) -> None:
        """Call `told(grad)` when the gradient of `tensor` arrives, in the place of an earlier one for `purpose`."""
        hook = self._made.get(purpose)
        if hook is None or hook.told is not told:
            hook = self._made[purpose] = _Hook(self, purpose, told)
        table: Any = tensor._backward_hooks
        grad_fn = tensor.grad_fn
        if table is None:
            table = tensor._backward_hooks = OrderedDict()
            if grad_fn is not None:
                grad_fn._register_hook_dict(tensor)
        else:
            for key, other in table.items():
                if type(other) is _Hook and other.owner is self and other.purpose == purpose:
                    table[key] = hook
                    return
        table[hook] = hook
        if grad_fn is None:
            self._leaves.append(weakref.ref(table))
        else:
            self._others.append(weakref.ref(table))
            if len(self._others) >= self._look_at:
                self._others = [ref for ref in self._others if ref() is not None]
                self._look_at = max(FEWEST, 2 * len(self._others))

    def detach_leaves(self) -> None:
        """Remove the hooks from leaves, which may live longer than the step. Others may yet see their backward."""
        self._detach(self._leaves)
        self._leaves = []

    def remove(self) -> None:
        """Remove every hook."""
        self.detach_leaves()
        self._detach(self._others)
        self._others = []
        self._made = {}

    def _detach(self, tables: list[Any]) -> None:
        for ref in tables:
            table = ref()
            if table is not None:
                for key in [k for k, hook in table.items() if type(hook) is _Hook and hook.owner is self]:
                    del table[key]
