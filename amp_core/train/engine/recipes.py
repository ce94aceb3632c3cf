"""A precision recipe in torch: the autocast region, the GradScaler, the weights' dtype and the backend flags.

    >>> precision = Precision(config, torch.device("cuda:0"))
    >>> model.to(dtype=precision.weights)
    >>> with precision.autocast():
    ...     loss = loss_fn(model, batch)

`amp_core.settings.catalog.RECIPES` defines the recipes; this module applies them.
"""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from amp_core.hardware.gpus import gpu_of
from amp_core.record.backends import BACKENDS, backend_of, fp32_precision_restored
from amp_core.settings.training import Recipe, TrainConfig


class Precision:
    """The recipe `config.precision` on `device`."""

    def __init__(self, config: TrainConfig, device: torch.device) -> None:
        recipe = config.recipe
        self.name = config.precision
        self.device = device
        self.weights: torch.dtype = getattr(torch, recipe.weights)
        self.autocast_dtype: torch.dtype | None = getattr(torch, recipe.autocast) if recipe.autocast else None
        static = None if config.loss_scale == "dynamic" else float(config.loss_scale)
        self.new_scale: float | None = static
        """Argument for `scaler.update`: None for a dynamic loss scale, the constant for a static one."""
        self.scaler = torch.amp.GradScaler(
            device.type,
            init_scale=config.init_scale if static is None else static,
            growth_factor=config.growth_factor,
            backoff_factor=config.backoff_factor,
            growth_interval=config.growth_interval,
            enabled=recipe.scaler,
        )
        """Disabled if the recipe uses no loss scale: its methods then pass through, so one loop serves every recipe."""
        self.emulated = is_emulated(recipe, device)
        self.rounding = torch.Generator(device) if config.stochastic_rounding else None
        """Draws the random numbers of stochastic rounding."""
        self._seed = config.seed

    def begin_step(self, step: int, rank: int = 0) -> None:
        """Seed stochastic rounding for a step: a resumed run rounds as the run would have, and dropout draws the same
        numbers with and without it."""
        if self.rounding is not None:
            self.rounding.manual_seed((self._seed + 1_000_003 * rank + 2_654_435_761 * step) % 2**63)

    def autocast(self) -> AbstractContextManager[object]:
        """The autocast region: for the forward pass and the loss only."""
        if self.autocast_dtype is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.autocast_dtype)

    @property
    def input_dtype(self) -> torch.dtype | None:
        """dtype that floating-point inputs must have; None if autocast or FP32 accepts them as they are."""
        return None if self.weights == torch.float32 else self.weights


def is_emulated(recipe: Recipe, device: torch.device) -> bool:
    """Whether the recipe's quantized products are emulated on this device: in the numbers that the format would give,
    but in neither its time nor its memory."""
    if recipe.quantization is None or recipe.in_hardware is None:
        return recipe.quantization is not None
    gpus = backend_of(device).gpus()
    if not gpus:
        return True
    gpu = gpus[device.index or 0]
    return not gpu_of(gpu["name"], gpu["capability"]).takes(recipe.in_hardware)


@contextmanager
def backend_flags(config: TrainConfig) -> Iterator[None]:
    """Set TF32, cuDNN and determinism as `config` says, and restore the previous flags at the end.

    fp32 must turn TF32 off explicitly: cuDNN allows it in convolutions and LSTMs by default.
    """
    cudnn = torch.backends.cudnn
    tf32 = config.recipe.tf32 if config.tf32 is None else config.tf32
    before = (cudnn.benchmark, cudnn.deterministic)
    deterministic_before = torch.are_deterministic_algorithms_enabled()
    warn_only_before = torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        with fp32_precision_restored():
            for owner, name in (switch for backend in BACKENDS.values() for switch in backend.tf32_switches()):
                setattr(owner, name, tf32)
            cudnn.benchmark = config.cudnn_benchmark
            if config.deterministic:
                # cuBLAS reads it when its first handle is created; without it torch raises an error for matrix products
                os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
                cudnn.deterministic = True
                torch.use_deterministic_algorithms(True)
            yield
    finally:
        cudnn.benchmark, cudnn.deterministic = before
        torch.use_deterministic_algorithms(deterministic_before, warn_only=warn_only_before)
