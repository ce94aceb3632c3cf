"""Watching a Lightning Trainer.

    from amp_core.record.lightning import WatchCallback

    trainer = Trainer(precision="16-mixed", callbacks=[WatchCallback("runs/a")])
    trainer.fit(module, loader)

Optimizers, scaler, accumulation and clipping are the Trainer's own and are detected automatically, also in manual
optimization with several optimizers.
"""

import os
from typing import Any

from amp_core.record.frameworks.callback import Watched, Watching
from amp_core.record.frameworks.requirements import needing

with needing("lightning"):
    import lightning
    from lightning.pytorch.callbacks import Callback

REQUESTED = {"16": "fp16", "bf16": "bf16"}
"""Recipe by the first part of `Trainer(precision=…)`."""


class WatchCallback(Watched, Callback):  # type: ignore[misc, unused-ignore]
    """Records each `fit` of a Trainer into `into`, further ones into `into`-2, `into`-3, …

    Args:
        into: folder of the run; it must not hold a run yet.
        every: gradients are measured tensor by tensor on every such optimizer step.
        options: the further arguments of `amp_core.watch`, e.g. `level`, `budget` or `profile`.
    """

    def __init__(self, into: str | os.PathLike[str], every: int = 10, **options: Any) -> None:
        super().__init__()
        self._watching = Watching(into, every, options)
        self._evaluated: set[str] = set()  # names of metrics that come from validation
        self._others: set[str] = set()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Everything is prepared: begin the run."""
        if not trainer.optimizers:
            return  # a module that trains nothing
        precision = str(trainer.precision)
        config = {
            "framework": f"lightning {lightning.__version__}",
            "trainer_precision": precision,
            "requested_precision": REQUESTED.get(precision.split("-")[0]),
            "accumulate_grad_batches": trainer.accumulate_grad_batches,
            "gradient_clip_val": trainer.gradient_clip_val,
            "first_step": trainer.global_step or None,  # of a resumed training
        }
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self._watching.begin(pl_module, trainer.optimizers, scaler=scaler, config=config)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Remember the metrics so far, which were logged in training."""
        self._others = set(trainer.callback_metrics) - self._evaluated

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Record the metrics that were logged in validation."""
        if not trainer.sanity_checking:
            results = {name: value for name, value in trainer.callback_metrics.items() if name not in self._others}
            self._evaluated |= results.keys()
            self._watching.evaluated(results)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """End the run."""
        self._watching.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """End the run as failed, or as stopped from the keyboard."""
        self._watching.end(exception)
