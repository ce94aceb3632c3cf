"""The modules at which a loop enters the model: mostly the model itself; if that is never called, parts of it.

    entries = EntryPoints(model, began, ended)     # began(module, args, kwargs), ended(module, args, output)
    entries.narrow()                               # after the first step
    entries.remove()

A Lightning module's `training_step` calls its children; a GAN in a `ModuleDict` has no forward of its own. So in the
first step every module has hooks; only a call that no other module makes is an entry. Afterwards only the model keeps
them if the loop calls nothing else; otherwise the entries seen and the outermost modules do.
"""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from amp_core.record.model import own
from amp_core.record.model.modules import is_compiled
from amp_core.record.torch_internals.captures import transformed
from amp_core.record.torch_internals.module_calls import after_call, before_call


class EntryPoints:
    """Detects calls of a model and its modules from outside of the model."""

    def __init__(
        self,
        model: torch.nn.Module,
        began: Callable[[torch.nn.Module, Any, Any], None],
        ended: Callable[[torch.nn.Module, Any, Any], None],
    ) -> None:
        self._model = model
        self._began = began
        self._ended = ended
        self._depth = 0
        self._thread = threading.get_ident()
        self._entered: dict[int, torch.nn.Module] = {}
        self._handles: dict[int, list[Any]] = {}
        # Hooks do not run within a compiled graph.
        self._narrowed = is_compiled(model)
        for module in [model] if self._narrowed else own.modules(model):
            self._attach(module)

    def __len__(self) -> int:
        return sum(map(len, self._handles.values()))

    def narrow(self) -> None:
        """A step is over: detach from the modules that the loop does not enter."""
        if self._narrowed:
            return
        self._narrowed = True
        if self._entered.keys() == {id(self._model)}:
            stay = {id(self._model)}
        else:
            stay = {id(self._model), *self._entered, *map(id, outermost(self._model))}
        for key in self._handles.keys() - stay:
            self._detach(key)

    def remove(self) -> None:
        """Detach from all modules."""
        for key in list(self._handles):
            self._detach(key)

    def _attach(self, module: torch.nn.Module) -> None:
        self._handles[id(module)] = [
            before_call(module, self._before),
            after_call(module, self._after, always=True),
        ]

    def _detach(self, key: int) -> None:
        for handle in self._handles.pop(key):
            handle.remove()

    def _before(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if transformed() or threading.get_ident() != self._thread:
            return
        if module is self._model:
            self._depth = 0
        self._depth += 1
        if self._depth == 1:
            if torch.is_grad_enabled():  # an evaluation may enter elsewhere than training does
                self._entered[id(module)] = module
            self._began(module, args, kwargs)

    def _after(self, module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if transformed() or threading.get_ident() != self._thread:
            return
        self._depth = max(0, self._depth - 1)
        if self._depth == 0:
            self._ended(module, args, output)


def outermost(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The children of a model; containers are replaced by their children."""
    for child in own.children(model):
        if isinstance(child, torch.nn.ModuleList | torch.nn.ModuleDict):
            yield from outermost(child)
        else:
            yield child
