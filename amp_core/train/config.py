"""What a training run can be told: the settings, the precision recipes and the workloads, as plain data without torch.

    >>> TrainConfig(workload="text-gpt", precision="fp16", steps=200).to_dict()["size"]
    'tiny'
    >>> TrainConfig(precision="fp12")
    Traceback (most recent call last):
    amp_core.schema.RunError: precision='fp12' is unknown; choose one of fp32, tf32, fp16, bf16, ...

The command line, the app's form and a queued job all make a `TrainConfig`, so all three refuse the same things with the
same sentence. `RECIPES` and `WORKLOADS` are the two tables that a form shows.
"""

import dataclasses
import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from amp_core.formats import FORMATS
from amp_core.schema import RunError


@dataclass(frozen=True)
class Recipe:
    """A way to train with less precision than FP32, said in the terms of a PyTorch training loop."""

    name: str
    label: str
    """How people write it."""
    autocast: str | None
    """dtype of the autocast region (`float16`, `bfloat16`); None where there is no autocast region."""
    scaler: bool
    """Whether a GradScaler multiplies the loss."""
    weights: str
    """dtype in which the parameters are stored and updated."""
    tf32: bool
    """Whether FP32 matrix products and convolutions may use TF32 inside CUDA's matrix units."""
    description: str
    """One sentence for people."""


RECIPES: dict[str, Recipe] = {
    r.name: r
    for r in (
        Recipe(
            "fp32",
            "FP32",
            None,
            False,
            "float32",
            False,
            "Everything in 32 bits with TF32 off: the reference that the others are set beside.",
        ),
        Recipe(
            "tf32",
            "TF32",
            None,
            False,
            "float32",
            True,
            "FP32 storage; CUDA matrix products round their inputs to 10 mantissa bits. On a CPU the same as fp32.",
        ),
        Recipe(
            "fp16",
            "FP16 AMP",
            "float16",
            True,
            "float32",
            False,
            "FP16 autocast with a GradScaler over FP32 weights: classic mixed precision.",
        ),
        Recipe(
            "bf16",
            "BF16 AMP",
            "bfloat16",
            False,
            "float32",
            False,
            "BF16 autocast over FP32 weights; FP32's range, so no loss scale is needed.",
        ),
        Recipe(
            "fp16-unscaled",
            "FP16 without scaling",
            "float16",
            False,
            "float32",
            False,
            "FP16 autocast without a loss scale: shows which gradients underflow when scaling is left out.",
        ),
        Recipe(
            "fp16-pure",
            "Pure FP16",
            None,
            False,
            "float16",
            False,
            "FP16 weights, gradients and optimizer state with no FP32 copy: small updates are rounded away, and Adam's "
            "epsilon of 1e-8 becomes 0, which ends in NaN.",
        ),
        Recipe(
            "bf16-pure",
            "Pure BF16",
            None,
            False,
            "bfloat16",
            False,
            "BF16 weights, gradients and optimizer state with no FP32 copy: updates below 1/256 of a weight are lost.",
        ),
    )
}
"""Every precision recipe, by name, the reference first."""


@dataclass(frozen=True)
class Size:
    """One size of a workload. `dims` are the model's own numbers; `parameters` is counted, not measured."""

    name: str
    dims: Mapping[str, int]
    batch_size: int
    """Samples of one micro-batch where none is asked for."""
    lr: float
    """Learning rate where none is asked for."""
    parameters: int
    description: str


@dataclass(frozen=True)
class WorkloadSpec:
    """A model on real data that every machine already has, in several sizes, smallest first."""

    name: str
    label: str
    sample: str
    """What one sample is."""
    description: str
    sizes: Mapping[str, Size]


def _gpt(name: str, layers: int, width: int, heads: int, context: int, batch: int, lr: float, text: str) -> Size:
    dims = {"layers": layers, "width": width, "heads": heads, "context": context}
    # each block: 12 width² in its four matrices, 9 width in biases and 4 width in its two norms; the head is tied
    parameters = layers * (12 * width**2 + 13 * width) + 256 * width + context * width + 2 * width
    return Size(name, dims, batch, lr, parameters, text)


def _lstm(name: str, layers: int, width: int, context: int, batch: int, lr: float, text: str) -> Size:
    dims = {"layers": layers, "width": width, "context": context}
    # each layer: four gates, each with two matrices and two biases; then the embedding and the head
    parameters = layers * (8 * width**2 + 8 * width) + 512 * width + 256
    return Size(name, dims, batch, lr, parameters, text)


def _cnn(name: str, width: int, classes: int, batch: int, lr: float, text: str) -> Size:
    dims = {"width": width, "classes": classes}
    # three 3×3 convolutions without bias, each with a batch norm, then one linear layer over 2×2 positions
    convolutions = 9 * (width + width * 2 * width + 2 * width * 2 * width)
    parameters = convolutions + 2 * (width + 2 * width + 2 * width) + (4 * 2 * width + 1) * classes
    return Size(name, dims, batch, lr, parameters, text)


def _sizes(*sizes: Size) -> dict[str, Size]:
    return {s.name: s for s in sizes}


WORKLOADS: dict[str, WorkloadSpec] = {
    w.name: w
    for w in (
        WorkloadSpec(
            "digits-cnn",
            "Digits, convolutional network",
            "image of 8×8 pixels",
            "A small convolutional network with batch norm on scikit-learn's 1,797 handwritten digits.",
            _sizes(
                _cnn("tiny", 8, 10, 32, 2e-3, "Seconds on a CPU, FP16 included."),
                _cnn("small", 32, 10, 64, 2e-3, "A minute in FP16 on a CPU."),
            ),
        ),
        WorkloadSpec(
            "text-lstm",
            "Text, LSTM",
            "window of bytes",
            "An LSTM language model over the bytes of the Python standard library's own source.",
            _sizes(
                _lstm("tiny", 1, 64, 32, 8, 1e-2, "Seconds on a CPU, FP16 included."),
                _lstm("small", 2, 256, 128, 32, 3e-3, "Minutes on a CPU in FP32; FP16 wants a GPU."),
                _lstm("medium", 2, 1024, 256, 64, 1e-3, "Wants a GPU."),
            ),
        ),
        WorkloadSpec(
            "text-gpt",
            "Text, GPT",
            "window of bytes",
            "A GPT language model over the bytes of the Python standard library's own source.",
            _sizes(
                _gpt("tiny", 2, 64, 2, 32, 8, 2e-3, "Seconds on a CPU, FP16 included."),
                _gpt("mini", 4, 128, 4, 128, 16, 1e-3, "Minutes on a CPU in FP32; FP16 wants a GPU."),
                _gpt("small", 12, 768, 12, 1024, 8, 3e-4, "The shape of GPT-2 small over bytes; wants a GPU."),
                _gpt("medium", 24, 1024, 16, 1024, 4, 2e-4, "The shape of GPT-2 medium over bytes; wants a GPU."),
            ),
        ),
    )
}
"""Every built-in workload, by name."""

OPTIMIZERS = ("adamw", "adam", "sgd")
"""What `optimizer` may be. `sgd` runs with momentum 0.9."""

_OWN = re.compile(r"(?P<file>.+\.py):(?P<function>[^\W\d]\w*)\Z", re.DOTALL)
_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Every setting of a training run, checked when it is made. Raises `RunError` naming the argument and its value."""

    workload: str = "text-gpt"
    """A name from `WORKLOADS`, or `FILE.py:FUNCTION` for one's own."""
    size: str | None = None
    """A size of the workload; None is its smallest. One's own workload has no sizes."""
    precision: str = "fp16"
    """A name from `RECIPES`."""
    steps: int = 200
    """Optimizer steps to attempt, skipped ones included."""
    batch_size: int | None = None
    """Samples of one micro-batch; None is the size's own."""
    accumulate: int = 1
    """Micro-batches whose gradients add up to one optimizer step."""
    lr: float | None = None
    """Learning rate; None is the size's own, or 1e-3 for one's own workload."""
    optimizer: str = "adamw"
    """A name from `OPTIMIZERS`."""
    fused: bool = False
    """Use the optimizer's fused kernel, which lets the scaler skip a step on the device."""
    clip_norm: float | None = None
    """Clip the unscaled gradients to this 2-norm; None does not clip."""
    loss_scale: float | str = "dynamic"
    """`dynamic`, or a fixed positive number. Only recipes with a scaler take a number."""
    init_scale: float = 65536.0
    """Loss scale that the dynamic one begins with."""
    growth_interval: int = 2000
    """Clean steps in a row after which a dynamic loss scale grows."""
    growth_factor: float = 2.0
    """By what it is multiplied then."""
    backoff_factor: float = 0.5
    """By what it is multiplied after a skipped step."""
    device: str = "auto"
    """`auto` (CUDA where there is one), `cpu`, `cuda` or `cuda:N`."""
    seed: int = 0
    """Decides initial weights, data order and dropout; precision decides none of them."""
    every: int = 10
    """Sample number ranges every so many steps."""
    compile: bool = False
    """Run the model through torch.compile."""
    tf32: bool | None = None
    """TF32 inside CUDA's matrix units; None is what the recipe says."""
    cudnn_benchmark: bool = False
    """Let cuDNN try its algorithms and keep the fastest; which one that is can differ between runs."""
    deterministic: bool = False
    """Ask torch for deterministic algorithms only."""
    evaluate: bool = True
    """Measure loss and accuracy on held-out data at the end."""

    def __post_init__(self) -> None:
        self._check_workload()
        _one_of("precision", self.precision, RECIPES)
        _one_of("optimizer", self.optimizer, OPTIMIZERS)
        for name in ("steps", "accumulate", "growth_interval", "every"):
            _whole(name, getattr(self, name), least=1)
        _whole("seed", self.seed, least=0, most=2**63 - 1)
        if self.batch_size is not None:
            _whole("batch_size", self.batch_size, least=1)
        for name in ("lr", "clip_norm", "init_scale", "growth_factor", "backoff_factor"):
            if getattr(self, name) is not None or name not in ("lr", "clip_norm"):
                _positive(self, name)
        if self.growth_factor <= 1:
            raise RunError(f"growth_factor={self.growth_factor!r} would not grow the loss scale; give more than 1")
        if self.backoff_factor >= 1:
            raise RunError(f"backoff_factor={self.backoff_factor!r} would not lower the loss scale; give less than 1")
        self._check_loss_scale()
        if not isinstance(self.device, str) or not _DEVICE.fullmatch(self.device):
            raise RunError(f"device={self.device!r} is unknown; choose auto, cpu, cuda or cuda:N")
        for name in ("fused", "compile", "cudnn_benchmark", "deterministic", "evaluate"):
            if not isinstance(getattr(self, name), bool):
                raise RunError(f"{name}={getattr(self, name)!r} is not a switch; give true or false")
        if self.tf32 is not None and not isinstance(self.tf32, bool):
            raise RunError(f"tf32={self.tf32!r} is not a switch; give true, false or nothing for the recipe's own")
        if self.deterministic and self.cudnn_benchmark:
            raise RunError(
                "cudnn_benchmark=True lets cuDNN change its algorithms; leave it off with deterministic=True"
            )

    def _check_workload(self) -> None:
        if not isinstance(self.workload, str):
            raise unknown("workload", self.workload, [*WORKLOADS, "FILE.py:FUNCTION"])
        if self.workload in WORKLOADS:
            sizes = WORKLOADS[self.workload].sizes
            if self.size is not None:
                _one_of("size", self.size, sizes, f" (sizes of {self.workload})")
            return
        if _OWN.fullmatch(self.workload) is None:
            raise unknown("workload", self.workload, [*WORKLOADS, "FILE.py:FUNCTION"])
        if self.size is not None:
            raise RunError(f"size={self.size!r} cannot be set for {self.workload}; one's own workload has no sizes")
        if self.batch_size is not None:
            raise RunError(
                f"batch_size={self.batch_size!r} cannot be set for {self.workload}, which makes its own batches; "
                "set it in that file"
            )

    def _check_loss_scale(self) -> None:
        if self.loss_scale == "dynamic":
            return
        if isinstance(self.loss_scale, str):
            raise RunError(f"loss_scale={self.loss_scale!r} is unknown; give dynamic or a positive number such as 128")
        _positive(self, "loss_scale")
        if not self.recipe.scaler:
            with_scaler = ", ".join(r.name for r in RECIPES.values() if r.scaler)
            raise RunError(
                f"loss_scale={self.loss_scale!r} has no effect with precision={self.precision!r}, which has no scaler; "
                f"choose precision {with_scaler} or leave loss_scale at dynamic"
            )

    @property
    def recipe(self) -> Recipe:
        """The precision recipe's facts."""
        return RECIPES[self.precision]

    @property
    def own(self) -> tuple[Path, str] | None:
        """File and function of one's own workload; None for a built-in one."""
        match = None if self.workload in WORKLOADS else _OWN.fullmatch(self.workload)
        return None if match is None else (Path(match["file"]), match["function"])

    @property
    def spec(self) -> Size | None:
        """The chosen size of a built-in workload; None for one's own."""
        if self.own is not None:
            return None
        sizes = WORKLOADS[self.workload].sizes
        return sizes[self.size] if self.size is not None else next(iter(sizes.values()))

    def resolved(self) -> "TrainConfig":
        """The same settings with the size's own size, batch size and learning rate filled in."""
        spec = self.spec
        if spec is None:
            return dataclasses.replace(self, lr=self.lr if self.lr is not None else 1e-3)
        return dataclasses.replace(
            self,
            size=spec.name,
            batch_size=self.batch_size if self.batch_size is not None else spec.batch_size,
            lr=self.lr if self.lr is not None else spec.lr,
        )

    def to_dict(self) -> dict[str, Any]:
        """All settings as JSON has them."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> "TrainConfig":
        """The other way round. Raises `RunError` for a setting that does not exist or has a wrong value."""
        names = [f.name for f in dataclasses.fields(cls)]
        for name in settings:
            if name not in names:
                raise unknown("setting", name, names)
        return cls(**settings)


def unknown(argument: str, value: object, choices: Iterable[str], of: str = "") -> RunError:
    """The error for a value that is none of `choices`, with the nearest of them where one is near."""
    names = list(choices)
    near = difflib.get_close_matches(str(value), names, n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    return RunError(f"{argument}={value!r} is unknown; choose one of {', '.join(names)}{of}{hint}")


def _one_of(argument: str, value: object, choices: Iterable[str], of: str = "") -> None:
    if not isinstance(value, str) or value not in choices:
        raise unknown(argument, value, choices, of)


def _whole(name: str, value: object, least: int, most: int | None = None) -> None:
    right = f"a whole number of {least} or more" if most is None else f"a whole number from {least} to {most}"
    if not isinstance(value, int) or isinstance(value, bool) or value < least or (most is not None and value > most):
        raise RunError(f"{name}={value!r} is not possible; give {right}")


def _positive(config: TrainConfig, name: str) -> None:
    value = getattr(config, name)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value <= FORMATS["fp32"].max_value:  # not true of NaN either
        raise RunError(f"{name}={value!r} is not possible; give a number above 0")
    object.__setattr__(config, name, float(value))  # 128 and 128.0 are one setting, on disk too
