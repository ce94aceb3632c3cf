"""What a training run can be told: its settings, checked, without torch.

    >>> TrainConfig(workload="text-gpt", precision="fp16", steps=200).resolved().size
    'tiny'
    >>> TrainConfig(precision="fp12")
    Traceback (most recent call last):
    amp_core.schema.RunError: precision='fp12' is unknown; choose one of fp32, tf32, fp16, bf16, ...

The command line, the app's form and a queued job all make a `TrainConfig`, so all three refuse the same things with the
same sentence. The choices themselves are in `catalog.py`.
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
from amp_core.train.catalog import RECIPES, WORKLOADS, Recipe, Size, WorkloadSpec

__all__ = ["OPTIMIZERS", "RECIPES", "WORKLOADS", "Recipe", "Size", "TrainConfig", "WorkloadSpec", "unknown"]

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
    channels_last: bool = False
    """Lay images and the weights of convolutions out with the channels last, which is how tensor cores read them."""
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
    nproc: int = 1
    """Processes that train together, with gradients averaged over all (DDP); each takes batches of its own."""
    checkpoint_every: int | None = None
    """Save the training's state every so many steps and where it ends; None never does."""
    every: int = 10
    """Sample number ranges every so many steps."""
    audit_every: int | None = None
    """Replay one batch in FP32 and in the recipe every so many steps, and record what was lost; None never does."""
    profile: tuple[int, int] | None = None
    """Profile the steps from the first number up to, not including, the second; None profiles none."""
    trace_ops: int | None = None
    """Trace every operator of this step; None traces none."""
    compile: bool = False
    """Run the model through torch.compile."""
    islands: tuple[str, ...] = ()
    """Modules, by name, that compute in FP32 inside autocast."""
    pad_to: int | None = None
    """Multiply linear layers with their sizes rounded up to a multiple of this; None leaves them as they are."""
    fp8: bool = False
    """Multiply linear layers in FP8 inside BF16 autocast, with torchao."""
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
        for name in ("steps", "accumulate", "growth_interval", "every", "nproc"):
            _whole(name, getattr(self, name), least=1)
        _whole("seed", self.seed, least=0, most=2**63 - 1)
        for name in ("batch_size", "audit_every", "checkpoint_every", "pad_to"):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name), least=1)
        if self.trace_ops is not None:
            _whole("trace_ops", self.trace_ops, least=0)
        object.__setattr__(self, "profile", _window(self.profile))
        object.__setattr__(self, "islands", _names("islands", self.islands))
        if self.islands and self.recipe.autocast is None:
            raise RunError(
                f"islands has no effect with precision={self.precision!r}, which has no autocast; leave it out"
            )
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
        if self.nproc > 1 and self.device.startswith("cuda:"):
            raise RunError(f"device={self.device!r} is one GPU, and nproc={self.nproc} needs one each; choose cuda")
        for name in ("fused", "channels_last", "compile", "fp8", "cudnn_benchmark", "deterministic", "evaluate"):
            if not isinstance(getattr(self, name), bool):
                raise RunError(f"{name}={getattr(self, name)!r} is not a switch; give true or false")
        if self.tf32 is not None and not isinstance(self.tf32, bool):
            raise RunError(f"tf32={self.tf32!r} is not a switch; give true, false or nothing for the recipe's own")
        if self.fp8 and self.precision != "bf16":
            raise RunError(f"fp8=True goes with precision='bf16', not {self.precision!r}")
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

    def check_profile(self) -> None:
        """Raise `RunError` where no step would be profiled. Asked where a window is typed: a training that ends before
        its window begins is none the worse."""
        if self.profile and self.profile[0] >= self.steps:
            first, stop = self.profile
            raise RunError(
                f"profile='{first}:{stop}' begins at step {first}, and steps={self.steps} ends with step "
                f"{self.steps - 1}; begin it sooner or leave it out"
            )

    def check_file(self) -> None:
        """Raise `RunError` where the file of one's own workload is not there. Asked where it is about to be trained:
        settings may be made, and read, on another machine."""
        if self.own is not None and not self.own[0].is_file():
            file = self.own[0]
            raise RunError(
                f"workload={self.workload!r}: there is no file {file}; give the path of a Python file that exists"
            )

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


def _window(value: object) -> tuple[int, int] | None:
    """The first step and the step after the last: two numbers, which JSON has as a list, or `50:53`."""
    if value is None:
        return None
    ends = value.split(":") if isinstance(value, str) else value
    if isinstance(ends, list | tuple) and len(ends) == 2:
        first, stop = (int(n) if isinstance(n, str) and n.isdecimal() else n for n in ends)
        if all(isinstance(n, int) and not isinstance(n, bool) for n in (first, stop)) and 0 <= first < stop:
            return first, stop
    raise RunError(f"profile={value!r} is no window of steps; 50:53 profiles steps 50, 51 and 52")


def _names(argument: str, value: object) -> tuple[str, ...]:
    """Names of modules: a tuple, a list, as JSON has it, or text with commas between them."""
    names = [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value
    if isinstance(names, list | tuple) and all(isinstance(name, str) and name for name in names):
        return tuple(names)
    raise RunError(f"{argument}={value!r} names no modules; give their names with commas between them")


def _positive(config: TrainConfig, name: str) -> None:
    value = getattr(config, name)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value <= FORMATS["fp32"].max_value:  # not true of NaN either
        raise RunError(f"{name}={value!r} is not possible; give a number above 0")
    object.__setattr__(config, name, float(value))  # 128 and 128.0 are one setting, on disk too
