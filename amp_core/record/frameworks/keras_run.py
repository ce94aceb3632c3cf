"""The run of one `fit`, from steps with gradients as torch tensors.

run = KerasRun("runs/a", model, [model.optimizer], every=10, config={})
run.began(lambda: Seen(…))     # the gradients are ready, the optimizer has not used them yet
run.made(iterations)           # the optimizer has made or skipped the step
run.close()
"""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from amp_core.formats import FORMAT_OF_DTYPE, autocast_dtypes, element_bytes
from amp_core.record.backends import backend_of, widened
from amp_core.record.environment import environment
from amp_core.record.frameworks.background_rows import BackgroundRows
from amp_core.record.frameworks.requirements import needing
from amp_core.record.loop.attempt import Attempt
from amp_core.record.loop.error_budget import ErrorBudget
from amp_core.record.loop.row_writer import RowWriter
from amp_core.record.loop.sampling import Sampling
from amp_core.record.mirror import Mirror
from amp_core.record.stats.layout import dtype_name, measurable
from amp_core.record.stats.measure import measure_together
from amp_core.record.stats.norms import norms
from amp_core.record.step_phases import Phases
from amp_core.store.resilient_writer import TrainingWriter

with needing("keras"):
    import keras


@dataclass
class Seen:
    """The values of a step, just before the optimizer uses them."""

    names: list[str]
    """`variable.path` of each variable with a gradient."""
    grads: list[torch.Tensor]
    loss: torch.Tensor | float | None
    scale: torch.Tensor | float | None
    """The loss scale; None if the optimizer does not scale."""
    tracker: torch.Tensor | float | None
    iterations: torch.Tensor | int
    rate: Callable[[], float]
    samples: int = 0
    """0 if unknown."""
    optimizer: int = 0
    """Index among the model's optimizers."""


class KerasRun:
    """Writes the run folder of one training by these optimizers, which number them in `steps.optimizer`."""

    def __init__(
        self,
        into: str | os.PathLike[str],
        model: Any,
        optimizers: Sequence[Any],
        every: int,
        config: Mapping[str, Any],
        *,
        background: bool = False,
    ) -> None:
        """With `background`, a thread writes the rows: for steps that do not run in Python."""
        scalers = [o for o in optimizers if isinstance(o, keras.optimizers.LossScaleOptimizer)]
        scaled = bool(scalers)
        dtype = _compute_dtype(model)
        recipe = FORMAT_OF_DTYPE[dtype].name if dtype in FORMAT_OF_DTYPE else dtype
        settings = {
            "source": "watch",
            "framework": f"keras {keras.__version__} ({keras.backend.backend()} {_backend_version()})",
            "requested_precision": recipe if dtype in autocast_dtypes() else None,
            "every": every,
            "kinds": ["weight_grad"],
            "autocast_dtype": dtype if dtype in autocast_dtypes() else None,
            "precision": "fp16-unscaled" if recipe == "fp16" and not scaled else recipe,
            "scaler": _scaler(scalers[0]) if scaled else None,
            "optimizers": [type(getattr(o, "inner_optimizer", o)).__name__ for o in optimizers],
            "lr": float(optimizers[0].learning_rate),
        }
        self._writer = TrainingWriter(
            into,
            config={k: v for k, v in settings.items() if v is not None or k != "requested_precision"} | dict(config),
            environment=environment(),
            model=_summary(model),
        )
        self._backend = backend_of(_device_of(model))
        self._phases = Phases(self._backend.clock())
        self._error_budget = ErrorBudget(self._writer)
        self._phases.failed = self._watching_failed
        self._sampling = Sampling(every)
        self._row_writer = RowWriter(self._writer, self._phases, self._sampling)
        self._background = BackgroundRows(self._row_writer.send, self._watching_failed) if background else None
        self._open: tuple[Attempt, torch.Tensor | int] | None = None
        self._made: list[Attempt] = []
        self._seen: set[str] = set()
        self._step = 0
        self._given_up = False  # watching failed too often
        self._optimizers = len(optimizers)
        self._stepped: set[int] = set()  # optimizers that have stepped in the current step
        self._batches = 0
        self._sees_forward = False  # whether `enter` is called before a batch's forward
        measure_together([torch.zeros(1, device="cpu")])  # compiles at its first use
        self._writer.before_end = self._empty
        self._writer.event("started", name=self._writer.head.name, detail=f"watching {type(model).__name__}")
        self.not_seen("output_grad: layers of Keras do not show theirs")

    def not_seen(self, what: str) -> None:
        """Write an event about what cannot be recorded, and why."""
        self._writer.event("warning", name="not recorded", detail=what)

    def watching(self) -> AbstractContextManager[Any]:
        """A context in phase `watch`. Exceptions in it are reported, not propagated."""
        return self._phases.watching()

    def enter(self, phase: str) -> None:
        """The step is in `phase` now: one of `amp_core.phases.PHASES`."""
        if phase == "forward":
            self.send()
            self._sees_forward = True
        self._seen.add(phase)
        self._phases.enter(phase)

    def began(self, look: Callable[[], Seen], ago_s: float = 0.0) -> None:
        """The optimizer is about to apply the gradients that `look` returns, or was `ago_s` seconds ago."""
        if self._given_up:
            return
        self._phases.enter("optimizer", ago_s)
        with self._phases.watching():
            seen = look()
            if self._background is None:
                self.send()
            if seen.optimizer in self._stepped:
                self._next_number()
            due = self._sampling.due(self._step) and not self._error_budget.paused(self._step)
            attempt = Attempt(self._step, seen.optimizer, sampled=due, scaled=seen.scale is not None)
            attempt.gradients = seen.names
            attempt.put("loss", seen.loss)
            attempt.put("loss_scale", seen.scale)
            attempt.put("growth_tracker", seen.tracker)
            pairs = [(n, g) for n, g in zip(seen.names, seen.grads, strict=True) if measurable(g)] if due else []
            if pairs:
                named = [(name, dtype_name(grad.dtype)) for name, grad in pairs]
                attempt.add("weight_grad", named, measure_together([grad for _, grad in pairs]))
            if seen.grads and not attempt.all_measured:
                values, attempt.norm_order = norms(seen.grads)
                attempt.put("norms", values)
            attempt.lr = seen.rate()
            attempt.samples = seen.samples
            self._open = (attempt, seen.iterations)

    def send(self) -> None:
        """The attempted steps are complete: write their rows."""
        made, self._made = self._made, []
        if made and self._background is not None:
            self._background.take(made)
        elif made:
            with self._phases.watching():
                self._row_writer.send(made)

    def made(self, iterations: torch.Tensor | int) -> None:
        """The optimizer counts `iterations` now, as many as before if it skipped the step."""
        opened, self._open = self._open, None
        if opened is None:
            return
        attempt, before = opened
        with self._phases.watching():
            attempt.put("found_inf", _alike(iterations, before))
            attempt.memory = self._backend.memory_bytes()
            attempt.time_s = self._writer.time_s()
            attempt.seen = frozenset(self._seen)
            self._seen.clear()
            self._made.append(attempt)
            self._stepped.add(attempt.optimizer)
            if len(self._stepped) == self._optimizers:
                self._next_number()
        attempt.spans = self._phases.take()
        another = bool(self._stepped) and self._sees_forward  # another optimizer steps in the same batch
        self._phases.enter("forward" if another else "data")
        if another:
            self._seen.add("forward")

    def evaluated(self, results: Mapping[str, Any]) -> None:
        """Record an evaluation's numbers: as an event of the last step, and in the head as the latest."""
        numbers = {name: float(value) for name, value in results.items()}
        detail = ", ".join(f"{name} {value:.4g}" for name, value in numbers.items())
        self._writer.event("evaluated", name="held-out", detail=detail, step=max(0, self._step - (not self._stepped)))
        self._writer.update_head(results=dict(self._writer.head.results) | numbers)

    def batch_ended(self) -> None:
        """A batch is over, with or without a step."""
        self._batches += 1
        self._phases.enter("data")
        self._seen.discard("forward")

    def mirror(self, tracker: Any) -> None:
        """Send the headline numbers of every step from now on to `tracker` too: `Recorder.mirror`."""
        self._row_writer.mirrors.append(Mirror(tracker, self._writer))

    def close(self, status: str = "finished", end_reason: str | None = None) -> None:
        """Write the remaining rows, and end the run."""
        if self._batches and not self._step and not self._stepped:
            self.not_seen("steps: none of the model's optimizers applied gradients, as its attributes or its own")
        self._writer.close(status, end_reason)

    def _watching_failed(self, error: Exception) -> None:
        """Watching raised `error`: the step is not measured further, and the training continues."""
        self._open = None
        self._given_up = self._error_budget.note(error, self._step)

    def _next_number(self) -> None:
        self._step += 1
        self._stepped.clear()

    def _empty(self) -> None:
        if self._background is not None:
            self._background.finish()
        made, self._made = self._made, []
        self._row_writer.empty(made)


def _alike(one: torch.Tensor | int, other: torch.Tensor | int) -> torch.Tensor | float:
    """1 if two counts are equal, else 0; on their device."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return widened(one.detach().to(other.device) == other)
    return float(one == other)


def _device_of(model: Any) -> torch.device:
    """The type of device that holds weights of the model beside the CPU; the CPU for another backend than torch."""
    kinds = {w.value.device.type for w in model.weights} if keras.backend.backend() == "torch" else set()
    return torch.device(next(iter(kinds - {"cpu"}), "cpu"))


def _compute_dtype(model: Any) -> str:
    """The compute dtype of most layers with weights."""
    layers = [layer for layer in model._flatten_layers() if layer.weights and not layer._layers]
    dtypes = [str(layer.compute_dtype) for layer in layers] or [str(model.compute_dtype)]
    return max(set(dtypes), key=dtypes.count)


def _scaler(optimizer: Any) -> dict[str, Any]:
    return {
        "enabled": True,
        "init_scale": float(optimizer.initial_scale),
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": int(optimizer.dynamic_growth_steps),
    }


def _summary(model: Any) -> dict[str, Any]:
    """As `environment.model_summary`, with the names of Keras."""
    weights = model.weights
    trained = model.trainable_weights
    sizes = [int(torch.Size(w.shape).numel()) for w in weights]
    dtypes = [str(w.dtype) for w in weights]
    return {
        "class": type(model).__name__,
        "parameters": sum(sizes),
        "trainable": sum(int(torch.Size(w.shape).numel()) for w in trained),
        "parameter_bytes": sum(n * (element_bytes(d) or 4) for n, d in zip(sizes, dtypes, strict=True)),
        "tensors_by_dtype": {d: dtypes.count(d) for d in sorted(set(dtypes))},
        "modules": len(list(model._flatten_layers())),
        "layers": {layer.path: type(layer).__name__ for layer in model._flatten_layers(include_self=False)},
        "shapes": {w.path: list(w.shape) for w in weights},
        "tied": {},
    }


def _backend_version() -> str:
    if keras.backend.backend() == "torch":
        return str(torch.__version__)
    import tensorflow as tf

    return str(tf.__version__)
