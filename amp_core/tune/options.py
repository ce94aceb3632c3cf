"""Which recipes and options are worth trying for a workload here, and why the others are left out.

    >>> choices = precisions(config, probe_run)          # a short FP32 run, watched in full
    >>> [candidate.name for candidate in choices.candidates], choices.left_out
    (['fp32', 'bf16', 'fp16'], [('tf32', 'needs an NVIDIA GPU of compute capability 8.0 or newer')])

All of it follows from the probe run: the device and its GPU, the model's layers and shapes, and the effect of FP16 on
its gradients and activations. No torch.
"""

import dataclasses
import shutil
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from amp_core.analysis import layer_advice, safe_window, what_if
from amp_core.analysis.performance.gpus import profiled_gpu
from amp_core.hardware.device_types import is_accelerator
from amp_core.hardware.gpus import Gpu
from amp_core.schema import RunError
from amp_core.settings.catalog import EMULATED, RECIPES
from amp_core.settings.training import TrainConfig
from amp_core.store.run import Run
from amp_core.text import formatting

COMPILE_S = 180.0
"""Seconds that must be left to try torch.compile: compiling forward and backward takes a minute."""
COMPILE_START_RATIO = 20.0
"""The same on a slow machine, as a multiple of the time that a training takes to start."""
TILE = 8
"""Tensor cores need sizes of a 16-bit matrix product to be multiples of this (NVIDIA, "Matrix Multiplication Background
User's Guide", section 2.2: 16 bytes)."""
FP8_TILE = 16
MAX_ISLANDS_FRAC = 0.5
"""With a larger share of layers in FP32, FP16 is not worth trying."""
NEEDS_AMPERE = "needs an NVIDIA GPU of compute capability 8.0 or newer"


@dataclass(frozen=True)
class Candidate:
    """A recipe to try."""

    name: str
    config: TrainConfig
    note: str = ""
    """Where its settings come from."""


@dataclass
class Choices:
    """What to try, simplest first, and what is left out."""

    candidates: list[Candidate] = field(default_factory=list)
    left_out: list[tuple[str, str]] = field(default_factory=list)

    def add(self, name: str, config: TrainConfig, note: str = "") -> None:
        """Add a recipe to try."""
        self.candidates.append(Candidate(name, config, note))

    def leave_out(self, what: str, why: str) -> None:
        """Record that `what` is not tried, and why."""
        self.left_out.append((what, why))


def precisions(base: TrainConfig, probe_run: Run) -> Choices:
    """The precisions to race, FP32 first."""
    choices, gpu = Choices(), _gpu(probe_run)
    choices.add("fp32", dataclasses.replace(base, precision="fp32", loss_scale="dynamic", islands=()))
    plain = choices.candidates[0].config
    if gpu is not None and gpu.takes("tf32"):
        choices.add("tf32", dataclasses.replace(plain, precision="tf32"))
    else:
        choices.leave_out("tf32", NEEDS_AMPERE)
    if gpu is not None and gpu.takes("bf16") is False:
        choices.leave_out("bf16", f"emulated on {gpu.name}: {NEEDS_AMPERE}")
    else:
        choices.add("bf16", dataclasses.replace(plain, precision="bf16"))
    scaled, note = _scaled(dataclasses.replace(plain, precision="fp16"), probe_run)
    choices.add("fp16", scaled, note)
    islands, why = _islands(probe_run)
    if islands:
        choices.add("fp16-islands", dataclasses.replace(scaled, islands=islands), why)
    else:
        choices.leave_out("fp16 with FP32 islands", why)
    _narrower(choices, plain, probe_run, gpu)
    return choices


def options(lead: Candidate, probe_run: Run, seconds_left: float, start_s: float = 0.0) -> Choices:
    """Options to race against `lead`, one by one; a training takes `start_s` to start here."""
    choices, gpu, config = Choices(), _gpu(probe_run), lead.config
    shapes = {name: shape for name, shape in _facts(probe_run, "shapes").items() if isinstance(shape, list)}
    if not config.fused:
        choices.add("fused", dataclasses.replace(config, fused=True), "the optimizer's fused kernel")
    if any(len(shape) == 4 for shape in shapes.values()):
        if not config.channels_last:
            choices.add("channels-last", dataclasses.replace(config, channels_last=True), "for its convolutions")
    else:
        choices.leave_out("channels_last", "the model has no convolution over images")
    linear = [n for n, kind in _facts(probe_run, "layers").items() if kind == "Linear"]
    odd = [n for n in linear if any(size % TILE for size in shapes.get(f"{n}.weight", []))]
    if gpu is None or not gpu.has_tensor_cores:
        choices.leave_out("padding", "helps on tensor cores, which this device lacks")
    elif not odd or config.precision == "fp8":
        choices.leave_out("padding", f"all linear layers already have sizes that are multiples of {TILE}")
    elif config.pad_to is None:
        choices.add(
            "padding", dataclasses.replace(config, pad_to=TILE), f"for {formatting.plural(len(odd), 'linear layer')}"
        )
    if why := _cannot_compile(gpu):
        choices.leave_out("compile", why)
    elif seconds_left < max(COMPILE_S, COMPILE_START_RATIO * start_s):
        time_left = formatting.duration(max(seconds_left, 0.0))
        choices.leave_out("compile", f"compiling may take longer than the {time_left} left of the budget; increase it")
    elif not config.compile:
        choices.add("compile", dataclasses.replace(config, compile=True), "torch.compile")
    return choices


def combined(lead: Candidate, chosen: list[Candidate]) -> Candidate:
    """`lead` with all of these options."""
    fields = ("fused", "channels_last", "pad_to", "compile")
    changes = {
        f: getattr(c.config, f) for c in chosen for f in fields if getattr(c.config, f) != getattr(lead.config, f)
    }
    name = "+".join([lead.name, *(c.name for c in chosen)])
    notes = [c.note for c in (lead, *chosen) if c.note]
    return Candidate(name, dataclasses.replace(lead.config, **changes), "; ".join(notes))


def _scaled(config: TrainConfig, probe_run: Run) -> tuple[TrainConfig, str]:
    """FP16 with the loss scale that the safe window recommends, unless `config` sets one."""
    default = TrainConfig()
    if (config.loss_scale, config.init_scale) != (default.loss_scale, default.init_scale):
        return config, "the loss scale given"
    try:
        window = safe_window(probe_run, "fp16")
    except RunError as error:
        return config, f"PyTorch's default: {error}"
    if not window.exists:
        return config, f"PyTorch's default. {window.why}"
    scale = min(max(window.recommended, 1.0), 2.0**24)
    low, high = formatting.scale(window.lowest), formatting.scale(window.highest)
    note = f"loss scale from {formatting.scale(scale)}: safe from {low} to {high}"
    return dataclasses.replace(config, init_scale=scale, growth_interval=window.growth_interval), note


def _islands(probe_run: Run) -> tuple[tuple[str, ...], str]:
    """Layers that must stay in FP32 beside FP16, in the model's order, and why; or none, and why."""
    layers = list(_facts(probe_run, "layers"))
    wide = _overflowing(probe_run, layers)
    try:
        advice = layer_advice(probe_run)
        narrow = {str(name) for name in advice.loc[advice["island"], "layer"]}
    except RunError:
        narrow = set()
    islands = tuple(name for name in layers if name in wide | narrow)
    if not islands:
        return (), "every activation fits FP16, and one loss scale suits every gradient"
    if len(islands) > MAX_ISLANDS_FRAC * len(layers):
        return (), f"{len(islands)} of {len(layers)} layers would have to stay in FP32"
    reasons = ["activations too large for FP16"] * bool(wide) + ["gradients that no common loss scale suits"] * bool(
        narrow
    )
    return islands, f"{', '.join(islands)} in FP32: {' and '.join(reasons)}"


def _overflowing(probe_run: Run, layers: list[str]) -> set[str]:
    """Layers whose outputs overflow FP16, and the layer after each, which takes them as input."""
    predicted = what_if(probe_run, ("fp16",), (0,), kinds=("activation",))
    too_large = {str(name) for name in predicted.loc[predicted["overflow_frac"] > 0, "name"]}
    places = [i for i, name in enumerate(layers) if name in too_large]
    return {layers[i] for place in places for i in (place, place + 1) if i < len(layers)}


def _narrower(choices: Choices, plain: TrainConfig, probe_run: Run, gpu: Gpu | None) -> None:
    shapes = _facts(probe_run, "shapes")
    linear = [n for n, kind in _facts(probe_run, "layers").items() if kind == "Linear"]
    fit = [n for n in linear[:-1] if not any(size % FP8_TILE for size in shapes.get(f"{n}.weight", [1]))]
    for name, recipe in RECIPES.items():
        if recipe.quantization is not None and recipe.in_hardware is None:
            choices.leave_out(
                name, (f"{EMULATED}; ampscope compare --precisions fp32,bf16,{name} shows its convergence")
            )
    if gpu is None or not gpu.takes("fp8"):
        choices.leave_out("fp8", "needs an NVIDIA GPU of compute capability 8.9 or newer")
    elif find_spec("torchao") is None:
        choices.leave_out("fp8", "needs torchao, which is not installed; install the extra fp8, or pip install torchao")
    elif not fit:
        choices.leave_out("fp8", f"no linear layer but the head has sizes that are multiples of {FP8_TILE}")
    else:
        compiled = plain.compile or not _cannot_compile(
            gpu
        )  # uncompiled, its casts cost more than its matrix products save
        config = dataclasses.replace(plain, precision="fp8", compile=compiled)
        choices.add("fp8", config, f"{len(fit)} of {len(linear)} linear layers in FP8, the rest in BF16")


def _cannot_compile(gpu: Gpu | None) -> str | None:
    if gpu is not None:
        return None if find_spec("triton") is not None else "needs triton, which is not installed"
    return None if any(shutil.which(c) for c in ("g++", "clang++", "c++")) else "needs a C++ compiler"


def _gpu(probe_run: Run) -> Gpu | None:
    """The GPU of the probe run; None for a CPU."""
    device = str(probe_run.head.config.get("device"))
    return profiled_gpu(probe_run, device) if is_accelerator(device) else None


def _facts(probe_run: Run, name: str) -> dict[str, Any]:
    facts = probe_run.head.model.get(name)
    return dict(facts) if isinstance(facts, dict) else {}
