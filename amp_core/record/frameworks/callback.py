"""Shared by the callbacks of all torch frameworks: begins a run, records evaluations, ends the run.

watching = Watching("runs/a", every=10, options={"level": "full"})
watching.begin(model, optimizer, config={"framework": "transformers 5.23.0"})
watching.evaluated({"eval_loss": 2.1})
watching.end()                   # or end(error), if an exception ended the training
"""

import os
from collections.abc import Mapping
from typing import Any

import torch

from amp_core.record.recorder import Recorder
from amp_core.record.watching import watch
from amp_core.schema import RunError
from amp_core.store import shutdown
from amp_core.store.urls import located

RESERVED = ("model", "optimizer", "scaler")
"""Arguments of `watch` that the framework provides."""


class Watching:
    """The run of one callback; if its trainer trains more than once, also the later runs: `runs/a-2`, `runs/a-3`."""

    def __init__(self, into: str | os.PathLike[str], every: int, options: Mapping[str, Any]) -> None:
        wrong = next((name for name in RESERVED if name in options), None)
        if wrong is not None:
            raise RunError(f"{wrong} cannot be given to a callback, which watches the framework's own; remove it")
        self._into = located(into)
        self._every = every
        self._options = dict(options)
        self._trainings = 0
        self._trackers: list[Any] = []
        self.recorder: Recorder | None = None

    def begin(self, model: torch.nn.Module, optimizers: Any, *, config: Mapping[str, Any], scaler: Any = None) -> None:
        """Watch a training that begins. The user's `config` overrides the framework's."""
        self.end()
        self._trainings += 1
        into = self._into if self._trainings == 1 else self._into.with_name(f"{self._into.name}-{self._trainings}")
        known = {key: value for key, value in config.items() if value is not None}
        options = self._options | {"config": known | dict(self._options.get("config") or {})}
        self.recorder = watch(model, optimizers, scaler=scaler, into=into, every=self._every, **options)
        for tracker in self._trackers:
            self.recorder.mirror(tracker)

    def mirror(self, tracker: Any) -> None:
        """Mirror every training to come to `tracker`, and the current one from now on: `Recorder.mirror`."""
        self._trackers.append(tracker)
        if self.recorder is not None and not self.recorder.writer.closed:
            self.recorder.mirror(tracker)

    def evaluated(self, results: Mapping[str, Any]) -> None:
        """Record an evaluation's numbers: as an event of the last step, and in the head as the latest."""
        if self.recorder is None or self.recorder.writer.closed:
            return
        numbers = {name: number for name, value in results.items() if (number := _number(value)) is not None}
        if numbers:
            writer = self.recorder.writer
            detail = ", ".join(f"{name} {value:.4g}" for name, value in numbers.items())
            writer.event("evaluated", name="held-out", detail=detail, step=max(0, self.recorder.step - 1))
            writer.update_head(results=dict(writer.head.results) | numbers)

    def end(self, error: BaseException | None = None) -> None:
        """End the run, as failed or stopped if `error` ended the training. A second call does nothing."""
        if self.recorder is not None:
            self.recorder.close(*(shutdown.describe(type(error), error) if error is not None else ()))


def _number(value: Any) -> float | None:
    if isinstance(value, torch.Tensor):
        return float(value) if value.numel() == 1 else None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


class Watched:
    """What the callbacks of frameworks offer beside the framework's own methods."""

    _watching: Watching

    @property
    def recorder(self) -> Recorder | None:
        """The present or last training's recorder."""
        return self._watching.recorder

    def mirror(self, tracker: Any) -> None:
        """Send the headline numbers of every step to `tracker` too, of trainings to come as well: a run of wandb, or
        anything with `log(dict, step=)`. As `Recorder.mirror`."""
        self._watching.mirror(tracker)
