"""The precision that a program requests for each stage of training, read from the objects that hold the settings.

>>> asked(model, [optimizer])
[{'stage': 'compute', 'dtype': 'bfloat16', 'source': 'MixedPrecisionPolicy.param_dtype'}, …]

No framework is imported here: their objects are recognized by their attributes. What Lightning, Fabric,
Transformers and `Accelerator(mixed_precision=…)` were told stands in `config`.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from amp_core.record.model import own
from amp_core.record.model.parameters import is_deepspeed
from amp_core.record.ranks import communication_hook
from amp_core.record.stats.layout import dtype_name

POLICY = {"param_dtype": "compute", "reduce_dtype": "reduction", "output_dtype": "outputs"}
"""Stage by field of FSDP2's `MixedPrecisionPolicy`, and of `MixedPrecision` of FSDP1 and DDP."""
HOOKS = {"fp16_compress": "float16", "bf16_compress": "bfloat16"}
"""Dtype of the reduction by a part of the name of DDP's communication hooks."""
MEGATRON = {"main_params_dtype": "weights", "main_grads_dtype": "accumulation", "exp_avg_sq_dtype": "optimizer state"}
"""Stage by field of Megatron's `OptimizerConfig`, which applies with its precision-aware optimizer alone."""

_Setting = tuple[str, str, str]


def asked(model: torch.nn.Module, optimizers: Iterable[Any] = ()) -> list[dict[str, str]]:
    """The settings of FSDP, DDP, DeepSpeed, Megatron and Accelerate's plugin: stage, dtype and source of each.

    `optimizers` are those of the program, with their frameworks' wrappers.
    """
    given = list(optimizers)
    requested = [
        *_of_policy(model),
        *_of_hooks(model),
        *_of_deepspeed(model),
        *_of_megatron(model, given),
        *_of_accelerate(given),
    ]
    return [{"stage": stage, "dtype": dtype, "source": source} for stage, dtype, source in requested]


def _of_policy(model: torch.nn.Module) -> Iterator[_Setting]:
    for module in own.modules(model):
        state: Any = getattr(type(module), "_get_fsdp_state", None)  # FSDP2; FSDP1 and DDP keep it on the module
        policy = state(module)._mp_policy if state is not None else own.held(module, "mixed_precision")
        if policy is not None:
            yield from _fields(policy, type(policy).__name__.lstrip("_"))
            return  # the root's; inner modules mostly have the same


def _fields(policy: Any, source: str) -> Iterator[_Setting]:
    for field, stage in POLICY.items():
        dtype = getattr(policy, field, None)
        if isinstance(dtype, torch.dtype):
            yield stage, dtype_name(dtype), f"{source}.{field}"


def _of_hooks(model: torch.nn.Module) -> Iterator[_Setting]:
    if (name := communication_hook(model)) is not None:
        dtype = next((dtype for part, dtype in HOOKS.items() if part in name.lower()), "as the hook decides")
        yield "reduction", dtype, f"DDP communication hook {name}"


def _of_deepspeed(model: torch.nn.Module) -> Iterator[_Setting]:
    """The engine's own answers: its JSON has defaults that depend on one another (deepspeed/runtime/engine.py)."""
    engine: Any = model
    if not is_deepspeed(model):
        return
    stage = f"ZeRO {engine.zero_optimization_stage()}"
    if engine.bfloat16_enabled() or engine.fp16_enabled():
        section, dtype = ("bf16", "bfloat16") if engine.bfloat16_enabled() else ("fp16", "float16")
        yield "compute", dtype, f"DeepSpeed `{section}`, {stage}"
        yield "accumulation", dtype_name(engine.get_data_types()[1]), "DeepSpeed `grad_accum_dtype`"
    elif getattr(engine, "torch_autocast_enabled", bool)():  # since DeepSpeed 0.17
        yield "compute", dtype_name(engine.torch_autocast_dtype()), f"DeepSpeed `torch_autocast`, {stage}"
        if getattr(own.held(engine, "_config"), "communication_data_type", None) is None:
            return  # the default is not that of these collectives, which each parameter decides
    if isinstance(engine.communication_data_type, torch.dtype):
        yield "reduction", dtype_name(engine.communication_data_type), f"DeepSpeed `communication_data_type`, {stage}"


def _of_megatron(model: torch.nn.Module, optimizers: Iterable[Any]) -> Iterator[_Setting]:
    config = next((c for m in own.modules(model) if (c := own.held(m, "ddp_config")) is not None), None)
    wide = getattr(config, "grad_reduce_in_fp32", None)
    if isinstance(wide, bool):
        weights = next((p.dtype for p in own.parameters(model) if p.requires_grad), torch.float32)
        for stage in ("accumulation", "reduction"):  # one buffer serves both
            yield stage, dtype_name(torch.float32 if wide else weights), f"Megatron `grad_reduce_in_fp32={wide}`"
    settings = next((c for o in optimizers if (c := own.held(o, "config")) is not None), None)
    if getattr(settings, "use_precision_aware_optimizer", False):
        for field, stage in MEGATRON.items():
            if isinstance(dtype := getattr(settings, field, None), torch.dtype):
                yield stage, dtype_name(dtype), f"Megatron `{field}`"


def _of_accelerate(optimizers: Iterable[Any]) -> Iterator[_Setting]:
    """What the plugin for FSDP asks of each stage. What it did is read from the model: on a CPU without several
    processes, Accelerate leaves the model unsharded."""
    for optimizer in optimizers:
        plugin = getattr(own.held(optimizer, "accelerator_state"), "fsdp_plugin", None)
        if (policy := getattr(plugin, "mixed_precision_policy", None)) is not None:
            yield from _fields(policy, f"{type(plugin).__name__}.mixed_precision_policy")
            return
