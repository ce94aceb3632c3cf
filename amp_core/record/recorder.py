"""`Recorder`: what `watch` returns. It holds what watches a training loop, and takes what the loop wants to add.

Where a loop is listened to is in `hooks`, what becomes of its steps in `steps`, and how they are written in
`row_writer`.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from amp_core.record.audit import Replay, audit
from amp_core.record.loop.hooks import Hooks
from amp_core.record.loop.sampling import Sampling
from amp_core.record.loop.steps import Steps
from amp_core.record.model import own
from amp_core.record.model import scaler_state as scaling
from amp_core.record.model.modules import is_compiled
from amp_core.record.model.parameters import unwrapped, written_class
from amp_core.record.observer import Observer
from amp_core.record.observers.signals.unknown_scaler import UnknownScaler
from amp_core.record.stats.measure import compile_ahead
from amp_core.schema import RunError
from amp_core.store import shutdown
from amp_core.store.writer import RunWriter

AUTOCAST = {"fp16": torch.float16, "bf16": torch.bfloat16}
"""What `Recorder.audit` can replay beside the run's own recipe."""

LOGGABLE = ("loss", "lr", "samples", "grad_norm")


class Recorder:
    """Use it as a context, or `close` it; else the run ends with the process."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizers: list[torch.optim.Optimizer],
        scaler: Any,
        writer: RunWriter,
        *,
        sampling: Sampling,
        kinds: frozenset[str],
        wanted: Callable[[str], bool],
        observers: Sequence[Observer] = (),
    ) -> None:
        unseen = kinds & {"output_grad", "activation"} if is_compiled(model) else set()
        self.writer = writer
        self._model = model
        self._steps = Steps(
            model,
            optimizers,
            scaler,
            writer,
            sampling=sampling,
            kinds=kinds - unseen,
            wanted=wanted,
            observers=observers,
        )
        self._phases = self._steps.phases
        self._phases.failed = self._watching_failed
        if kinds:  # kernels compile at their first use, which no step should have to pay for
            compile_ahead({self._steps.device, *(p.device for p in own.parameters(model) if not p.is_meta)})
        self._hooks = Hooks(model, scaler, self._steps)
        for unseen_scaler in (o for o in observers if isinstance(o, UnknownScaler)):
            unseen_scaler.adopt = self._adopt
        writer.before_end = self._end
        watching = f"watching {written_class(unwrapped(model)).__name__}"
        writer.event("started", name=writer.head.name, detail=watching, value=time.time())
        if unseen:
            detail = f"{' and '.join(sorted(unseen))}: hooks do not reach into a compiled graph"
            writer.event("warning", name="not recorded", detail=detail)

    def __repr__(self) -> str:
        return f"Recorder(into={str(self.writer.into)!r}, step={self.step}, hooks={len(self._hooks)})"

    @property
    def step(self) -> int:
        """The number of the present step, as `steps.step` has it: how many steps are over."""
        return self._steps.number

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is None:
            self.close()
        else:
            self.close(*shutdown.describe(kind, error))

    def log(self, **values: float | torch.Tensor) -> None:
        """Add what only the loop knows of the present step: `loss`, `lr`, `samples` or `grad_norm`.

        Between `optimizer.step()` and the next forward it belongs to the step just made, else to the coming one. The
        last value given for a step stands. Tensors are not waited for. Raises `RunError` for another name, and for what
        is no number.
        """
        with self._phases.watching(raises=True):
            for key, value in values.items():
                if key not in LOGGABLE:
                    raise RunError(f"{key}={value!r} cannot be logged; choose from {', '.join(LOGGABLE)}")
                if isinstance(value, torch.Tensor):
                    if value.numel() != 1:
                        raise RunError(f"{key} is a tensor of shape {tuple(value.shape)}; log one number per step")
                    value = value.detach().clone()
                elif value is not None:
                    value = _number(key, value)
                self._steps.log({key: value})

    def audit(
        self,
        closure: Callable[[], torch.Tensor],
        loss_scales: Sequence[float] | None = None,
        precision: str | None = None,
    ) -> None:
        """Measure what the recipe loses of each gradient, by replaying one batch in FP32 and in the recipe.

        `closure` computes and returns the loss of that batch; it is called once for FP32 and once for each of
        `loss_scales`, by default the present one. With `precision` `fp16` or `bf16`, what autocast to that would lose
        is measured, whatever the run itself uses. Nothing else changes: see `amp_core.record.audit`. Takes as long as
        so many forward and backward passes. Raises `RunError` before the first forward and for an unknown precision.
        """
        if not self._steps.precision.known:
            raise RunError("audit was called before the model's first forward; call it once training has begun")
        if precision is not None and precision not in AUTOCAST:
            raise RunError(f"precision={precision!r} cannot be audited; choose one of {', '.join(AUTOCAST)}")
        with self._phases.watching(raises=True):
            given = {
                id(p): p for o in self._steps.optimizers for g in o.param_groups for p in g["params"] if p.requires_grad
            }
            named = [(self._steps.names[key], p) for key, p in given.items() if key in self._steps.names]
            scaler = self._hooks.scaler
            present = scaler.get_scale() if scaling.is_active(scaler) else 1.0
            scales = loss_scales if loss_scales is not None else [present]
            dtype = AUTOCAST[precision] if precision is not None else self._steps.precision.autocast_dtype
            replay = Replay(self._model, [p for _, p in named], closure, self._steps.device, dtype)
            self._steps.auditing = True
            try:
                recipe = precision or str(self.writer.head.config.get("precision"))
                rows = audit(replay, [n for n, _ in named], scales, self._steps.last, recipe)
            finally:
                self._steps.auditing = False
            self.writer.append("audits", rows)

    def mirror(self, tracker: Any) -> None:
        """Send the headline numbers of every step from now on to `tracker` too, as `amp/loss`, `amp/loss_scale` and so
        on: a run of wandb, or anything with `log(dict, step=)`.

        Whatever the tracker does, training goes on: a thread of its own talks to it, and what goes wrong there is an
        event of this run. Steps are numbered as here. A wandb run takes nothing for a step that it is past: where the
        loop itself logs to it under other numbers, give this one a run of its own. Raises `RunError` without `log`.
        """
        from amp_core.record.mirror import Mirror

        self._steps.row_writer.mirrors.append(Mirror(tracker, self.writer))

    def paused(self) -> AbstractContextManager[None]:
        """While this context lasts, between two steps, the time belongs to no step: for a loop that has to wait."""
        return self._phases.left_out()

    def close(self, status: str = "finished", end_reason: str | None = None) -> None:
        """Remove every hook, restore every patched method, write what is left and the end. Twice is harmless."""
        self.writer.close(status, end_reason)

    def _end(self) -> None:
        """The run is ending, perhaps in the middle of anything."""
        try:
            self._hooks.remove()
        finally:
            self._steps.end()

    def _adopt(self, scaler: Any) -> Callable[[Any, Any], None]:
        """A scaler that `watch` was not given scales the loss: it is the run's from now on."""
        config = dict(self.writer.head.config)
        if not scaling.is_active(self._hooks.scaler):
            config["scaler"] = scaling.settings(scaler)
        else:  # a later one mostly begins as the first did, and each row has its own scale
            detail = "a new GradScaler scales the loss"
            self.writer.event("phase change", name="scaler", detail=detail, step=self._steps.number)
        self.writer.update_head(config={k: v for k, v in config.items() if k != "scaler_unseen"})
        return self._hooks.adopt(scaler)

    def _watching_failed(self, error: Exception) -> None:
        """Watching went wrong, and the training goes on."""
        if self._steps.watching_failed(error):
            self._hooks.remove()


def _number(key: str, value: Any) -> float:
    """A logged value that is no tensor, as a number: NumPy's arrays of one element are."""
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        return float(value.item() if hasattr(value, "item") else value)
    except (TypeError, ValueError, OverflowError):
        raise RunError(f"{key}={value!r:.80} is no number; log one number per step") from None
