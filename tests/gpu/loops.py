"""A bare training loop written by hand, the same loop watched, and functions that time loops in turns.

loop = Loop(place, "text-gpt", "small", "fp16")
loop.run(10)
loop.close()
"""

import copy
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from amp_core.record import Recorder, watch
from amp_core.settings.training import TrainConfig
from amp_core.train.engine.recipes import Precision, backend_flags
from amp_core.train.engine.training import endless, make_optimizer
from amp_core.train.workloads import ShuffledBatches, Workload, build
from tests.gpu.checks import Place


class Loop:
    """A workload in a recipe on a device. With `into` it is watched; other options are those of `watch`.

    It repeats a few batches that are on the device already, or with `fresh` those of the workload. With `made`, the
    model is a copy of that workload's, which takes less time than initializing a large one.
    """

    def __init__(
        self,
        place: Place,
        workload: str,
        size: str,
        precision: str,
        *,
        batch_size: int | None = None,
        fused: bool = True,
        fresh: bool = False,
        made: Workload | None = None,
        into: Path | None = None,
        **watching: Any,
    ) -> None:
        self.place = place
        self.config = TrainConfig(
            workload=workload, size=size, precision=precision, batch_size=batch_size, fused=fused
        ).resolved()
        self._stack = ExitStack()
        self._stack.enter_context(backend_flags(self.config))
        self.precision = Precision(self.config, place.device)
        self.workload = build(self.config) if made is None else rebatched(made, self.config)
        self.model = self.workload.model.to(place.device, self.precision.weights)
        self.optimizer = make_optimizer(self.config, self.model)
        batches = endless(self.workload, place.device, self.precision.input_dtype)
        self.batches: Iterator[Any] = batches if fresh else itertools.cycle([next(batches) for _ in range(4)])
        self.recorder: Recorder | None = None
        self.losses: list[torch.Tensor] = []
        if into is not None:
            scaler = self.precision.scaler if self.precision.scaler.is_enabled() else None
            self.recorder = watch(self.model, self.optimizer, scaler=scaler, into=into, **watching)

    def run(self, steps: int) -> None:
        """Run this many steps and wait for the last."""
        self.run_without_waiting(steps)
        self.place.settle()

    def run_without_waiting(self, steps: int) -> None:
        """Queue this many steps."""
        scaler = self.precision.scaler
        for _ in range(steps):
            batch = next(self.batches)
            with self.precision.autocast():
                loss = self.workload.loss_fn(self.model, batch)
            scaler.scale(loss).backward()
            if self.recorder is not None:
                self.recorder.log(loss=loss)
            scaler.step(self.optimizer)
            scaler.update()
            self.optimizer.zero_grad(set_to_none=True)
            self.losses.append(loss.detach())

    def gradient_bytes(self) -> int:
        return sum(p.numel() * p.element_size() for p in self.model.parameters())

    def close(self) -> None:
        """Close the recorder and free everything on the device."""
        if self.recorder is not None:
            self.recorder.close()
        self._stack.close()
        del self.model, self.optimizer, self.workload, self.batches, self.recorder
        self.losses = []
        self.place.free()


def rebatched(made: Workload, config: TrainConfig) -> Workload:
    """A copy of a workload with the batch size of `config`."""
    assert isinstance(made.batches, ShuffledBatches) and config.batch_size is not None
    batches = ShuffledBatches(made.batches.count, config.batch_size, config.seed, made.batches.collate)
    return replace(made, model=copy.deepcopy(made.model), batches=batches)


def seconds_a_step(loop: Loop | Callable[[int], None], at_least_s: float, most: int = 200) -> tuple[float, int]:
    """Seconds per step after a warm-up, and the number of steps that take about `at_least_s`."""
    run = loop.run if isinstance(loop, Loop) else loop
    run(3)
    begun = time.perf_counter()
    run(3)
    took = (time.perf_counter() - begun) / 3
    return took, int(np.clip(round(at_least_s / took), 2, most))


Competitor = tuple[Callable[[], object], Callable[[], AbstractContextManager[object]]]
"""A function that is timed, and a context around it that is not."""


def alternate(place: Place, competitors: Mapping[str, Competitor], turns: int, spare_s: float) -> dict[str, np.ndarray]:
    """Seconds of each competitor in each turn; the order changes from turn to turn.

    If less than `spare_s` of the place's time is left, there are fewer turns than requested, but at least three.
    """
    seconds: dict[str, list[float]] = {name: [] for name in competitors}
    names = list(competitors)
    for turn in range(turns):
        if turn >= 3 and place.left_s < spare_s:
            break
        for k in range(len(names)):
            name = names[(turn + k) % len(names)]
            timed, around = competitors[name]
            with around():
                place.settle()
                begun = time.perf_counter()
                timed()
                place.settle()
                seconds[name].append(time.perf_counter() - begun)
    return {name: np.array(taken) for name, taken in seconds.items()}


def plain(timed: Callable[[], object]) -> Competitor:
    """A competitor without a context."""
    return timed, nullcontext


def quartiles(seconds: np.ndarray, base: np.ndarray) -> tuple[float, float, float]:
    """Quartiles of the ratios per turn: low, median, high."""
    low, middle, high = np.quantile(seconds / base, (0.25, 0.5, 0.75))
    return float(low), float(middle), float(high)


def in_words(ratio: tuple[float, float, float]) -> str:
    return f"{ratio[1]:.4f} ({ratio[0]:.4f} to {ratio[2]:.4f})"


@contextmanager
def scratch() -> Iterator[Path]:
    """A temporary folder for runs."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)
