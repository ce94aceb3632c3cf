"""`image-resnet`: ResNet-18 and ResNet-50 at their real shapes, for throughput and memory.

The data are scikit-learn's handwritten digits, 8×8 pixels, enlarged to the size that the network expects: every machine
has them, and to the hardware a pixel is a pixel. How well such a network recognises them says nothing about images. The
enlarging happens where the model is, so that the host's part of a step is small.
"""

import torch
from torch import nn
from torch.nn import functional as F

from amp_core.settings.training import TrainConfig
from amp_core.train.workloads import Workload
from amp_core.train.workloads.digits import digits_workload

MAX_HELD_OUT = 128
"""Held-out images at most: at 224×224 pixels more would take longer than the training they judge."""
STAGES = {10: ("basic", (1, 1, 1, 1)), 18: ("basic", (2, 2, 2, 2)), 50: ("bottleneck", (3, 4, 6, 3))}
"""Kind and number of blocks in the four stages, by depth (He et al. 2015, table 1; 10 is the same idea, smaller)."""
EXPANSION = {"basic": 1, "bottleneck": 4}


class Block(nn.Module):
    """Convolutions with batch norm beside a shortcut: two of 3×3, or 1×1, 3×3, 1×1 with four times the channels."""

    def __init__(self, kind: str, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = width * EXPANSION[kind]
        if kind == "basic":
            shapes = [(inputs, width, 3, stride), (width, outputs, 3, 1)]
        else:
            shapes = [(inputs, width, 1, 1), (width, width, 3, stride), (width, outputs, 1, 1)]
        self.convs = nn.ModuleList(_conv(*shape) for shape in shapes)
        self.norms = nn.ModuleList(nn.BatchNorm2d(shape[1]) for shape in shapes)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(_conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[N, inputs, P, P] to [N, outputs, P / stride, P / stride]."""
        beside = self.shortcut(x)
        for number, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            x = norm(conv(x))
            if number + 1 < len(self.convs):
                x = F.relu(x)
        return F.relu(x + beside)


def _conv(inputs: int, outputs: int, kernel: int, stride: int) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)


class ResNet(nn.Module):
    """Images [N, 3, P, P] to logits [N, classes]."""

    def __init__(self, depth: int, width: int, pixels: int, classes: int) -> None:
        super().__init__()
        kind, counts = STAGES[depth]
        self.pixels = pixels
        self.stem = nn.Conv2d(3, width, 7, 2, padding=3, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.pool = nn.MaxPool2d(3, 2, padding=1)
        blocks: list[nn.Module] = []
        inputs = width
        for stage, count in enumerate(counts):
            for number in range(count):
                blocks.append(Block(kind, inputs, width * 2**stage, 2 if stage and not number else 1))
                inputs = width * 2**stage * EXPANSION[kind]
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(inputs, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Images [N, 3, P, P] to logits [N, classes]."""
        x = self.blocks(self.pool(F.relu(self.norm(self.stem(images)))))
        logits: torch.Tensor = self.head(x.mean((2, 3)))
        return logits


def enlarged(images: torch.Tensor, pixels: int) -> torch.Tensor:
    """Grey images [N, 1, 8, 8] as [N, 3, pixels, pixels]."""
    large = F.interpolate(images, size=(pixels, pixels), mode="bilinear", align_corners=False)
    return large.expand(-1, 3, -1, -1)


def build(config: TrainConfig) -> Workload:
    """The workload in the size that `config` names. Raises `RunError` without scikit-learn."""
    assert config.spec is not None
    pixels = config.spec.dims["pixels"]
    return digits_workload(
        ResNet(**config.spec.dims),
        config,
        name=f"scikit-learn handwritten digits, enlarged to {pixels}×{pixels} pixels",
        scaled=lambda grey: grey / 8 - 1,
        seen=lambda grey: enlarged(grey, pixels),
        max_held_out=MAX_HELD_OUT,
        held_out_batch=32,
    )
