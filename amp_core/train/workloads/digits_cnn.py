"""`digits-cnn`: a small convolutional network on scikit-learn's 1,797 handwritten digits, 8×8 pixels each."""

import torch
from torch import nn

from amp_core.settings.training import TrainConfig
from amp_core.train.workloads import Workload
from amp_core.train.workloads.digits import digits_workload


class DigitsCNN(nn.Module):
    """Three 3×3 convolutions with batch norm, two poolings, one linear layer.

    All operations are smooth. ReLU and max pooling select values, and rounding to 16 bits in forward changes some
    selections. Their gradients then differ from FP32's at every loss scale (a cosine of 0.997), which would hide the
    effect of the loss scale.
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
    """The workload in the size that `config` names. Raises `RunError` without scikit-learn."""
    assert config.spec is not None
    model = DigitsCNN(**config.spec.dims)
    return digits_workload(model, config, name="scikit-learn handwritten digits", scaled=lambda grey: grey / 16)
