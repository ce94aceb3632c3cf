"""Hooks on tensors, at most one per purpose on each tensor, however often the same tensor occurs.

    hooks = TensorHooks()
    hooks.attach(tensor, "layer.1", on_grad)       # on_grad(grad), from backward, where there is a gradient
    hooks.detach_leaves()
    hooks.remove()

Most tensors, and their hooks, are freed with their step. A parameter that a forward returns stays alive, as does a
tensor that the program keeps: on these the hooks of all steps would accumulate.
"""

import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from amp_core.record.model.own import without_torch_function
from amp_core.record.step_phases import called, calling

MIN_TO_PRUNE = 64
"""Tables that are kept before those of freed tensors are removed."""

OnGrad = Callable[[torch.Tensor], None]


Table = OrderedDict[Any, Any]
"""The hooks of one tensor, as torch keeps them."""


class _Hook:
    # torch.save warns of a tensor with hooks unless they say that they need not be saved.
    __torch_unserializable__ = True

    __slots__ = ("on_grad", "owner", "purpose")

    def __init__(self, owner: "TensorHooks", purpose: Any, on_grad: OnGrad) -> None:
        self.owner = owner
        self.purpose = purpose
        self.on_grad = on_grad

    def __call__(self, grad: torch.Tensor | None) -> None:
        if grad is None:  # no path of the graph has one
            return
        begun = calling()
        with without_torch_function():
            self.on_grad(grad)
        called(begun)


class TensorHooks:
    """The hooks of one listener. With `direct`, autograd calls `on_grad` itself, which then has to count its time, and
    to have the attribute `__torch_unserializable__`; it may get None for a gradient.

    They are stored where `Tensor.register_hook` stores its own. That creates a table, a handle and a weak reference per
    tensor: in a sampled step, with a hook on each output, enough to trigger Python's garbage collector several times.
    Here a table is reused once its tensor is freed.
    """

    def __init__(self, *, direct: bool = False) -> None:
        self._direct = direct
        self._hooks: dict[Any, _Hook] = {}  # by purpose: the last one, which is mostly reused
        self._tables: dict[Any, Table] = {}  # by purpose: the last one created here
        self._leaves: list[Any] = []  # weak references to the tables of leaves
        self._others: list[Any] = []  # and to other tables that may still be in use
        self._prune_at = MIN_TO_PRUNE

    def attach(self, tensor: torch.Tensor, purpose: Any, on_grad: OnGrad) -> None:
        """Call `on_grad(grad)` when the gradient of `tensor` arrives, in place of an earlier one for `purpose`."""
        hook = self._hooks.get(purpose)
        if hook is None or hook.on_grad is not on_grad:
            hook = self._hooks[purpose] = _Hook(self, purpose, on_grad)
        table: Any = tensor._backward_hooks
        grad_fn = tensor.grad_fn
        if table is not None:
            for other in table:
                if type(other) is _Hook and other.owner is self and other.purpose == purpose:
                    table[other] = self._called(hook)
                    return
            table[hook] = self._called(hook)
            self._keep(table, grad_fn is None)
            return
        tensor._backward_hooks = table = self._table(hook)
        if grad_fn is not None:
            grad_fn._register_hook_dict(tensor)
        else:
            self._keep(table, True)

    def _table(self, hook: _Hook) -> Table:
        """A table with only this hook, which no tensor holds yet."""
        tables, purpose = self._tables, hook.purpose
        last = tables.get(purpose)
        if last is not None:
            if len(last) == 1 and sys.getrefcount(last) == _UNUSED:  # no hook of the program, and no tensor holds it
                if hook not in last:
                    last.clear()
                    last[hook] = self._called(hook)
                return last
            self._keep(last, False)
        new: Table = OrderedDict()
        new[hook] = self._called(hook)
        tables[purpose] = new
        return new

    def _called(self, hook: _Hook) -> OnGrad:
        return hook.on_grad if self._direct else hook

    def _keep(self, table: Table, of_leaf: bool) -> None:
        """Remember a table while its tensor is alive."""
        if of_leaf:
            self._leaves.append(weakref.ref(table))
            return
        self._others.append(weakref.ref(table))
        if len(self._others) >= self._prune_at:
            self._others = [ref for ref in self._others if ref() is not None]
            self._prune_at = max(MIN_TO_PRUNE, 2 * len(self._others))

    def detach_leaves(self) -> None:
        """Remove the hooks from leaves, which may live longer than the step. The backward of other tensors may still
        come."""
        self._detach(self._leaves)
        self._leaves = []

    def remove(self) -> None:
        """Remove every hook."""
        self.detach_leaves()
        self._detach([*self._others, *map(weakref.ref, self._tables.values())])
        self._others = []
        self._tables = {}
        self._hooks = {}

    def _detach(self, tables: list[Any]) -> None:
        for ref in tables:
            table = ref()
            if table is not None:
                for hook in [hook for hook in table if type(hook) is _Hook and hook.owner is self]:
                    del table[hook]


def _references_to_unused() -> int:
    """The reference count of an unused table in `TensorHooks._table`."""
    tables: dict[str, Table] = {"": OrderedDict()}
    last = tables.get("")
    return sys.getrefcount(last)


_UNUSED = _references_to_unused()
