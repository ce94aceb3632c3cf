"""Shares of a data sheet's peaks that training reaches, by GPU, each with its source.

>>> efficiency_of("NVIDIA L4").fp32
0.4
"""

import re
from dataclasses import dataclass

from amp_core.forecast.roofline import LAUNCH_US, Range, Speeds


@dataclass(frozen=True)
class Efficiency:
    """What large kernels reach on one part, as shares of its `Rates`. Above 1: the card's clock exceeds the one of its
    data sheet. Low: a limit on its power lowers the clock."""

    sms: int
    """Multiprocessors."""
    l2_mb: float
    fp32: float
    """Products on CUDA cores."""
    tf32: float
    half: float
    """Products in FP16, BF16 and FP8."""
    bandwidth: float
    """Elementwise kernels over tensors that exceed the L2 cache."""
    spread: float
    """Half of the range that is stated, as a share of the likely speed."""
    source: str

    def range(self) -> Range:
        """The speeds of a step: likely, and slower and faster by the spread."""

        def by(factor: float) -> Speeds:
            host = LAUNCH_US / factor
            return Speeds(
                self.half * factor, self.fp32 * factor, self.bandwidth * factor, host, self.tf32 * factor, self.sms,
                self.l2_mb, factor,
            )  # fmt: skip

        return Range(slow=by(1 - self.spread), likely=by(1.0), fast=by(1 + self.spread))


_KERNELS = "sitar-lab/NeuSight, scripts/asplos/data/dataset: FP32 kernels"
_STEPS = "whole steps in lambdal/deeplearning-benchmark, pytorch/csv_v1_v2"
_TIMM = "whole steps in huggingface/pytorch-image-models, results/benchmark-train-amp-nhwc-pt112-cu113-rtx3090.csv"
_SIBLING = "no measurement: shares of a card of the same generation and class"

_TABLE = (  # the first matching pattern counts: SMs, L2 MB, FP32, TF32, FP16, bandwidth, spread
    (r"V100.*PCI", Efficiency(80, 6, 0.97, 0, 0.82, 0.88, 0.20, f"{_KERNELS} (median 0.85), and steps")),
    (r"V100", Efficiency(80, 6, 0.89, 0, 0.82, 0.88, 0.20, _STEPS)),
    (r"T4\b", Efficiency(40, 4, 0.47, 0, 0.37, 0.75, 0.25,
        f"{_KERNELS}; FP16: 24 of 65 TFLOP/s at 70 W, forums.developer.nvidia.com/t/264462")),
    (r"TITAN RTX|RTX 2080", Efficiency(70, 6, 0.8, 0, 0.75, 0.85, 0.30, _SIBLING)),
    (r"A100-PCI\w*-40GB|A800.*40GB",
        Efficiency(108, 40, 0.80, 0.63, 0.85, 0.84, 0.20, f"FP32: {_KERNELS} (median 0.77); others as A100 PCIe")),
    (r"A100.*PCI", Efficiency(108, 40, 0.87, 0.63, 0.85, 0.84, 0.20, f"{_KERNELS} (median 0.89); {_STEPS}")),
    (r"A100|A800|A30\b", Efficiency(108, 40, 0.87, 0.69, 0.87, 0.84, 0.20,
        f"{_STEPS}; FP16 below 0.87, the most in stas00/ml-engineering, compute/accelerator")),
    (r"\bA10\b", Efficiency(72, 6, 0.50, 0.43, 0.62, 0.90, 0.20, f"{_STEPS}; 150 W")),
    (r"RTX A[456]000|\bA40\b", Efficiency(84, 6, 0.65, 0.67, 1.0, 0.90, 0.25, f"{_STEPS}; FP32: {_SIBLING}")),
    (r"RTX 30", Efficiency(82, 6, 0.65, 0.82, 1.08, 0.90, 0.28, f"{_STEPS}; {_TIMM}")),
    (r"RTX 6000 Ada|\bL40", Efficiency(142, 96, 0.50, 0.40, 0.55, 0.93, 0.25, f"{_STEPS}; 300 W")),
    (r"RTX 40", Efficiency(128, 72, 0.60, 0.80, 1.10, 0.93, 0.30, _STEPS)),
    (r"\bL4\b", Efficiency(58, 48, 0.40, 0.45, 0.45, 0.78, 0.25,
        f"{_KERNELS} (median 0.29), and steps; TF32 and FP16: {_SIBLING} at 72 W")),
    (r"H100 PCIe|H800 PCIe", Efficiency(114, 50, 0.70, 0.50, 1.0, 0.86, 0.20, _STEPS)),
    (r"[HG]H?[128]00\b|\bH20\b", Efficiency(132, 50, 0.77, 0.50, 0.80, 0.84, 0.20,
        f"{_KERNELS} (median 0.74); {_STEPS}; FP16 below 0.80, the most in stas00/ml-engineering")),
    (r"\bB200\b", Efficiency(148, 126, 0.50, 0.35, 0.55, 0.90, 0.35,
        f"{_STEPS}, with software of 2024; the most in stas00/ml-engineering is 0.78")),
    (r"RTX 50", Efficiency(140, 80, 0.60, 0.80, 0.90, 0.90, 0.35, _SIBLING)),
)  # fmt: skip
_OTHER = Efficiency(100, 8, 0.65, 0.5, 0.6, 0.8, 0.40, "no measurement of this generation")
EFFICIENCY = _OTHER.range()
"""Of a part that is not in the table."""


def efficiency_of(device: str) -> Efficiency:
    """The shares of a part by its device name; those of an average part if it is not in the table."""
    return next((shares for pattern, shares in _TABLE if re.search(pattern, device)), _OTHER)
