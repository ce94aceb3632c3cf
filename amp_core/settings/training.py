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
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from amp_core.schema import RunError
from amp_core.settings.catalog import RECIPES, WORKLOADS, Recipe, Size, WorkloadSpec
from amp_core.settings.combinations import DEVICES, OWN, check_combination, check_workload
from amp_core.settings.setting import FRONT, RECORDED, SCALE, SWITCHES, Form, setting, unknown

__all__ = ["OPTIMIZERS", "RECIPES", "WORKLOADS", "Recipe", "Size", "TrainConfig", "WorkloadSpec", "unknown"]

OPTIMIZERS = ("adamw", "adam", "sgd")
"""What `optimizer` may be. `sgd` runs with momentum 0.9."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Every setting of a training run, checked on creation. Raises `RunError` with the argument and its value.

    To add a setting, add a field: its flag, help, check and field on the form are made from it (see `setting.py`). A
    docstring stands below a field where its help does not say it all; None is off, or the size's or recipe's own value.
    """

    workload: str = setting("text-gpt", "text", f"{', '.join(WORKLOADS)}, or FILE.py:FUNCTION", "NAME")
    """A name from `WORKLOADS`, or `FILE.py:FUNCTION` for a user's workload."""
    size: str | None = setting(
        None, "text", "; ".join(f"{w.name}: {', '.join(w.sizes)}" for w in WORKLOADS.values()), "SIZE"
    )
    """A size of the workload; None is its smallest. A user's workload has no sizes."""
    precision: str = setting("fp16", "choice", choices=tuple(RECIPES), shared=False)
    steps: int = setting(
        200,
        "whole",
        "optimizer steps to attempt",
        form=Form("Steps", "Optimizer steps to attempt, skipped ones included.", FRONT, options=(("step", 50),)),
        may_change=True,
    )
    batch_size: int | None = setting(
        None,
        "whole",
        "samples of one micro-batch",
        form=Form("Batch size", "Samples per batch. Empty: the default of the workload's size.", FRONT),
    )
    """Samples of one micro-batch; None is the size's own."""
    accumulate: int = setting(
        1,
        "whole",
        "micro-batches per optimizer step",
        form=Form(
            "Batches per step",
            "Number of batches whose gradients are summed before the optimizer steps once.",
            place=2,
        ),
    )
    lr: float | None = setting(
        None,
        "positive",
        "learning rate",
        form=Form(
            "Learning rate",
            "Empty: the default of the workload's size.",
            place=1,
            options=(("format", "%.3g"), ("placeholder", "default")),
        ),
    )
    """Learning rate; None is the size's own, or 1e-3 for a user's workload."""
    optimizer: str = setting("adamw", "choice", choices=OPTIMIZERS, form=Form("Optimizer", place=1))
    clip_norm: float | None = setting(
        None,
        "positive",
        "clip the unscaled gradients to this 2-norm",
        form=Form(
            "Clip gradient norm at",
            "If their joint 2-norm is larger, the unscaled gradients are shrunk to this value.",
            place=2,
            options=(("placeholder", "off"),),
        ),
    )
    loss_scale: float | str = setting("dynamic", "scale", "dynamic, or a fixed number such as 128", "dynamic|X")
    """`dynamic`, or a fixed positive number. Only recipes with a scaler take a number."""
    init_scale: float = setting(65536.0, "positive", "initial value of a dynamic loss scale")
    growth_interval: int = setting(
        2000,
        "whole",
        "clean steps after which the loss scale grows",
        form=Form(
            "Growth interval", "Clean steps before a dynamic loss scale grows.", SCALE, unit="steps", needs="scaler"
        ),
    )
    growth_factor: float = setting(
        2.0,
        "positive",
        "factor by which the loss scale grows",
        form=Form(
            "Growth factor",
            "Factor by which the loss scale grows.",
            SCALE,
            needs="scaler",
            options=(("format", "%.4g"),),
        ),
    )
    backoff_factor: float = setting(
        0.5,
        "positive",
        "factor by which the loss scale shrinks after a skipped step",
        form=Form(
            "Backoff factor",
            "Factor by which the loss scale shrinks after a skipped step.",
            SCALE,
            needs="scaler",
            options=(("format", "%.4g"),),
        ),
    )
    device: str = setting("auto", "text", DEVICES, "DEVICE", form=Form("Device", group=FRONT), may_change=True)
    """`auto` (an accelerator where there is one), `cpu`, or a type of accelerator, with a number or without: `cuda`."""
    seed: int = setting(
        0,
        "whole",
        "sets initial weights, data order and dropout",
        least=0,
        most=2**63 - 1,
        form=Form(
            "Seed", "Sets initial weights, data order and dropout: runs with the same seed see the same numbers.", FRONT
        ),
    )
    every: int = setting(
        10,
        "whole",
        "sample number ranges every N steps",
        form=Form("Ranges every", "Number ranges are recorded every N steps.", RECORDED, unit="steps"),
        may_change=True,
    )
    audit_every: int | None = setting(
        None,
        "whole",
        "replay a batch in FP32 every N steps and record what the recipe loses",
        form=Form(
            "Audit every",
            "Every N steps, one batch is replayed in FP32 to measure how much of its gradients the recipe loses.",
            RECORDED,
            unit="steps",
            initial=100,
            options=(("placeholder", "off"), ("step", 50)),
        ),
        may_change=True,
    )
    checkpoint_every: int | None = setting(
        None, "whole", "save the training's state every N steps and at the end, for --resume", may_change=True
    )
    profile: tuple[int, int] | None = setting(
        None,
        "window",
        "profile steps FIRST up to, not including, STOP, e.g. 50:53",
        "FIRST:STOP",
        form=Form(
            "Profile steps",
            "From the first step up to, not including, the second, e.g. 20:23. Shown on Tensor cores and Step cost.",
            RECORDED,
            initial="20:23",
            options=(("placeholder", "none"),),
        ),
        may_change=True,
    )
    islands: tuple[str, ...] = setting((), "names", "modules that compute in FP32 inside autocast", "A,B,…")
    pad_to: int | None = setting(None, "whole", "multiply linear layers with sizes rounded up to a multiple of N")
    trace_ops: int | None = setting(
        None,
        "whole",
        "trace every operator of one step, with its dtypes; step 2 if none is given",
        "STEP",
        least=0,
        alone=2,  # the third: the first two allocate state and buffers
        form=Form(
            "Trace operators",
            "Which operator ran in which precision, and why, in the third step. Shown on Precision map.",
            RECORDED,
            initial=True,
        ),
        may_change=True,
    )
    blocks: bool = setting(
        False, "switch", "record how operands fill the blocks of 8- and 4-bit formats", may_change=True
    )
    updates: bool = setting(
        False, "switch", "compare the updates of FP32 weights with exact updates too", may_change=True
    )
    nproc: int = setting(
        1,
        "whole",
        "processes that train together, with DDP",
        shared=False,
        form=Form(
            "Processes",
            "Number of processes that torchrun starts: they average their gradients (DDP), and on GPUs take one each.",
            place=2,
            needs="gpus",
            options=(("step", 1),),
        ),
    )
    fused: bool = setting(
        False,
        "switch",
        "use the optimizer's fused kernel",
        form=Form("Fused optimizer", "One kernel updates all weights.", SWITCHES, place=2),
    )
    channels_last: bool = setting(
        False,
        "switch",
        "store images and convolution weights in channels-last memory format",
        form=Form("Channels last", "For convolutions: the layout that tensor cores prefer.", SWITCHES, place=2),
    )
    fp8: bool = setting(False, "switch", "the same as precision fp8, with precision bf16")
    """An older spelling: with precision `bf16` it becomes precision `fp8`."""
    keep_bf16: tuple[str, ...] | None = setting(
        None,
        "names",
        "modules whose linear layers stay in BF16 with 8- and 4-bit precisions (default: the head)",
        "A,B,…",
        unset="the head",
    )
    """Names of modules whose linear layers are not quantized; None is the last linear layer, usually the head."""
    stochastic_rounding: bool = setting(
        False,
        "switch",
        "round output gradients stochastically, so that they are unbiased; with nvfp4",
        form=Form(
            "Stochastic rounding",
            "Rounds output gradients stochastically, so that they are unbiased. With NVFP4.",
            SWITCHES,
            place=3,
            needs="nvfp4",
        ),
    )
    hadamard: bool = setting(
        False,
        "switch",
        "spread outliers with a random Hadamard transform in the weight-gradient GEMM; with nvfp4",
        form=Form(
            "Hadamard transform",
            "Spreads outliers over 16 values in the weight-gradient GEMM. With NVFP4.",
            SWITCHES,
            place=3,
            needs="nvfp4",
        ),
    )
    compile: bool = setting(
        False,
        "switch",
        "run the model through torch.compile",
        form=Form(
            "torch.compile",
            "The first steps take much longer because the model is compiled.",
            SWITCHES,
            place=1,
            needs="compiler",
        ),
        may_change=True,
    )
    tf32: bool | None = setting(
        None, "switch", "TF32 on CUDA tensor cores, overriding the recipe", unset="the recipe's own"
    )
    """TF32 inside CUDA's matrix units; None is what the recipe says."""
    cudnn_benchmark: bool = setting(False, "switch", "let cuDNN benchmark its algorithms and use the fastest")
    deterministic: bool = setting(
        False,
        "switch",
        "deterministic algorithms only",
        form=Form(
            "Deterministic algorithms",
            "A repeated run gives identical bits; some operators become slower, and a few raise an error.",
            SWITCHES,
            place=1,
        ),
    )
    evaluate: bool = setting(True, "switch", "evaluate the loss on held-out data at the end", may_change=True)

    def __post_init__(self) -> None:
        check_workload(self)
        for field in dataclasses.fields(self):
            one = field.metadata["setting"]
            value = one.checked(field.name, getattr(self, field.name), optional=field.default is None)
            object.__setattr__(self, field.name, value)
        check_combination(self)
        if self.fp8:
            object.__setattr__(self, "precision", "fp8")
            object.__setattr__(self, "fp8", False)

    @property
    def recipe(self) -> Recipe:
        """The precision recipe's facts."""
        return RECIPES[self.precision]

    @property
    def own(self) -> tuple[Path, str] | None:
        """File and function of a user's workload; None for a built-in one."""
        match = None if self.workload in WORKLOADS else OWN.fullmatch(self.workload)
        return None if match is None else (Path(match["file"]), match["function"])

    @property
    def task(self) -> str:
        """Workload and size, for names of folders: `text-gpt-tiny`, or `my_task-build` of a user's workload."""
        own = self.own
        return f"{own[0].stem}-{own[1]}" if own is not None else f"{self.workload}-{self.resolved().size}"

    def check_profile(self) -> None:
        """Raise `RunError` if no step would be profiled. Checked only where a user enters a window: a shorter training
        is valid without it."""
        if self.profile and self.profile[0] >= self.steps:
            first, stop = self.profile
            raise RunError(
                f"profile='{first}:{stop}' starts at step {first}, but steps={self.steps} ends with step "
                f"{self.steps - 1}; start it earlier or leave it out"
            )

    def check_file(self) -> None:
        """Raise `RunError` if the file of a user's workload is missing. Checked only before training: settings may be
        created and read on another machine."""
        if self.own is not None and not self.own[0].is_file():
            file = self.own[0]
            raise RunError(
                f"workload={self.workload!r}: the file {file} does not exist; give the path of an existing Python file"
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
