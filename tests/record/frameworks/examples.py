"""The first example of each framework's documentation, reduced in size: watched or unwatched, healthy or with a fault.

    done = EXAMPLES["lightning"].train("bf16", 250, into=folder, fault=None)
    done.losses                      # as reported by the framework

The data comes with scikit-learn (1,797 digits) and Python (the text of a module). FP16 works as on a GPU, with autocast
and a scaler; if a framework leaves them out on a CPU, the example adds them. On `cuda` (`device=`) each framework uses
its own.
"""

import argparse
import inspect
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

EVERY = 10
BATCH = 32
SCALE = 2.0**12


@dataclass
class Done:
    """The results of a training."""

    losses: list[float]
    parameters: set[str]


@dataclass(frozen=True)
class Example:
    """The example of one framework."""

    package: str
    train: Callable[..., Done]
    precisions: tuple[str, ...]
    faults: dict[str, tuple[str, str]]
    """What can be planted: in which precision, and the code that `diagnose` must find."""
    columns: tuple[str, ...] | None = None
    """Of `steps`, which must be full; all by default."""
    environment: dict[str, str] = field(default_factory=dict)


def digits(pixels: int = 8) -> tuple[np.ndarray, np.ndarray]:
    """Images of shape (1797, 1, pixels, pixels) with values from 0 to 1, and their digits; `pixels` is a multiple of
    8."""
    from sklearn.datasets import load_digits

    dataset = load_digits()
    images = (dataset.images / 16).astype("float32")
    return np.kron(images, np.ones((pixels // 8, pixels // 8), "float32"))[:, None], dataset.target.astype("int64")


def digit_loader(fault: str | None) -> torch.utils.data.DataLoader[Any]:
    x, y = digits()
    if fault == "data that is not finite":
        x[100::200] = np.inf
    rows = torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    return torch.utils.data.DataLoader(
        rows, BATCH, shuffle=True, drop_last=True, generator=torch.Generator().manual_seed(1)
    )


def accelerate(precision: str, steps: int, into: Path | None, fault: str | None = None, device: str = "cpu") -> Done:
    """The loop of Accelerate's `cv_example.py`: prepare all, a schedule, an evaluation after each epoch."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    from amp_core.record import watch

    AcceleratorState._reset_state(True)
    accelerator = Accelerator(mixed_precision=precision.replace("fp32", "no"), cpu=device == "cpu")
    if precision == "fp16" and device == "cpu":
        accelerator.native_amp, accelerator.scaler = True, torch.amp.GradScaler("cpu", SCALE, growth_interval=100)
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)]
    model: Any = nn.Sequential(*layers, nn.Flatten(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10))
    if fault == "a weight beyond FP16":
        with torch.no_grad():
            model[5].weight *= 1e7
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=3e-3 / 25)
    schedule: Any = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps)
    loader = digit_loader(fault)
    model, optimizer, loader, held_out, schedule = accelerator.prepare(
        model, optimizer, loader, digit_loader(None), schedule
    )
    recorder = watch(model, optimizer, into=into, every=EVERY) if into is not None else None
    losses: list[float] = []
    while len(losses) < steps:
        model.train()
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            if fault != "zero_grad forgotten":
                optimizer.zero_grad()
            losses.append(loss.item())
            if len(losses) == steps:
                break
        model.eval()
        with torch.no_grad():
            x, y = next(iter(held_out))
            accelerator.gather_for_metrics((model(x).argmax(dim=-1), y))
    if recorder is not None:
        recorder.close()
    return Done(losses, {name for name, _ in model.named_parameters()})


def transformers(precision: str, steps: int, into: Path | None, fault: str | None = None, device: str = "cpu") -> Done:
    """Like `run_clm.py`: a language model made from a configuration, on blocks of text, with an evaluation every 100
    steps."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

    from amp_core.record.transformers import WatchCallback

    class HalfOnCpu(Trainer):  # type: ignore[misc, unused-ignore]
        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            useless = fault == "a loss scale of 1"
            self.accelerator.native_amp = True
            self.accelerator.scaler = torch.amp.GradScaler(
                "cpu", 1.0 if useless else SCALE, growth_interval=10**6 if useless else 100
            )

    set_seed(0)
    text = np.frombuffer(inspect.getsource(argparse).encode()[:64_000], np.uint8).astype("int64").reshape(-1, 64)
    blocks = [{"input_ids": torch.from_numpy(block), "labels": torch.from_numpy(block)} for block in text]
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    config = GPT2Config(vocab_size=256, n_positions=64, n_embd=64, n_layer=2, n_head=4, **ends)
    with tempfile.TemporaryDirectory() as out:
        arguments = TrainingArguments(
            out,
            max_steps=steps,
            use_cpu=device == "cpu",
            bf16=precision == "bf16",
            fp16=precision == "fp16",
            learning_rate=1e-3,
            eval_strategy="steps",
            eval_steps=100,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        handed_in = precision == "fp16" and device == "cpu" and fault != "no scaler on a CPU"
        trainer = (HalfOnCpu if handed_in else Trainer)(
            GPT2LMHeadModel(config),
            arguments,
            train_dataset=blocks,
            eval_dataset=blocks[:16],
            callbacks=[WatchCallback(into, every=EVERY)] if into is not None else [],
        )
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return Done(losses, {name for name, _ in trainer.model.named_parameters()})


def lightning(precision: str, steps: int, into: Path | None, fault: str | None = None, device: str = "cpu") -> Done:
    """The autoencoder of Lightning's README and first tutorial."""
    from lightning import LightningModule, Trainer, seed_everything
    from lightning.pytorch.plugins import MixedPrecision

    from amp_core.record.lightning import WatchCallback

    losses: list[float] = []

    class LitAutoEncoder(LightningModule):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
            self.decoder = nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 64))

        def restored(self, batch: Any) -> torch.Tensor:
            x = batch[0].flatten(1)
            return nn.functional.mse_loss(self.decoder(self.encoder(x)), x)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            with torch.autocast(device, enabled=False) if fault == "autocast off" else torch.enable_grad():
                loss = self.restored(batch)
            self.log("train_loss", loss)
            losses.append(loss.item())
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", self.restored(batch))

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=1e-3)

    seed_everything(0, verbose=False)
    module = LitAutoEncoder()
    quiet: dict[str, Any] = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    scaler = torch.amp.GradScaler(device, SCALE, growth_interval=100)
    ways: dict[str, dict[str, Any]] = {
        "fp32": {},
        "bf16": {"precision": "bf16-mixed"},
        "fp16": {"plugins": [MixedPrecision("16-mixed", device, scaler)]},
    }
    callbacks = [WatchCallback(into, every=EVERY)] if into is not None else []
    trainer = Trainer(
        accelerator=device,
        devices=1,
        max_steps=steps,
        limit_val_batches=2,
        callbacks=callbacks,
        **quiet,
        **ways[precision],
    )
    trainer.fit(module, digit_loader(fault), torch.utils.data.DataLoader(digit_loader(None).dataset, BATCH))
    return Done(losses, {name for name, _ in module.named_parameters()})


def keras(precision: str, steps: int, into: Path | None, fault: str | None = None, device: str = "cpu") -> Done:
    """The convnet of keras.io's first example (`mnist_convnet`), with its dropout and `validation_split`."""
    import keras

    from amp_core.record.keras import WatchCallback

    class LossRecorder(keras.callbacks.Callback):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.losses: list[float] = []

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.losses.append(float(logs["loss"]))

    policies = {"fp32": "float32", "bf16": "mixed_bfloat16", "fp16": "mixed_float16"}
    keras.mixed_precision.set_global_policy(policies[precision])
    keras.utils.set_random_seed(0)
    x, y = digits(24)
    x = np.moveaxis(x, 1, 3)
    if fault == "data that is not finite":
        x[100::200] = np.inf
    model = keras.Sequential(
        [
            keras.Input((24, 24, 1)),
            keras.layers.Conv2D(8, 3, activation="relu"),
            keras.layers.MaxPooling2D(2),
            keras.layers.Conv2D(16, 3, activation="relu"),
            keras.layers.MaxPooling2D(2),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(10),
            keras.layers.Activation("softmax", dtype="float32"),
        ]
    )
    scaled = fault != "no loss scale"
    loss = keras.losses.CategoricalCrossentropy()
    model.compile("adam" if scaled else "sgd", loss, metrics=["accuracy"], auto_scale_loss=scaled, jit_compile=False)
    loss_recorder = LossRecorder()
    callbacks = [loss_recorder, *([WatchCallback(into, every=EVERY)] if into is not None else [])]
    one_hot = keras.utils.to_categorical(y, 10)
    rows = len(x) * 9 // 10 // BATCH * BATCH  # a whole number of batches
    per_epoch = rows // BATCH
    whole, rest = divmod(steps, per_epoch)
    if whole:
        held_out = (x[rows:], one_hot[rows:])
        model.fit(x[:rows], one_hot[:rows], BATCH, whole, verbose=0, callbacks=callbacks, validation_data=held_out)
    elif rest:
        model.fit(x[: rest * BATCH], one_hot[: rest * BATCH], BATCH, verbose=0, callbacks=callbacks)
    return Done(loss_recorder.losses, {weight.path for weight in model.trainable_weights})


_KERAS: dict[str, Any] = {
    "train": keras,
    "precisions": ("fp32", "bf16", "fp16"),
    "faults": {
        "no loss scale": ("fp16", "fp16-without-scaler"),
        "data that is not finite": ("fp16", "loss-nonfinite"),
    },
    "columns": ("loss", "loss_scale", "grad_norm", "lr", "samples", "step_ms", "optimizer_ms", "watch_ms"),
}

EXAMPLES: dict[str, Example] = {
    "accelerate": Example(
        "accelerate",
        accelerate,
        ("fp32", "bf16", "fp16"),
        {
            "a weight beyond FP16": ("fp16", "activation-overflow"),
            "data that is not finite": ("bf16", "loss-nonfinite"),
            "zero_grad forgotten": ("bf16", "unscale-per-microbatch"),
        },
    ),
    "transformers": Example(
        "transformers",
        transformers,
        ("fp32", "bf16", "fp16"),
        {
            "a loss scale of 1": ("fp16", "fp16-without-scaler"),
            "no scaler on a CPU": ("fp16", "autocast-inactive"),
        },
    ),
    "lightning": Example(
        "lightning",
        lightning,
        ("fp32", "bf16", "fp16"),
        {
            "autocast off": ("bf16", "autocast-inactive"),
            "data that is not finite": ("fp16", "loss-nonfinite"),
        },
    ),
    "keras": Example("keras", environment={"KERAS_BACKEND": "torch"}, **_KERAS),
    "keras-tensorflow": Example(
        "tensorflow",
        environment={"KERAS_BACKEND": "tensorflow", "CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"},
        **_KERAS,
    ),
}
