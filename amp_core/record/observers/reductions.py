"""Notices the collectives by which processes reduce gradients.

>>> reductions = Reductions(model, lambda tensor, call: print(call, tensor.dtype))
>>> reductions.listen()  # when backward begins
>>> reductions.close()  # when the step has ended

Seen are those that Python calls: by the loop, by DDP's communication hooks, by FSDP2 and by DeepSpeed. DDP without a
hook reduces in C++, in the dtype of the gradients.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from amp_core.record.model import own
from amp_core.record.model.modules import is_compiled
from amp_core.record.model.parameters import in_backward, is_deepspeed
from amp_core.record.ranks import communication_hook
from amp_core.record.torch_internals import patched_functions


class Reductions:
    """Calls `notify` with each tensor of gradients that is reduced and with the collective's name, between `listen` and
    `close`."""

    def __init__(self, model: torch.nn.Module, notify: Callable[[torch.Tensor, str], None]) -> None:
        self._model = model
        self._notify = notify
        self._sizes: set[int] = set()  # of the parameters
        self._all = 0  # elements of all that are trained
        self._in_backward = False
        self._listening = False
        # A patched collective within a compiled graph would break the graph.
        self.possible = torch.distributed.is_available() and not is_compiled(model)
        """Whether a collective can still be noticed."""

    def listen(self) -> None:
        """Listen from now on, where processes are connected. A second call does nothing."""
        if not self.possible or self._listening or not torch.distributed.is_initialized():
            return
        self._listening = True
        # ZeRO-3 leaves parameters without elements between steps.
        self._sizes = {getattr(p, "ds_numel", p.numel()) for p in own.parameters(self._model)}
        self._all = sum(p.numel() for p in own.parameters(self._model) if p.requires_grad)
        # Within backward, a hook of DDP reduces gradients, but tensor parallelism activations.
        self._in_backward = communication_hook(self._model) is not None or is_deepspeed(self._model)
        for function, listener in self._listeners():
            function.listen(listener)

    def close(self) -> None:
        """Stop listening for good."""
        self.possible = False
        if self._listening:
            self._listening = False
            for function, listener in self._listeners():
                function.unlisten(listener)

    def _listeners(self) -> Iterator[tuple[patched_functions.Shared, patched_functions.Listener]]:
        yield patched_functions.reduced, self._on_reduce
        yield patched_functions.reduced_to_one, self._on_reduce
        yield patched_functions.reduce_scattered, self._on_reduce_scatter
        yield patched_functions.reduce_scattered_single, self._on_reduce_scatter

    def _on_reduce(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensor = args[0] if args else kwargs.get("tensor")
        if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
            return
        gradients = tensor.numel() in self._sizes or tensor.numel() > max(self._sizes, default=0)
        if gradients and (self._in_backward or not in_backward() or self._is_bucket(tensor)):
            self._notify(tensor, "all_reduce")

    def _is_bucket(self, tensor: torch.Tensor) -> bool:
        """Whether it may hold all gradients of the watched module, which a DDP around it reduces by a hook."""
        return tensor.dim() == 1 and tensor.numel() == self._all

    def _on_reduce_scatter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """FSDP2 pads its input, so sizes say nothing."""
        tensor = args[1] if len(args) > 1 else kwargs.get("input")
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
            self._notify(tensor, "reduce_scatter")
