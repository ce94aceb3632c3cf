"""The settings of a training run, with their checks; no torch.

    >>> TrainConfig(workload="text-gpt", precision="fp16", steps=200).resolved().size
    'tiny'
    >>> TrainConfig(precision="fp12")
    Traceback (most recent call last):
    amp_core.schema.RunError: precision='fp12' is unknown; choose one of fp32, tf32, fp16, bf16, ...

The command line, the app's form and a queued job all make a `TrainConfig`, so all three refuse the same things with the
same sentence. The choices themselves are in `catalog.py`.
"""

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from amp_core.hardware.device_types import ACCELERATORS, type_of
from amp_core.hardware.gpus import join_words
from amp_core.schema import RunError
from amp_core.settings.catalog import RECIPES, WORKLOADS, Recipe, Size, WorkloadSpec
from amp_core.settings.setting import FRONT, RECORDED, SCALE, SWITCHES, Form, check_choice, positive, setting, unknown

__all__ = ["OPTIMIZERS", "RECIPES", "WORKLOADS", "Recipe", "Size", "TrainConfig", "WorkloadSpec", "unknown"]

OPTIMIZERS = ("adamw", "adam", "sgd")
"""What `optimizer` may be. `sgd` runs with momentum 0.9."""

_OWN = re.compile(r"(?P<file>.+\.py):(?P<function>[^\W\d]\w*)\Z", re.DOTALL)
_DEVICE = re.compile(rf"auto|cpu|(?:{'|'.join(ACCELERATORS)})(?::\d+)?")
_DEVICES = join_words(["auto", "cpu", *(name for kind in ACCELERATORS for name in (kind, f"{kind}:N"))], "or")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Every setting of a training run, checked on creation. Raises `RunError` with the argument and its value.

    To add a setting, add a field: its flag, help, check and field on the form are made from it (see `setting.py`).
    """

    workload: str = setting("text-gpt", "text", f"{', '.join(WORKLOADS)}, or FILE.py:FUNCTION", "NAME")
    """A name from `WORKLOADS`, or `FILE.py:FUNCTION` for a user's workload."""
    size: str | None = setting(
        None, "text", "; ".join(f"{w.name}: {', '.join(w.sizes)}" for w in WORKLOADS.values()), "SIZE"
    )
    """A size of the workload; None is its smallest. A user's workload has no sizes."""
    precision: str = setting("fp16", "choice", choices=tuple(RECIPES), shared=False)
    """A name from `RECIPES`."""
    steps: int = setting(
        200,
        "whole",
        "optimizer steps to attempt",
        form=Form("Steps", "Optimizer steps to attempt, skipped ones included.", FRONT, options=(("step", 50),)),
        may_change=True,
    )
    """Optimizer steps to attempt, skipped ones included."""
    batch_size: int | None = setting(
        None,
        "whole",
        "samples of one micro-batch",
        form=Form("Batch size", "Samples of a batch. Empty: what suits the size of the workload.", FRONT),
    )
    """Samples of one micro-batch; None is the size's own."""
    accumulate: int = setting(
        1,
        "whole",
        "micro-batches per optimizer step",
        form=Form(
            "Batches per step",
            "So many batches are run forward and backward before the optimizer steps once on their summed gradients.",
            place=2,
        ),
    )
    """Micro-batches whose gradients add up to one optimizer step."""
    lr: float | None = setting(
        None,
        "positive",
        "learning rate",
        form=Form(
            "Learning rate",
            "Empty: what suits the size of the workload.",
            place=1,
            options=(("format", "%.3g"), ("placeholder", "default")),
        ),
    )
    """Learning rate; None is the size's own, or 1e-3 for a user's workload."""
    optimizer: str = setting("adamw", "choice", choices=OPTIMIZERS, form=Form("Optimizer", place=1))
    """A name from `OPTIMIZERS`."""
    clip_norm: float | None = setting(
        None,
        "positive",
        "clip the unscaled gradients to this 2-norm",
        form=Form(
            "Clip gradient norm at",
            "Unscaled gradients are shrunk to this 2-norm, all together, where theirs is larger.",
            place=2,
            options=(("placeholder", "off"),),
        ),
    )
    """Clip the unscaled gradients to this 2-norm; None does not clip."""
    loss_scale: float | str = setting("dynamic", "scale", "dynamic, or a fixed number such as 128", "dynamic|X")
    """`dynamic`, or a fixed positive number. Only recipes with a scaler take a number."""
    init_scale: float = setting(65536.0, "positive", "loss scale that the dynamic one begins with")
    """Initial value of a dynamic loss scale."""
    growth_interval: int = setting(
        2000,
        "whole",
        "clean steps after which the loss scale grows",
        form=Form(
            "Growth interval", "Clean steps before a dynamic loss scale grows.", SCALE, unit="steps", needs="scaler"
        ),
    )
    """Clean steps in a row after which a dynamic loss scale grows."""
    growth_factor: float = setting(
        2.0,
        "positive",
        "by what the loss scale is multiplied then",
        form=Form(
            "Growth factor",
            "By what the loss scale is multiplied when it grows.",
            SCALE,
            needs="scaler",
            options=(("format", "%.4g"),),
        ),
    )
    """Factor of that growth."""
    backoff_factor: float = setting(
        0.5,
        "positive",
        "by what the loss scale is multiplied after a skipped step",
        form=Form(
            "Backoff factor",
            "By what the loss scale is multiplied after a step that overflowed.",
            SCALE,
            needs="scaler",
            options=(("format", "%.4g"),),
        ),
    )
    """Factor of a dynamic loss scale after a skipped step."""
    device: str = setting("auto", "text", _DEVICES, "DEVICE", form=Form("Device", group=FRONT), may_change=True)
    """`auto` (an accelerator where there is one), `cpu`, or a type of accelerator, with a number or without: `cuda`."""
    seed: int = setting(
        0,
        "whole",
        "decides initial weights, data order and dropout",
        least=0,
        most=2**63 - 1,
        form=Form(
            "Seed", "Decides initial weights, data order and dropout: runs of one seed see the same numbers.", FRONT
        ),
    )
    """Determines initial weights, data order and dropout, independently of the precision."""
    every: int = setting(
        10,
        "whole",
        "sample number ranges every N steps",
        form=Form("Ranges every", "Number ranges are recorded every so many steps.", RECORDED, unit="steps"),
        may_change=True,
    )
    """Interval of sampled steps."""
    audit_every: int | None = setting(
        None,
        "whole",
        "replay a batch in FP32 every N steps and record what the recipe loses",
        form=Form(
            "Audit every",
            "Every so many steps one batch is replayed in FP32, to measure what the recipe loses of its gradients.",
            RECORDED,
            unit="steps",
            options=(("placeholder", "off"), ("step", 50)),
        ),
        may_change=True,
    )
    """Interval, in steps, of audits, which replay a batch in FP32 and in the recipe and record underflow; None:
    never."""
    checkpoint_every: int | None = setting(
        None, "whole", "save the training's state every N steps and at the end, for --resume", may_change=True
    )
    """Interval, in steps, of checkpoints, with one more at the end; None: never."""
    profile: tuple[int, int] | None = setting(
        None,
        "window",
        "profile steps FIRST up to, not including, STOP, e.g. 50:53",
        "FIRST:STOP",
        form=Form(
            "Profile steps",
            "From the first step up to, not including, the second, e.g. 20:23. Tensor cores and Step cost show them.",
            RECORDED,
            initial="20:23",
            options=(("placeholder", "none"),),
        ),
        may_change=True,
    )
    """Profile the steps from the first number up to, not including, the second; None profiles none."""
    islands: tuple[str, ...] = setting((), "names", "modules that compute in FP32 inside autocast", "A,B,…")
    """Modules, by name, that compute in FP32 inside autocast."""
    pad_to: int | None = setting(None, "whole", "multiply linear layers with sizes rounded up to a multiple of N")
    """Multiply linear layers with their sizes rounded up to a multiple of this; None leaves them as they are."""
    trace_ops: int | None = setting(
        None,
        "whole",
        "trace every operator of one step, with its dtypes; step 2 where none is named",
        "STEP",
        least=0,
        alone=2,  # the third: the first two allocate state and buffers
        form=Form(
            "Trace operators",
            "Which operator ran in which precision, and why, in the third step. Precision map shows it.",
            RECORDED,
            initial=True,
        ),
        may_change=True,
    )
    """Trace every operator of this step; None traces none."""
    nproc: int = setting(
        1,
        "whole",
        "processes that train together, with DDP",
        shared=False,
        form=Form(
            "Processes",
            "So many that torchrun starts: they average their gradients (DDP), and on GPUs take one each.",
            place=2,
            needs="gpus",
            options=(("step", 1),),
        ),
    )
    """Processes that train together, with gradients averaged over all (DDP); each takes batches of its own."""
    fused: bool = setting(
        False,
        "switch",
        "use the optimizer's fused kernel",
        form=Form("Fused optimizer", "One kernel updates all weights.", SWITCHES, place=2),
    )
    """Use the optimizer's fused kernel, which lets the scaler skip a step on the device."""
    channels_last: bool = setting(
        False,
        "switch",
        "lay images and the weights of convolutions out with the channels last",
        form=Form("Channels last", "For convolutions, which tensor cores read so.", SWITCHES, place=2),
    )
    """Store images and convolution weights in channels-last layout, which tensor cores read."""
    fp8: bool = setting(False, "switch", "multiply linear layers in FP8 inside BF16 autocast, with torchao")
    """Multiply linear layers in FP8 inside BF16 autocast, with torchao."""
    compile: bool = setting(
        False,
        "switch",
        "run the model through torch.compile",
        form=Form(
            "torch.compile",
            "The first steps take much longer: the model is compiled then.",
            SWITCHES,
            place=1,
            needs="compiler",
        ),
        may_change=True,
    )
    """Run the model through torch.compile."""
    tf32: bool | None = setting(
        None, "switch", "TF32 inside CUDA's matrix units, whatever the recipe says", unset="the recipe's own"
    )
    """TF32 inside CUDA's matrix units; None is what the recipe says."""
    cudnn_benchmark: bool = setting(False, "switch", "let cuDNN try its algorithms and keep the fastest")
    """Let cuDNN try its algorithms and keep the fastest; which one that is can differ between runs."""
    deterministic: bool = setting(
        False,
        "switch",
        "deterministic algorithms only",
        form=Form(
            "Deterministic algorithms",
            "The same run again gives the same bits; some operators are slower so, and a few are refused.",
            SWITCHES,
            place=1,
        ),
    )
    """Ask torch for deterministic algorithms only."""
    evaluate: bool = setting(True, "switch", "measure loss on held-out data at the end", may_change=True)
    """Measure loss and accuracy on held-out data at the end."""

    def __post_init__(self) -> None:
        self._check_workload()
        for field in dataclasses.fields(self):
            one = field.metadata["setting"]
            value = one.checked(field.name, getattr(self, field.name), optional=field.default is None)
            object.__setattr__(self, field.name, value)
        if self.islands and self.recipe.autocast is None:
            raise RunError(
                f"islands has no effect with precision={self.precision!r}, which has no autocast; leave it out"
            )
        if self.growth_factor <= 1:
            raise RunError(f"growth_factor={self.growth_factor!r} would not grow the loss scale; give more than 1")
        if self.backoff_factor >= 1:
            raise RunError(f"backoff_factor={self.backoff_factor!r} would not lower the loss scale; give less than 1")
        self._check_loss_scale()
        if not isinstance(self.device, str) or not _DEVICE.fullmatch(self.device):
            raise RunError(f"device={self.device!r} is unknown; choose {_DEVICES}")
        if self.nproc > 1 and ":" in self.device:
            each = f"nproc={self.nproc} needs one each; choose {type_of(self.device)}"
            raise RunError(f"device={self.device!r} is one GPU, and {each}")
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
                check_choice("size", self.size, sizes, f" (sizes of {self.workload})")
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
        object.__setattr__(self, "loss_scale", positive("loss_scale", self.loss_scale))
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
        """File and function of a user's workload; None for a built-in one."""
        match = None if self.workload in WORKLOADS else _OWN.fullmatch(self.workload)
        return None if match is None else (Path(match["file"]), match["function"])

    def check_profile(self) -> None:
        """Raise `RunError` if no step would be profiled. Checked only where a user enters a window: a shorter training
        is valid without it."""
        if self.profile and self.profile[0] >= self.steps:
            first, stop = self.profile
            raise RunError(
                f"profile='{first}:{stop}' begins at step {first}, and steps={self.steps} ends with step "
                f"{self.steps - 1}; begin it sooner or leave it out"
            )

    def check_file(self) -> None:
        """Raise `RunError` if the file of a user's workload is missing. Checked only before training: settings may be
        created and read on another machine."""
        if self.own is not None and not self.own[0].is_file():
            file = self.own[0]
            raise RunError(
                f"workload={self.workload!r}: there is no file {file}; give the path of a Python file that exists"
            )

    @property
    def spec(self) -> Size | None:
        """The chosen size of a built-in workload; None for a user's workload."""
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
        """All settings as JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> "TrainConfig":
        """The settings in `values`, as from `to_dict`. Raises `RunError` for an unknown setting or a wrong value."""
        names = [f.name for f in dataclasses.fields(cls)]
        for name in settings:
            if name not in names:
                raise unknown("setting", name, names)
        return cls(**settings)
