"""`Recorder`, which `watch` returns: it owns the hooks and observers, and takes values that the loop adds.

`hooks` attaches to the loop, `steps` turns its calls into steps, and `row_writer` writes their rows.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from amp_core.quantization import RECIPES, find_recipe, is_recipe
from amp_core.record.audit import Replay, audit
from amp_core.record.compiled_audit import compiled_audit
from amp_core.record.forward_audit import forward_audit
from amp_core.record.loop.hooks import Hooks
from amp_core.record.loop.sampling import Sampling
from amp_core.record.loop.steps import Steps
from amp_core.record.model import own
from amp_core.record.model import scaler_state as scaling
from amp_core.record.model.modules import is_compiled
from amp_core.record.model.parameters import unwrapped, written_class
from amp_core.record.observer import Observer
from amp_core.record.observers.signals.risky_ops import operators_inspected
from amp_core.record.observers.signals.unknown_scaler import UnknownScaler
from amp_core.record.quantized_products import QuantizedProducts
from amp_core.record.stats.measure import compile_ahead
from amp_core.record.step_phases import count_calls
from amp_core.record.torch_internals.captures import capturing
from amp_core.record.torch_internals.compiling import has_compiled
from amp_core.schema import RunError
from amp_core.store import shutdown
from amp_core.store.writer import RunWriter

AUTOCAST = {"fp16": torch.float16, "bf16": torch.bfloat16}
"""What `Recorder.audit` can replay beside the run's own recipe."""

LOGGABLE = ("loss", "lr", "samples", "grad_norm")


class Recorder:
    """Use it as a context manager or call `close`; otherwise the run ends with the process."""

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
        if kinds:  # kernels compile at their first use, whose time must not count for a step
            compile_ahead({self._steps.device, *(p.device for p in own.parameters(model) if not p.is_meta)})
        self._hooks = Hooks(model, scaler, self._steps)
        count_calls(self._phases)
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
        """The number of the current step, as in `steps.step`: the count of finished steps."""
        return self._steps.number

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is None:
            self.close()
        else:
            self.close(*shutdown.describe(kind, error))

    def log(self, **values: float | torch.Tensor) -> None:
        """Add values of the current step that only the loop knows: `loss`, `lr`, `samples` or `grad_norm`.

        Between `optimizer.step()` and the next forward, values belong to the step just made, else to the coming one. A
        later value of a step replaces an earlier one. Does not wait for tensors. Raises `RunError` for other names, and
        for values that are not numbers. Does nothing while a CUDA graph is captured: what it computes then, it computes
        again in every replay, of which nothing is seen.
        """
        if capturing():
            return
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
        *,
        forward: bool = False,
        compiled: bool = False,
    ) -> None:
        """Measure what the recipe loses of each gradient, by replaying one batch in FP32 and in the recipe.

        `closure` computes and returns the loss of that batch; it is called once for FP32 and once for each of
        `loss_scales`, by default the current one. With `precision` `fp16` or `bf16`, measures what autocast to that
        dtype would lose, whichever recipe the run uses; with a recipe of `amp_core.quantization` (`mxfp8`, `nvfp4`,
        `fp8-rowwise`, …), what quantizing the operands of all linear layers would, at the loss scale 1. Nothing else
        changes: see `amp_core.record.audit`. Takes the time of as many forward and backward passes. Raises `RunError`
        before the first forward, for an unknown precision, and where no linear layer can be quantized.

        `forward`: also measure how far the output of each module is from that in FP32, `run.forward_audits`; takes the
        time of two more passes. Compiled code runs in eager mode for them, which an event says; its operators are
        inspected then, as those of eager code are in the first step.

        `compiled`: also measure how far the output of each module in compiled code is from that in eager mode,
        `run.compiled_audits`; compiles the forward once more. Raises `RunError` if nothing is compiled.
        """
        if not self._steps.precision.known and not self._steps.last:
            raise RunError("audit was called before the model's first forward; call it after training has started")
        if not self._steps.precision.known and precision is None:
            raise RunError(
                "audit cannot tell the run's precision, because no forward of the model was seen; give precision="
                f"{' or '.join(map(repr, AUTOCAST))}"
            )
        quantized = find_recipe(precision) if is_recipe(precision) else None
        if precision is not None and precision not in AUTOCAST and quantized is None:
            choices = ", ".join([*AUTOCAST, *RECIPES])
            raise RunError(f"precision={precision!r} cannot be audited; choose one of {choices}")
        if quantized is not None and is_compiled(self._model):
            raise RunError(
                f"precision={precision!r} quantizes linear layers, which a compiled graph hides; audit the model "
                "without torch.compile"
            )
        if quantized is not None and loss_scales is not None:
            raise RunError(
                f"loss_scales={loss_scales!r} has no effect with precision={precision!r}, which has its own scales; "
                "remove it"
            )
        with self._phases.watching(raises=True):
            given = {
                id(p): p for o in self._steps.optimizers for g in o.param_groups for p in g["params"] if p.requires_grad
            }
            named = [(self._steps.names[key], p) for key, p in given.items() if key in self._steps.names]
            scaler = self._hooks.scaler
            present = scaler.get_scale() if scaling.is_active(scaler) else 1.0
            scales = loss_scales if loss_scales is not None else [present]
            dtype = AUTOCAST.get(precision or "", self._steps.precision.autocast_dtype)
            products = QuantizedProducts(quantized, self._model) if quantized else None
            replay = Replay(self._model, [p for _, p in named], closure, self._steps.device, dtype)
            self._steps.auditing = True
            try:
                recipe = quantized.name if quantized else precision or str(self.writer.head.config.get("precision"))
                rows = audit(replay, [n for n, _ in named], scales, self._steps.last, recipe, products)
                if forward:
                    model = unwrapped(self._model)
                    step, unseen = self._steps.last, has_compiled()
                    inspecting = operators_inspected(self.writer, model, step) if unseen else None
                    outputs = forward_audit(replay, model, step, recipe, products, inspecting)
                    self.writer.append("audits", outputs)
                    if unseen:
                        detail = "outputs of modules, in eager mode: hooks do not reach into compiled graphs"
                        self.writer.event("audited", detail=detail, step=self._steps.last)
                if compiled:
                    differences = compiled_audit(replay, unwrapped(self._model), self._steps.last, recipe)
                    self.writer.append("audits", differences)
            finally:
                self._steps.auditing = False
            self.writer.append("audits", rows)

    def mirror(self, tracker: Any) -> None:
        """Also send the headline numbers of every step from now on to `tracker`, as `amp/loss`, `amp/loss_scale` and so
        on. A tracker is a wandb run, or any object with `log(dict, step=)`.

        A separate thread calls the tracker, so training continues whatever it does; its errors become an event of this
        run. Step numbers are those of this run. A wandb run accepts no values for earlier steps: if the loop itself
        logs to it under other step numbers, pass a separate wandb run here. Raises `RunError` if `tracker` has no
        `log`.
        """
        from amp_core.record.mirror import Mirror

        self._steps.row_writer.mirrors.append(Mirror(tracker, self.writer))

    def paused(self) -> AbstractContextManager[None]:
        """Exclude the time within this context from every step, for a loop that has to wait between two steps."""
        return self._phases.left_out()

    def close(self, status: str = "finished", end_reason: str | None = None) -> None:
        """Remove every hook, restore every patched method, write pending rows and the end of the run. A second call
        does nothing."""
        self.writer.close(status, end_reason)

    def _end(self) -> None:
        """The run is ending, perhaps in the middle of anything."""
        count_calls(self._phases, False)
        try:
            self._hooks.remove()
        finally:
            self._steps.end()

    def _adopt(self, scaler: Any) -> Callable[[Any, Any], None]:
        """Record a scaler that was not passed to `watch`, and that scales the loss, as the run's from now on."""
        config = dict(self.writer.head.config)
        if not scaling.is_active(self._hooks.scaler):
            config["scaler"] = scaling.settings(scaler)
        else:  # a later scaler usually has the same settings, and each row has its own loss scale
            detail = "a new GradScaler scales the loss"
            self.writer.event("phase change", name="scaler", detail=detail, step=self._steps.number)
        self.writer.update_head(config={k: v for k, v in config.items() if k != "scaler_unseen"})
        return self._hooks.adopt(scaler)

    def _watching_failed(self, error: Exception) -> None:
        """Record that watching failed; the training continues."""
        if self._steps.watching_failed(error):
            self._hooks.remove()


def _number(key: str, value: Any) -> float:
    """A logged value that is not a tensor, as a number; NumPy arrays of one element count as numbers."""
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        return float(value.item() if hasattr(value, "item") else value)
    except (TypeError, ValueError, OverflowError):
        raise RunError(f"{key}={value!r:.80} is not a number; log one number per step") from None
