"""`digits-cnn`: a small convolutional network on scikit-learn's 1,797 handwritten digits, 8×8 pixels each."""

import hashlib

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from amp_core.train.config import TrainConfig
from amp_core.train.workloads import ShuffledBatches, Workload

HELD_OUT_SHARE = 0.2


class DigitsCNN(nn.Module):
    """Three 3×3 convolutions with batch norm, two poolings, one linear layer.

    Smooth all through: ReLU and max pooling choose between values, and a value rounded to 16 bits in forward makes some
    of them choose otherwise. Their gradients then differ from FP32's at every loss scale alike (a cosine of 0.997),
    which would hide what the loss scale does.
    """

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *self._convolution(1, width),
            *self._convolution(width, 2 * width),
            nn.AvgPool2d(2),
            *self._convolution(2 * width, 2 * width),
            nn.AvgPool2d(2),
        )
        self.head = nn.Linear(2 * width * 2 * 2, classes)

    @staticmethod
    def _convolution(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.GELU()]

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Images [N, 1, 8, 8], pixels 0 to 1, to logits [N, classes]."""
        logits: torch.Tensor = self.head(self.features(images).flatten(1))
        return logits


def build(config: TrainConfig) -> Workload:
    """The workload in the size that `config` names."""
    from sklearn.datasets import load_digits

    size = config.spec
    assert size is not None
    digits = load_digits()
    images = torch.from_numpy(digits.images.astype(np.float32) / 16).unsqueeze(1)
    labels = torch.from_numpy(digits.target.astype(np.int64))
    # the split is the same for every seed: seeds vary the training, not what it is measured on
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(labels)))
    held_out_count = int(len(labels) * HELD_OUT_SHARE)
    held_out, training = order[:held_out_count], order[held_out_count:]
    return Workload(
        model=DigitsCNN(**size.dims),
        batches=ShuffledBatches(
            len(training),
            config.batch_size or size.batch_size,
            config.seed,
            lambda chosen: (images[training[chosen]], labels[training[chosen]]),
        ),
        loss_fn=loss,
        held_out=[(images[part], labels[part]) for part in torch.tensor_split(held_out, 6)],
        accuracy_fn=accuracy,
        data={
            "name": "scikit-learn handwritten digits",
            "sha256": hashlib.sha256(digits.images.tobytes() + digits.target.tobytes()).hexdigest(),
            "train_samples": len(training),
            "held_out_samples": len(held_out),
        },
    )


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Mean cross-entropy in nats."""
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def accuracy(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Share of digits recognised."""
    images, labels = batch
    right: torch.Tensor = model(images).argmax(1) == labels
    return right.float().mean()
