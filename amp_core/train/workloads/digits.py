"""scikit-learn's 1,797 handwritten digits, 8×8 pixels each: the images of `digits-cnn` and `image-resnet`.

>>> workload = digits_workload(model, config, name="digits", scaled=lambda grey: grey / 16)
>>> images, labels = next(iter(workload.batches))          # [N, 1, 8, 8] float32, [N] int64
"""

import functools
import hashlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from amp_core.schema import RunError
from amp_core.settings.training import TrainConfig
from amp_core.train.workloads import ShuffledBatches, Workload

HELD_OUT_FRAC = 0.2

FILE = "datasets/data/digits.csv.gz"
"""Where scikit-learn has the digits, a row for each: 64 grey values and the digit."""

Batch = tuple[torch.Tensor, torch.Tensor]
Images = Callable[[torch.Tensor], torch.Tensor]


def digits_workload(
    model: nn.Module,
    config: TrainConfig,
    *,
    name: str,
    scaled: Images,
    seen: Images = lambda images: images,
    max_held_out: int | None = None,
    held_out_batch: int = 60,
) -> Workload:
    """The workload of recognising the digits. `scaled` converts grey values from 0 to 16 once, to what batches hold;
    `seen` converts a batch's images to the model's input at each call, on the model's device.

    Raises `RunError` if scikit-learn, which contains the images, is not installed.
    """
    try:
        grey, target = digits()
    except ImportError:
        raise RunError(f"workload={config.workload!r} uses scikit-learn's images; install scikit-learn") from None
    size = config.spec
    assert size is not None
    images = scaled(torch.from_numpy(grey.astype(np.float32)).unsqueeze(1))
    labels = torch.from_numpy(target.astype(np.int64))
    # the split is the same for every seed: seeds vary the training, not what it is measured on
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(labels)))
    held_out_count = int(len(labels) * HELD_OUT_FRAC)
    held_out, training = order[:held_out_count][:max_held_out], order[held_out_count:]

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        """Mean cross-entropy in nats."""
        return F.cross_entropy(model(seen(batch[0])), batch[1])

    def accuracy(model: nn.Module, batch: Batch) -> torch.Tensor:
        """Share of digits recognised."""
        right: torch.Tensor = model(seen(batch[0])).argmax(1) == batch[1]
        return right.float().mean()

    return Workload(
        model=model,
        batches=ShuffledBatches(
            len(training),
            config.batch_size or size.batch_size,
            config.seed,
            lambda chosen: (images[training[chosen]], labels[training[chosen]]),
        ),
        loss_fn=loss,
        held_out=[(images[part], labels[part]) for part in held_out.split(held_out_batch)],
        accuracy_fn=accuracy,
        data={
            "name": name,
            "sha256": hashlib.sha256(grey.tobytes() + target.tobytes()).hexdigest(),
            "train_samples": len(training),
            "held_out_samples": len(held_out),
        },
    )


def digits() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The images, `[N, 8, 8]` float64, and which digit each shows, as `sklearn.datasets.load_digits` returns them.

    Their file is read without importing scikit-learn and scipy, which takes a second of processor time.
    """
    package = importlib.util.find_spec("sklearn")
    if package is None:
        raise ImportError("scikit-learn is not installed")
    for folder in package.submodule_search_locations or ():
        if (Path(folder) / FILE).is_file():
            return _rows(Path(folder) / FILE)
    from sklearn.datasets import load_digits

    loaded = load_digits()
    return loaded.images, loaded.target


@functools.cache
def _rows(file: Path) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    rows = np.loadtxt(file, delimiter=",")
    return rows[:, :-1].reshape(-1, 8, 8), rows[:, -1].astype(int)
