"""Detects inputs that a loop moves along their scaled gradients, as adversarial training does, without dividing them.

    g, = torch.autograd.grad(scaler.scale(loss), x)
    loss = loss_fn(model(x + 0.1 * g), y)     # as far as the loss scale is large: divide g by scaler.get_scale()

What the model is given after such a gradient is compared with what the gradient belongs to. A step along the sign or a
norm of the gradient is right at any scale.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from amp_core.record.model.parameters import unwrapped
from amp_core.record.observer import Observer
from amp_core.record.observers.signals.backward import is_scaled
from amp_core.record.stats.host_transfer import HostTransfer
from amp_core.record.torch_internals import patched_functions
from amp_core.record.torch_internals.module_calls import Handle, before_call
from amp_core.store.writer import RunWriter

MAX_GRADIENTS = 8
"""Gradients of inputs that are followed: in the first steps of a scaler they may overflow."""
MAX_ELEMENTS = 2**22
MIN_COSINE = 0.999
"""Of a step and the gradient: a multiple of it, and not its sign, which has 0.8 with normally distributed gradients."""
MIN_MOVE_RATIO = 1.0
"""Size of such a step over that of the input, in the Euclidean norm: no attack or saliency map replaces the input."""


class InputSteps(Observer):
    """Follows the first gradients of scaled losses with respect to tensors that are no parameters."""

    def __init__(self, writer: RunWriter, model: torch.nn.Module, scale_calls: Callable[[], int]) -> None:
        self._writer = writer
        self._model = unwrapped(model)
        self._scale_calls = scale_calls  # how often the loop has called get_scale
        self._calls_before = 0
        self._left = MAX_GRADIENTS
        self._given: tuple[torch.Tensor, torch.Tensor] | None = None  # a tensor and its scaled gradient
        self._handle: Handle | None = None
        self._sent: list[tuple[int, HostTransfer]] = []
        self._step = 0
        self._reported = False
        patched_functions.grad.listen_after(self._after_grad)

    def step_began(self, step: int) -> None:
        self._step = step
        self._read(wait=False)

    def step_ended(self, step: int) -> None:
        self._forget()
        self._step = step + 1

    def close(self) -> None:
        patched_functions.grad.unlisten(self._after_grad)
        self._forget()
        self._read(wait=True)

    def _after_grad(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if self._left == 0 or self.at_own_work():
            return
        if not any(is_scaled(t) for t in tree_leaves(kwargs.get("outputs", args[:1])) if isinstance(t, torch.Tensor)):
            return
        inputs = tree_leaves(kwargs.get("inputs", args[1:2]))
        for tensor, gradient in zip(inputs, tree_leaves(result), strict=False):
            if _is_input(tensor) and _is_input(gradient) and tensor.shape == gradient.shape:
                self._forget()
                self._left -= 1
                self._given, self._calls_before = (tensor.detach(), gradient.detach()), self._scale_calls()
                self._handle = before_call(self._model, self._on_forward)
                return

    def _on_forward(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        given, divided = self._given, self._scale_calls() != self._calls_before
        self._forget()
        if given is None or divided or self.at_own_work():
            return
        tensor, gradient = given
        for moved in tree_leaves((args, kwargs)):
            if _is_input(moved) and moved.shape == tensor.shape and moved.device == tensor.device:
                with self.watching(), torch.no_grad():
                    move = (moved.detach() - tensor).flatten().float()
                    along = torch.dot(move, gradient.flatten().float())
                    norms = [torch.linalg.vector_norm(t.float()) for t in (move, gradient, tensor)]
                    transfer = HostTransfer()
                    transfer.put("move", torch.stack([along, *norms]))
                    transfer.send()
                self._sent.append((self._step, transfer))
                return

    def _forget(self) -> None:
        if self._handle is not None:
            self._handle.remove()
        self._given, self._handle = None, None

    def _read(self, *, wait: bool) -> None:
        while self._sent and self._sent[0][1].ready(wait):
            step, transfer = self._sent.pop(0)
            along, move, gradient, size = transfer.values("move").tolist()
            is_step = np.isfinite([along, move, gradient]).all() and abs(along) >= MIN_COSINE * move * gradient > 0
            if is_step and move >= MIN_MOVE_RATIO * size and not self._reported:
                self._reported = True
                self._writer.event("input step", step=step, value=move / size if size else None, limit=MIN_MOVE_RATIO)


def _is_input(value: Any) -> bool:
    return type(value) is torch.Tensor and value.is_floating_point() and 0 < value.numel() <= MAX_ELEMENTS
