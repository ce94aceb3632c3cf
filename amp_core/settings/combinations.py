"""Checks of settings against each other: what each may be where another one is as it is."""

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from amp_core.hardware.device_types import ACCELERATORS, type_of
from amp_core.schema import RunError
from amp_core.settings.catalog import RECIPES, WORKLOADS, Recipe
from amp_core.settings.setting import check_choice, unknown
from amp_core.text.formatting import join_words

if TYPE_CHECKING:
    from amp_core.settings.training import TrainConfig

OWN = re.compile(r"(?P<file>.+\.py):(?P<function>[^\W\d]\w*)\Z", re.DOTALL)
"""A user's workload."""
DEVICES = join_words(["auto", "cpu", *(name for kind in ACCELERATORS for name in (kind, f"{kind}:N"))], "or")
"""What `device` may be, in words."""
NVFP4_SWITCHES = ("stochastic_rounding", "hadamard")
"""Parts of NVIDIA's recipe for NVFP4 training (arXiv 2509.25149)."""
TAKEN_BY: dict[str, Callable[[Recipe], bool]] = {
    "loss_scale": lambda recipe: recipe.scaler,
    "keep_bf16": lambda recipe: recipe.quantization is not None,
    **dict.fromkeys(NVFP4_SWITCHES, lambda recipe: recipe.name == "nvfp4"),
}
"""Settings that only some precision recipes take, and which do."""
_DEVICE = re.compile(rf"auto|cpu|(?:{'|'.join(ACCELERATORS)})(?::\d+)?")


def check_workload(config: "TrainConfig") -> None:
    """Raise `RunError` for an unknown workload, and for a size or batch size that it does not have."""
    workload, size = config.workload, config.size
    if isinstance(workload, str) and workload in WORKLOADS:
        if size is not None:
            check_choice("size", size, WORKLOADS[workload].sizes, f" (sizes of {workload})")
        return
    if not isinstance(workload, str) or OWN.fullmatch(workload) is None:
        raise unknown("workload", workload, [*WORKLOADS, "FILE.py:FUNCTION"])
    if size is not None:
        raise RunError(f"size={size!r} cannot be set for {workload}; a workload of your own has no sizes")
    if config.batch_size is not None:
        raise RunError(
            f"batch_size={config.batch_size!r} cannot be set for {workload}, which makes its own batches; "
            "set it in that file"
        )


def taken(settings: Mapping[str, Any], precision: str) -> dict[str, Any]:
    """The settings without those that this precision does not take: one form or command serves several precisions."""
    recipe = RECIPES.get(precision)
    return {n: v for n, v in settings.items() if recipe is None or n not in TAKEN_BY or TAKEN_BY[n](recipe)}


def check_combination(config: "TrainConfig") -> None:
    """Raise `RunError` for settings that do not go together; each by itself has been checked."""
    precision, recipe = config.precision, RECIPES[config.precision]
    if config.islands and recipe.autocast is None:
        raise RunError(f"islands has no effect with precision={precision!r}, which has no autocast; leave it out")
    if config.growth_factor <= 1:
        raise RunError(f"growth_factor={config.growth_factor!r} would not grow the loss scale; give more than 1")
    if config.backoff_factor >= 1:
        raise RunError(f"backoff_factor={config.backoff_factor!r} would not lower the loss scale; give less than 1")
    if config.loss_scale != "dynamic" and not recipe.scaler:
        with_scaler = ", ".join(r.name for r in RECIPES.values() if r.scaler)
        raise RunError(
            f"loss_scale={config.loss_scale!r} has no effect with precision={precision!r}, which has no scaler; "
            f"choose precision {with_scaler} or leave loss_scale at dynamic"
        )
    if not isinstance(config.device, str) or not _DEVICE.fullmatch(config.device):
        raise RunError(f"device={config.device!r} is unknown; choose {DEVICES}")
    if config.nproc > 1 and ":" in config.device:
        each = f"nproc={config.nproc} needs one device each; choose {type_of(config.device)}"
        raise RunError(f"device={config.device!r} is one GPU, and {each}")
    if config.fp8 and precision not in ("bf16", "fp8"):
        raise RunError(f"fp8=True requires precision='bf16', not {precision!r}")
    if config.keep_bf16 is not None and recipe.quantization is None and not config.fp8:
        quantized = ", ".join(r.name for r in RECIPES.values() if r.quantization)
        raise RunError(
            f"keep_bf16={','.join(config.keep_bf16)!r} has no effect with precision={precision!r}, which quantizes no "
            f"layer; choose precision {quantized} or leave it out"
        )
    for switch in NVFP4_SWITCHES:
        if getattr(config, switch) and precision != "nvfp4":
            raise RunError(f"{switch}=True requires precision='nvfp4', not {precision!r}")
    if config.deterministic and config.cudnn_benchmark:
        raise RunError("cudnn_benchmark=True lets cuDNN change its algorithms; turn it off with deterministic=True")
