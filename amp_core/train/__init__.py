"""The instrumented training engine: a plain AMP training loop, its precision recipes and its workloads.

    >>> from amp_core.train import TrainConfig, train
    >>> summary = train(TrainConfig(workload="text-gpt", precision="fp16", steps=200), into="runs/a")
    >>> summary.loss_first, summary.loss_last, summary.skipped

`TrainConfig` and the tables `RECIPES` and `WORKLOADS` need no torch, so a form or a job queue can use them; `train` and
`Workload` import it on first use.
"""

from typing import TYPE_CHECKING, Any

from amp_core.settings.training import RECIPES, WORKLOADS, Recipe, Size, TrainConfig, WorkloadSpec

if TYPE_CHECKING:
    from amp_core.train.engine.training import Summary, train
    from amp_core.train.workloads import Workload

__all__ = ["RECIPES", "WORKLOADS", "Recipe", "Size", "Summary", "TrainConfig", "Workload", "WorkloadSpec", "train"]

_FROM_TORCH_HALF = {"train": "engine.training", "Summary": "engine.training", "Workload": "workloads"}


def __getattr__(name: str) -> Any:
    if name not in _FROM_TORCH_HALF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"amp_core.train.{_FROM_TORCH_HALF[name]}"), name)
