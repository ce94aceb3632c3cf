"""The dtypes seen in each stage of training, beside what the program requests (`precision_asked`).

Stages: weights (what the optimizer updates), compute, outputs (of the model), accumulation (where micro-batches are
summed: `.grad`, Megatron's `main_grad`, DeepSpeed's buffers), gradients (as the optimizer receives them), reduction
(between processes), optimizer state. Both go into the head of the run, as `model["precision_asked"]` and
`model["precision_seen"]`.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from amp_core.record.environment import stored_in
from amp_core.record.model import own
from amp_core.record.model.modules import tensors_in
from amp_core.record.model.parameters import is_deepspeed, optimizer_tensors
from amp_core.record.observer import Observer
from amp_core.record.observers.reductions import Reductions
from amp_core.record.ranks import communication_hook, computed_in
from amp_core.record.stats.layout import dtype_name
from amp_core.store.writer import RunWriter


class PrecisionSeen(Observer):
    """Reads the dtypes of the first step."""

    def __init__(self, writer: RunWriter, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._writer = writer
        self._model = model
        self._optimizers = optimizers
        self._seen: dict[str, str] = {}
        self._done = False

        self._reduced: Counter[str] = Counter()
        self._reductions = Reductions(model, self._on_reduce)

    def step_began(self, step: int) -> None:
        self.awake = not self._done

    def forward_ended(self, output: Any) -> None:
        self._note("outputs", (t for t in tensors_in(output) if t.is_floating_point()))

    def backward_began(self) -> None:
        self._reductions.listen()
        # Accumulated gradients exist before the backward that adds to them.
        self._note("accumulation", (p.grad for p in own.parameters(self._model) if p.grad is not None))

    def backward_ended(self) -> None:
        self._note("accumulation", _buffers(self._model))

    def called(self, what: str, optimizer: int | None) -> None:
        if what in ("scaler.step", "optimizer.step"):
            parameters = [p for o in self._optimizers for group in o.param_groups for p in group["params"]]
            self._note("weights", parameters)
            self._note("gradients", (p.grad for p in parameters if p.grad is not None))
            trained = {id(p): p for p in (*parameters, *own.parameters(self._model))}.values()
            main = (own.held(p, "main_grad") for p in trained)
            self._note("accumulation", (g for g in main if isinstance(g, torch.Tensor)))
            if isinstance(self._model, DistributedDataParallel) and communication_hook(self._model) is None:
                self._note("reduction", (p.grad for p in own.parameters(self._model) if p.grad is not None))

    def step_ended(self, step: int) -> None:
        self._reductions.close()
        if self._reduced:
            self._seen["reduction"] = _most_first(self._reduced)
        self._note("optimizer state", (v for v in optimizer_tensors(self._optimizers) if v.dim()))
        cast = self._writer.head.config.get("autocast_dtype") or computed_in(self._model) or stored_in(self._model)
        seen = self._seen | ({"compute": str(cast)} if cast else {})
        self._writer.update_head(model=dict(self._writer.head.model) | {"precision_seen": seen})
        self._done = True

    def close(self) -> None:
        self._reductions.close()

    def _on_reduce(self, tensor: torch.Tensor, call: str) -> None:
        self._reduced[dtype_name(tensor.dtype)] += tensor.numel()

    def _note(self, stage: str, tensors: Iterable[torch.Tensor]) -> None:
        """The dtypes of these tensors, that of most elements first."""
        elements: Counter[str] = Counter()
        for tensor in tensors:
            elements[dtype_name(tensor.dtype)] += tensor.numel()
        if elements:
            self._seen[stage] = _most_first(elements)


def _most_first(elements: Counter[str]) -> str:
    return ", ".join(name for name, _ in elements.most_common())


def _buffers(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """The tensors in which DeepSpeed sums gradients of micro-batches."""
    if not is_deepspeed(model):
        return
    optimizer = own.held(model, "optimizer")
    of_zero = (own.held(optimizer, name) for name in ("averaged_gradients", "all_grad_tensors"))
    groups = [group for held in of_zero if isinstance(held, dict) for group in held.values()]
    groups.append(own.held(optimizer, "fp32_groups_gradients_flat"))  # of `BF16_Optimizer`
    yield from (t for group in groups if isinstance(group, list) for t in group if isinstance(t, torch.Tensor))
