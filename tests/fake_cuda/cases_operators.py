"""The number of operators that the engine dispatches per step on CUDA, counted on fake tensors without memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim.optimizer import _foreach_supported_types
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from amp_core.settings.training import TrainConfig
from amp_core.train.engine.recipes import Precision
from amp_core.train.engine.training import make_optimizer, train_step
from amp_core.train.workloads import Workload, build

DEVICE = torch.device("cuda:0")
MAX_EXTRA = 0.02


class Counter(TorchDispatchMode):
    """Counts dispatched operators, except views and bookkeeping of the device."""

    operators = 0
    launches = 0
    """Of those, operators with a CUDA tensor as argument."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not op.is_view and op is not torch.ops.prim.device.default:
            self.operators += 1
            self.launches += any(isinstance(t, torch.Tensor) and t.is_cuda for t in tree_leaves((args, kwargs)))
        return op(*args, **(kwargs or {}))


@pytest.fixture
def made() -> Iterator[Any]:
    """`made(**settings)`: a workload on fake CUDA tensors, with its recipe, batch and configuration."""
    _foreach_supported_types.append(FakeTensor)

    def make(**settings: Any) -> tuple[TrainConfig, Precision, Workload, Any]:
        config = TrainConfig(workload="text-gpt", size="small", batch_size=2, device="cuda", **settings).resolved()
        with torch.device("meta"):
            workload = build(config)
        batch = next(iter(workload.batches))
        with mode:
            for module in workload.model.modules():
                for held in (module._parameters, module._buffers):
                    for key, tensor in held.items():
                        if tensor is not None:
                            fake = _empty(tensor)
                            held[key] = torch.nn.Parameter(fake) if key in module._parameters else fake
            return config, Precision(config, DEVICE), workload, tree_map(_empty, batch)

    mode = FakeTensorMode()
    yield make
    _foreach_supported_types.remove(FakeTensor)


def _empty(leaf: Any) -> Any:
    return torch.empty(leaf.shape, dtype=leaf.dtype, device=DEVICE) if isinstance(leaf, torch.Tensor) else leaf


@contextmanager
def counting(workload: Workload) -> Iterator[Counter]:
    """Counts operators within this context."""
    mode = next(workload.model.parameters()).fake_mode  # type: ignore[attr-defined]
    with mode, Counter() as counter:
        yield counter


def by_hand(config: TrainConfig, precision: Precision, workload: Workload, batch: Any) -> int:
    """Operators of a step of a plain loop, with a fused optimizer or with torch's default on CUDA."""
    optimizer = torch.optim.AdamW(workload.model.parameters(), lr=config.lr, fused=config.fused or None)
    make_state(optimizer, workload)
    with counting(workload) as counter:
        with precision.autocast():
            loss = workload.loss_fn(workload.model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return counter.operators


def by_engine(config: TrainConfig, precision: Precision, workload: Workload, batch: Any) -> int:
    """Operators of a step of the engine."""
    optimizer = make_optimizer(config, workload.model)
    unwatched: Any = SimpleNamespace(log=lambda **values: None)
    make_state(optimizer, workload)
    with counting(workload) as counter:
        train_step(config, precision, workload, workload.model, optimizer, iter([batch]), unwatched)
    return counter.operators


def make_state(optimizer: torch.optim.Optimizer, workload: Workload) -> None:
    """The optimizer's first step, which creates its state."""
    with counting(workload):
        for parameter in workload.model.parameters():
            parameter.grad = torch.empty(parameter.shape, device=DEVICE)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("recipe", "fused"),
    [
        ("fp32", False),
        ("bf16", True),
        pytest.param("fp32", True, marks=pytest.mark.whole),
        pytest.param("bf16", False, marks=pytest.mark.whole),
    ],
)
def test_a_step_of_the_engine_dispatches_what_a_loop_by_hand_does(recipe: str, fused: bool, made: Any) -> None:
    plain = by_hand(*made(precision=recipe, fused=fused))
    engine = by_engine(*made(precision=recipe, fused=fused))
    assert engine <= plain * (1 + MAX_EXTRA)


@pytest.mark.parametrize("optimizer", ["adamw", "adam", "sgd"])
def test_an_optimizer_that_is_not_fused_updates_all_tensors_together(optimizer: str, made: Any) -> None:
    config, _, workload, _ = made(optimizer=optimizer)
    built = make_optimizer(config, workload.model)
    tensors = list(workload.model.parameters())
    for _ in range(2):
        with counting(workload) as counter:
            for tensor in tensors:
                tensor.grad = torch.empty(tensor.shape, device=DEVICE)
            counter.launches = 0
            built.step()
    assert counter.launches < 20 < len(tensors)
