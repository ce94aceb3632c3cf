"""Trace a step on fake tensors: operators, shapes and memory of a workload of any size, without computing it.

    >>> wide, narrow = trace_workload(TrainConfig(workload="text-bert", size="large"))
    >>> wide.work["flops"].sum() / 1e12
    9.6

Fake tensors have shapes and dtypes but no memory, so a step that would fill a GPU is traced in seconds on a laptop. The
model's real weights exist for a moment, which takes the memory of its parameters. The trace is that of a
CPU (autograd cannot follow fake CUDA tensors where torch has no CUDA); `amp_core.forecast` reads it as CUDA's.
"""

import math
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pandas as pd
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from amp_core.forecast import StepMemory, StepTrace
from amp_core.forecast.traced_work import device_work
from amp_core.record.backends import BACKENDS
from amp_core.record.op_trace.op_counter import OpCounter, OpCounterMode
from amp_core.schema import RunError
from amp_core.settings.training import TrainConfig
from amp_core.train.engine.training import make_optimizer
from amp_core.train.tensor_peak import PeakBytes
from amp_core.train.workloads import Workload, build


def trace_workload(config: TrainConfig) -> tuple[StepTrace, StepTrace]:
    """One micro-batch's step of the workload in FP32 and under BF16 autocast, which has FP16's shapes and bytes.

    AMPscope's own workloads are taken as channels last under autocast, a user's as they are.

    Raises `RunError` for a workload that cannot be built, or whose step reads values, which fake tensors do not have.
    """
    config = config.resolved()
    workload = build(config)
    batch = next(iter(workload.batches), None)
    if batch is None:
        raise RunError(f"workload={config.workload!r} has no batch; give at least one")
    name = " ".join(str(part) for part in (config.workload, config.size) if part)
    try:
        wide, narrow = (
            traced(replace(config, channels_last=amp or config.channels_last), workload, batch, name, amp)
            if config.own is None
            else traced(config, workload, batch, name, amp)
            for amp in (False, True)
        )
    except Exception as error:  # a workload of the user may raise anything
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
        raise RunError(
            f"workload={config.workload!r} cannot be traced on fake tensors ({why}); record a run with --trace-ops and "
            "forecast from that"
        ) from error
    return wide, narrow


def traced(config: TrainConfig, workload: Workload, batch: Any, name: str, amp: bool) -> StepTrace:
    """One step of `workload` on `batch`, under BF16 autocast if `amp`; see `trace_workload`."""
    model = workload.model
    with FakeTensorMode(allow_non_fake_inputs=True):
        _make_fake(model)
        fake = tree_map(_like, batch)
        optimizer = make_optimizer(config, model)
        counter = OpCounter(model, tuple(BACKENDS))
        saved = _SavedTensors(model)
        region = torch.autocast("cpu", dtype=torch.bfloat16) if amp else nullcontext()
        counter.attach()
        try:
            model.train()
            with OpCounterMode(counter):
                with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor), region:
                    loss = workload.loss_fn(model, fake)
                loss.backward()
            optimizer.step()  # makes its state, which later steps have
            counter.phase = "optimizer"
            with OpCounterMode(counter):
                optimizer.step()
        finally:
            counter.detach()
        if counter.error is not None:
            raise RuntimeError(f"counting stopped: {counter.error}")
        rows = pd.DataFrame(counter.rows())
        parameters = sum(_bytes(p) for p in model.parameters())
        state = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
        memory = StepMemory(
            parameters=parameters,
            gradients=sum(_bytes(p.grad) for p in model.parameters() if p.grad is not None),
            optimizer=sum(_bytes(t) for t in state),
            activations=saved.bytes_of(saved.others),
            weight_copies=saved.bytes_of(saved.copies),
        )

        def peak_of(given: Any) -> float:
            _forget_gradients(model)
            with PeakBytes([*model.parameters(), *model.buffers(), *state, *_tensors(given)]) as peak:
                with torch.autocast("cpu", dtype=torch.bfloat16) if amp else nullcontext():
                    loss = workload.loss_fn(model, given)
                loss.backward()
                optimizer.step()
            _forget_gradients(model)
            return float(peak.most)

        peak = peak_of(fake)
        memory = replace(memory, peak=peak)
        samples = workload.samples(batch)
        if samples:
            try:
                more = peak_of(tree_map(partial(_like, doubled=samples), fake))
            except Exception as error:  # of the user's model or loss, which may take batches of this size alone
                memory = replace(memory, refused=f"{type(error).__name__}: {error}")
            else:
                memory = replace(memory, peak_per_sample=(more - peak) / samples)
    work = device_work(rows, config.channels_last or _channels_last(model))
    return StepTrace(name, "amp" if amp else "fp32", False, samples, work, memory)


def _forget_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _channels_last(model: nn.Module) -> bool:
    """Whether the model's convolutions have their channels last."""
    weights = [p for p in model.parameters() if p.dim() == 4 and min(p.shape[1:3]) > 1]
    return any(w.is_contiguous(memory_format=torch.channels_last) and not w.is_contiguous() for w in weights)


class _SavedTensors:
    """Storages that autograd saves for backward, each once: without parameters, and 16-bit copies of those apart."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = {p.untyped_storage()._cdata for p in model.parameters()}
        self._shapes = {tuple(p.shape) for p in model.parameters()} | {
            tuple(reversed(p.shape)) for p in model.parameters()
        }
        self.others: dict[int, torch.UntypedStorage] = {}
        self.copies: dict[int, torch.UntypedStorage] = {}

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Record the storage of a tensor, and return the tensor unchanged."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._parameters:
            copy = tensor.dtype == torch.bfloat16 and tensor.dim() > 1 and tuple(tensor.shape) in self._shapes
            (self.copies if copy else self.others)[storage._cdata] = storage
        return tensor

    @staticmethod
    def bytes_of(storages: dict[int, torch.UntypedStorage]) -> float:
        """Total size of the storages in bytes."""
        return float(sum(s.nbytes() for s in storages.values()))


def _make_fake(model: nn.Module) -> None:
    """Replace each parameter and buffer by a fake tensor; shared ones stay shared."""
    made: dict[int, Any] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for key, tensor in held.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    fake = _like(tensor)
                    trains = isinstance(tensor, nn.Parameter)
                    made[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if trains else fake
                held[key] = made[id(tensor)]


def _like(leaf: Any, doubled: int | None = None) -> Any:
    """An empty tensor of the same shape, strides and dtype; any other value unchanged.

    A tensor with `doubled` rows gets twice as many, without the strides.
    """
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if doubled is not None and leaf.dim() and leaf.shape[0] == doubled:
        return torch.empty(2 * doubled, *leaf.shape[1:], dtype=leaf.dtype)
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype)


def _bytes(tensor: torch.Tensor) -> int:
    return math.prod(tensor.shape) * tensor.element_size()
