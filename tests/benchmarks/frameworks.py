"""The cost of watching in each framework: `python -m tests.benchmarks.frameworks [--examples] [--only keras] …`.

For each framework, a training watched with the defaults and an unwatched one, with the same model and seed; and the
same with plain torch, which shows the framework's own share of the cost. The model is small, so its steps of a few
milliseconds show the minimal cost of a step; with `--examples` it is that of the framework's own example, with its
shapes and random values: BERT base on 16 pairs of sentences (Accelerate's `nlp_example.py`, Transformers'
`run_glue.py`), ResNet-18 on 256 pictures of CIFAR's size (Lightning's tutorial), Keras' `mnist_convnet.py`.

Each training runs in its own thread, which pauses after some steps, so that all run in one process, inside their
framework's loop, and take turns; a second unwatched training shows the noise. Ratios are taken turn by turn; their
interval is a bootstrap of the median. `--cpu-time` compares processor time instead of wall time, for a shared machine.
Keras runs on `KERAS_BACKEND`, by default torch; on TensorFlow in a separate process, with `--only keras`.
"""

import argparse
import functools
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from amp_core.record import watch
from tests.benchmarks.measuring import REST_S, machine, say, table

STEPS = 10
"""Steps in a turn: one of them is measured tensor by tensor at the defaults."""
WARM_UP = 2
"""Turns that are not counted: kernels compile in them, and a loop finds its ways in."""
RESAMPLES = 2000
WAYS = ("bare", "watched", "bare, once more")


class Baton:
    """A training in its own thread that runs `STEPS` steps per turn."""

    def __init__(self, train: Callable[["Baton"], None]) -> None:
        self._go, self._over = threading.Semaphore(0), threading.Semaphore(0)
        self._steps = 0
        self._last = False
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(train,), daemon=True)
        self._thread.start()

    def turn(self) -> None:
        """Run the next steps."""
        self._go.release()
        self._over.acquire()
        if self.error is not None:
            raise self.error

    def finish(self) -> None:
        """Run the training to its end."""
        self._last = True
        self._go.release()
        self._thread.join()

    def __call__(self) -> bool:
        """Called by the training before each step; returns whether to make another step."""
        if self._steps % STEPS == 0 and not self._last:
            if self._steps:
                self._over.release()
            self._go.acquire()
        self._steps += 1
        return not self._last

    def _run(self, train: Callable[["Baton"], None]) -> None:
        self._go.acquire()
        self._go.release()
        try:
            train(self)
        except BaseException as error:
            self.error = error
            self._over.release()


class Batches(torch.utils.data.IterableDataset[Any]):
    """Endless batches, until the baton ends the training, which pauses when it loads a batch."""

    def __init__(self, baton: Baton, make: Callable[[torch.Generator], Any]) -> None:
        self._baton = baton
        self._make = make

    def __iter__(self) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(1)
        while self._baton():
            yield self._make(generator)


class Task(NamedTuple):
    """The task of a training."""

    model: torch.nn.Module
    make: Callable[[torch.Generator], dict[str, torch.Tensor]]
    """A batch; its `labels` are what is to be found."""

    def loss(self, model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """The loss of `model`, which a framework may have wrapped."""
        if isinstance(self.model, torch.nn.Sequential):
            return torch.nn.functional.cross_entropy(model(batch["x"]), batch["labels"])
        return model(**batch).loss


def small(size: argparse.Namespace) -> Task:
    torch.manual_seed(0)
    width = size.width
    layers = [part for _ in range(6) for part in (torch.nn.Linear(width, width), torch.nn.LayerNorm(width))]
    make = functools.partial(numbered, "x", lambda g: torch.randn(size.batch, width, generator=g), size.batch)
    return Task(torch.nn.Sequential(*layers, torch.nn.Linear(width, 10)), make)


def numbered(key: str, inputs: Callable[[torch.Generator], torch.Tensor], batch: int, g: torch.Generator) -> Any:
    """A batch of samples, each of one of ten classes."""
    return {key: inputs(g), "labels": torch.randint(0, 10, (batch,), generator=g)}


def bert(size: argparse.Namespace) -> Task:
    """BERT base for pairs of sentences: 110 million weights, 1024 words in a batch."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    make = functools.partial(numbered, "input_ids", lambda g: torch.randint(0, 28_000, (16, 64), generator=g), 16)
    return Task(BertForSequenceClassification(BertConfig(num_labels=10)), make)


def resnet(size: argparse.Namespace) -> Task:
    """ResNet-18 on a batch of 256 pictures."""
    from transformers import ResNetConfig, ResNetForImageClassification

    torch.manual_seed(0)
    config = ResNetConfig(depths=[2, 2, 2, 2], hidden_sizes=[64, 128, 256, 512], layer_type="basic", num_labels=10)
    make = functools.partial(numbered, "pixel_values", lambda g: torch.randn(256, 3, 32, 32, generator=g), 256)
    return Task(ResNetForImageClassification(config), make)


def plain(size: argparse.Namespace, into: Path | None, baton: Baton) -> None:
    """Accelerate's loop without Accelerate: the difference is the framework's own cost."""
    task = (bert if size.examples else small)(size)
    model = task.model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    recorder = watch(model, optimizer, into=into) if into is not None else None
    for batch in Batches(baton, task.make):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = task.loss(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    if recorder is not None:
        recorder.close()


def accelerate(size: argparse.Namespace, into: Path | None, baton: Baton) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    task = (bert if size.examples else small)(size)
    model, optimizer = accelerator.prepare(task.model, torch.optim.AdamW(task.model.parameters(), lr=1e-4))
    recorder = watch(model, optimizer, into=into) if into is not None else None
    for batch in Batches(baton, task.make):
        loss = task.loss(model, batch)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    if recorder is not None:
        recorder.close()


def transformers(size: argparse.Namespace, into: Path | None, baton: Baton) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    from amp_core.record.transformers import WatchCallback

    def words(generator: torch.Generator) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, 256, (size.batch // 8, 64), generator=generator)
        return {"input_ids": ids, "labels": ids}

    if size.examples:
        task = bert(size)
    else:
        torch.manual_seed(0)
        ends = {"bos_token_id": 0, "eos_token_id": 0}
        config = GPT2Config(vocab_size=256, n_positions=64, n_embd=size.width // 2, n_layer=2, n_head=4, **ends)
        task = Task(GPT2LMHeadModel(config), words)
    with tempfile.TemporaryDirectory() as out:
        quiet = {"report_to": [], "save_strategy": "no", "logging_steps": 10**9, "disable_tqdm": True}
        args = TrainingArguments(out, max_steps=10**6, use_cpu=True, bf16=True, per_device_train_batch_size=1, **quiet)

        class Handing(Trainer):  # type: ignore[misc, unused-ignore]
            def get_train_dataloader(self) -> Any:
                return torch.utils.data.DataLoader(Batches(baton, task.make), batch_size=None)

        callbacks = [WatchCallback(into)] if into is not None else []
        data = [task.make(torch.Generator())]
        Handing(task.model, args, train_dataset=data, callbacks=callbacks).train()


def lightning(size: argparse.Namespace, into: Path | None, baton: Baton) -> None:
    from lightning import LightningModule, Trainer

    from amp_core.record.lightning import WatchCallback

    task = (resnet if size.examples else small)(size)

    class Module(LightningModule):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.network = task.model

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return task.loss(self.network, batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

    quiet: dict[str, Any] = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    callbacks = [WatchCallback(into)] if into is not None else []
    loader = torch.utils.data.DataLoader(Batches(baton, task.make), batch_size=None)
    Trainer(precision="bf16-mixed", accelerator="cpu", max_epochs=1, callbacks=callbacks, **quiet).fit(Module(), loader)


def keras(size: argparse.Namespace, into: Path | None, baton: Baton) -> None:
    import keras

    from amp_core.record.keras import WatchCallback

    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    keras.utils.set_random_seed(0)
    make = keras.layers
    shape: tuple[int, ...]
    if size.examples:  # mnist_convnet.py
        shape, batch = (28, 28, 1), 128
        convolutions = [part for n in (32, 64) for part in (make.Conv2D(n, 3, activation="relu"), make.MaxPooling2D(2))]
        layers = [*convolutions, make.Flatten(), make.Dropout(0.5)]
    else:
        shape, batch = (size.width,), size.batch
        layers = [part for _ in range(6) for part in (make.Dense(size.width), make.LayerNormalization())]
    model = keras.Sequential([keras.Input(shape), *layers, make.Dense(10, dtype="float32")])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.AdamW(1e-4), loss, jit_compile=False)

    class Handing(keras.callbacks.Callback):  # type: ignore[misc, unused-ignore]
        """TensorFlow prefetches batches, so the training pauses at the begin of a batch, not when it loads one."""

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if not baton():
                self.model.stop_training = True

    def made() -> Iterator[Any]:
        generator = np.random.default_rng(1)
        while True:
            yield generator.standard_normal((batch, *shape), np.float32), generator.integers(0, 10, batch)

    callbacks = [Handing(), *([WatchCallback(into)] if into is not None else [])]
    model.fit(made(), steps_per_epoch=10**6, verbose=0, callbacks=callbacks)


FRAMEWORKS = {
    "torch": plain,
    "accelerate": accelerate,
    "transformers": transformers,
    "lightning": lightning,
    "keras": keras,
}


def interval(values: np.ndarray) -> str:
    """The median, and the interval of 95 % of the medians of resampled turns."""
    picks = np.random.default_rng(0).integers(0, len(values), (RESAMPLES, len(values)))
    low, high = np.quantile(np.median(values[picks], axis=1), (0.025, 0.975))
    return f"{np.median(values):.3f} ({low:.3f} to {high:.3f})"


def measured(name: str, given: argparse.Namespace, folder: Path) -> list[list[object]]:
    """The rows of one framework."""
    rounds = [one_round(name, given, folder / f"{name}-{k}", k) for k in range(given.rounds)]
    bare, watched, again = (np.concatenate([seconds[way] for seconds in rounds]) for way in WAYS)
    more = np.median(watched - bare) / STEPS * 1e3
    step = np.median(bare) / STEPS * 1e3
    return [[name, f"{step:.2f} ms", f"{more:+.3f} ms", interval(watched / bare), interval(again / bare)]]


def one_round(name: str, given: argparse.Namespace, into: Path, number: int) -> dict[str, np.ndarray]:
    """Seconds of each turn, by variant. The placement of a training's memory makes it a few percent faster or slower
    for its whole life, so each round creates the trainings anew, in another order."""
    now = time.process_time if given.cpu_time else time.perf_counter
    names = [WAYS[(number + k) % len(WAYS)] for k in range(len(WAYS))]
    batons = {
        way: Baton(functools.partial(FRAMEWORKS[name], given, into if way == "watched" else None)) for way in names
    }
    seconds = {way: np.zeros(given.turns) for way in names}
    for turn in range(-WARM_UP, given.turns):
        for k in range(len(names)):
            way = names[(turn + k) % len(names)]
            time.sleep(REST_S)
            start = now()
            batons[way].turn()
            if turn >= 0:
                seconds[way][turn] = now() - start
    for baton in batons.values():
        baton.finish()
    return seconds


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--turns", type=int, default=30, help=f"turns of {STEPS} steps")
    options.add_argument("--rounds", type=int, default=1, help="how often all are made anew")
    options.add_argument("--width", type=int, default=512)
    options.add_argument("--batch", type=int, default=512)
    options.add_argument("--examples", action="store_true", help="the frameworks' own examples")
    options.add_argument("--only", default="", help="one of " + ", ".join(FRAMEWORKS))
    options.add_argument("--cpu-time", action="store_true")
    given = options.parse_args()
    os.environ.setdefault("KERAS_BACKEND", "torch")
    result, missing = [], []
    with tempfile.TemporaryDirectory() as folder:
        for name in FRAMEWORKS:
            if given.only not in ("", name):
                continue
            if find_spec(name) is None:
                missing.append(f"{name}: not measured, it is not installed")
                continue
            say(name)
            result += measured(name, given, Path(folder))
    clock = "processor time" if given.cpu_time else "time"
    print(f"{clock}, {given.rounds} × {given.turns} turns of {STEPS} steps, at the defaults (every=10), BF16\n")
    print(table(["framework", "a bare step", "watched, more", "watched ÷ bare (95 %)", "bare ÷ bare (95 %)"], result))
    print(f"\n{machine().replace('median (quartiles)', 'medians')}")
    for line in missing:
        print(line)


if __name__ == "__main__":
    main()
