"""The precision that a program requests for each stage of training, and the dtypes seen there.

>>> asked(model)
[{'stage': 'compute', 'dtype': 'bfloat16', 'source': 'MixedPrecisionPolicy.param_dtype'}, …]

Stages: weights (what the optimizer updates), compute, outputs (of the model), gradients (as the optimizer receives
them), accumulation (Megatron's `main_grad`), reduction (between processes), optimizer state. Both go into the head of
the run, as `model["precision_asked"]` and `model["precision_seen"]`.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from amp_core.record.environment import stored_in
from amp_core.record.model import own
from amp_core.record.model.modules import tensors_in
from amp_core.record.model.parameters import is_deepspeed
from amp_core.record.observer import Observer
from amp_core.record.ranks import computed_in
from amp_core.record.stats.layout import dtype_name
from amp_core.store.writer import RunWriter

POLICY = {"param_dtype": "compute", "reduce_dtype": "reduction", "output_dtype": "outputs"}
"""Stage by field of FSDP2's `MixedPrecisionPolicy`, and of `MixedPrecision` of FSDP1 and DDP."""
HOOKS = {"fp16_compress": "float16", "bf16_compress": "bfloat16"}
"""Dtype of the reduction by a part of the name of DDP's communication hooks."""


def asked(model: torch.nn.Module) -> list[dict[str, str]]:
    """The precision settings of FSDP, DDP or DeepSpeed, read from their objects: stage, dtype and source of each
    setting."""
    requested = [*_of_policy(model), *_of_hooks(model), *_of_deepspeed(model)]
    return [{"stage": stage, "dtype": dtype, "source": source} for stage, dtype, source in requested]


def _of_policy(model: torch.nn.Module) -> Iterator[tuple[str, str, str]]:
    for module in own.modules(model):
        state: Any = getattr(type(module), "_get_fsdp_state", None)  # FSDP2; FSDP1 and DDP keep it on the module
        policy = state(module)._mp_policy if state is not None else own.held(module, "mixed_precision")
        if policy is not None:
            for field, stage in POLICY.items():
                dtype = getattr(policy, field, None)
                if isinstance(dtype, torch.dtype):
                    yield stage, dtype_name(dtype), f"{type(policy).__name__.lstrip('_')}.{field}"
            return  # the root's; inner modules mostly have the same


def _of_hooks(model: torch.nn.Module) -> Iterator[tuple[str, str, str]]:
    for hook, _ in own.held(model, "_comm_hooks") or ():
        name = getattr(hook, "__name__", type(hook).__name__)
        if name == "_reducer_allreduce_and_upcast_hook":  # DDP's own, for its `mixed_precision`
            continue
        dtype = next((dtype for part, dtype in HOOKS.items() if part in name), "as the hook decides")
        yield "reduction", dtype, f"DDP communication hook {name}"


def _of_deepspeed(model: torch.nn.Module) -> Iterator[tuple[str, str, str]]:
    """The engine's own answers: its JSON has defaults that depend on one another (deepspeed/runtime/engine.py)."""
    engine: Any = model
    if not is_deepspeed(model):
        return
    stage = f"ZeRO {engine.zero_optimization_stage()}"
    if engine.bfloat16_enabled() or engine.fp16_enabled():
        section, dtype = ("bf16", "bfloat16") if engine.bfloat16_enabled() else ("fp16", "float16")
        yield "compute", dtype, f"DeepSpeed `{section}`, {stage}"
        yield "accumulation", dtype_name(engine.get_data_types()[1]), "DeepSpeed `grad_accum_dtype`"
    if isinstance(engine.communication_data_type, torch.dtype):
        yield "reduction", dtype_name(engine.communication_data_type), f"DeepSpeed `communication_data_type`, {stage}"


class PrecisionSeen(Observer):
    """Reads the dtypes of the first step."""

    def __init__(self, writer: RunWriter, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._writer = writer
        self._model = model
        self._optimizers = optimizers
        self._seen: dict[str, str] = {}
        self._done = False

    def step_began(self, step: int) -> None:
        self.awake = not self._done

    def forward_ended(self, output: Any) -> None:
        self._note("outputs", (t for t in tensors_in(output) if t.is_floating_point()))

    def called(self, what: str, optimizer: int | None) -> None:
        if what in ("scaler.step", "optimizer.step"):
            parameters = [p for o in self._optimizers for group in o.param_groups for p in group["params"]]
            self._note("weights", parameters)
            self._note("gradients", (p.grad for p in parameters if p.grad is not None))
            main = (own.held(p, "main_grad") for p in parameters)
            self._note("accumulation", (g for g in main if isinstance(g, torch.Tensor)))

    def step_ended(self, step: int) -> None:
        states = (value for o in self._optimizers for state in o.state.values() for value in state.values())
        self._note("optimizer state", (v for v in states if isinstance(v, torch.Tensor) and v.dim()))
        cast = self._writer.head.config.get("autocast_dtype") or computed_in(self._model) or stored_in(self._model)
        seen = self._seen | ({"compute": str(cast)} if cast else {})
        self._writer.update_head(model=dict(self._writer.head.model) | {"precision_seen": seen})
        self._done = True

    def _note(self, stage: str, tensors: Iterable[torch.Tensor]) -> None:
        """The dtypes of these tensors, that of most elements first."""
        elements: Counter[str] = Counter()
        for tensor in tensors:
            elements[dtype_name(tensor.dtype)] += tensor.numel()
        if elements:
            self._seen[stage] = ", ".join(name for name, _ in elements.most_common())
