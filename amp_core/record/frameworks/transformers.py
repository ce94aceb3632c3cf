"""Watching the Trainer of Hugging Face's transformers.

    from amp_core.record.transformers import WatchCallback

    trainer = Trainer(model=model, args=args, train_dataset=data, callbacks=[WatchCallback("runs/a")])
    trainer.train()

Precision, scaler, clipping and accumulation are the Trainer's own and are detected automatically. `fp16=True` on
a CPU trains in FP32, which the run and `diagnose` report.
"""

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

from amp_core.record.frameworks.callback import Watched, Watching
from amp_core.record.frameworks.requirements import needing
from amp_core.record.model.frames import local_variables
from amp_core.record.model.modules import is_compiled
from amp_core.record.torch_internals.patches import Patches

with needing("transformers"):
    import transformers

TIMES = ("_runtime", "_per_second")
"""Suffixes of evaluation metrics that are durations or rates, not results."""


class WatchCallback(Watched, transformers.TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Records each training of a Trainer into `into`, further ones into `into`-2, `into`-3, …

    Args:
        into: folder of the run; it must not hold a run yet.
        every: gradients are measured tensor by tensor on every such optimizer step.
        options: the further arguments of `amp_core.watch`, e.g. `level`, `budget` or `profile`.

    Give it to the Trainer's constructor: then an exception ends the run at once, as failed. One that is added later
    still sees those in a training step; others end the run when the program ends.
    """

    def __init__(self, into: str | os.PathLike[str], every: int = 10, **options: Any) -> None:
        self._watching = Watching(into, every, options)
        self._guards = Patches()

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The Trainer was created: from now on an exception in its `train` ends the run."""
        self._guard(_calling_trainer(), "train")

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Everything is prepared: begin the run."""
        model = kwargs["model"]
        trainer = _calling_trainer()
        if len(self._guards) == 0:
            self._guard(trainer, "training_step")
        if trainer is not None and is_compiled(trainer.model_wrapped):
            model = trainer.model_wrapped
        config = {
            "framework": f"transformers {transformers.__version__}",
            "requested_precision": "fp16" if args.fp16 else "bf16" if args.bf16 else None,
            "gradient_accumulation_steps": args.gradient_accumulation_steps,
            "max_grad_norm": args.max_grad_norm,
            "first_step": state.global_step or None,  # of a resumed training
        }
        self._watching.begin(model, kwargs["optimizer"], config=config)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record the results of the evaluation."""
        metrics = kwargs.get("metrics") or {}
        self._watching.evaluated({k: v for k, v in metrics.items() if k != "epoch" and not k.endswith(TIMES)})

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the run."""
        self._watching.end()

    def _guard(self, trainer: Any, name: str) -> None:
        if trainer is not None:
            self._guards.wrap(trainer, name, self._around)

    def _around(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            try:
                return original(*args, **kwargs)
            except BaseException as error:
                self._watching.end(error)
                raise

        return guarded


def _calling_trainer() -> Any:
    """The Trainer that is calling its callbacks. It does not pass itself to them."""
    frame = sys._getframe(1)
    while (caller := frame.f_back) is not None:
        frame = caller
        if isinstance(owner := local_variables(frame).get("self"), transformers.Trainer):
            return owner
    return None
