"""Shares of a data sheet's peaks that training reaches, by GPU, each with its source.

>>> efficiency_of("NVIDIA L4").fp32
0.43
"""

import re
from dataclasses import dataclass, replace

from amp_core.forecast.roofline import LAUNCH_SPREAD, LAUNCH_US, Range, Speeds


@dataclass(frozen=True)
class Efficiency:
    """What large kernels reach on one part, as shares of its `Rates`. Above 1: the card's clock exceeds the one of its
    data sheet. Low: a limit on its power lowers the clock."""

    fp32: float
    """Products on CUDA cores."""
    tf32: float
    half: float
    """Products in FP16, BF16 and FP8."""
    bandwidth: float
    """Elementwise kernels over tensors that exceed the L2 cache."""
    spread: float
    """Half of the range that is stated, as a share of the likely speed. Where each source was forecast with shares that
    were fitted without it, 9 in 10 steps were off by 25 % or less (`python -m tests.benchmarks.published_steps`)."""
    source: str
    sms: int = 100
    """Multiprocessors."""
    l2_mb: float = 8.0
    conv: float = 1.0
    """Speed of convolutions on tensor cores over that of matrix products."""

    def range(self, spread: float | None = None) -> Range:
        """The speeds of a step: likely, and slower and faster by `spread`, by default that of the part."""
        off = self.spread if spread is None else spread

        def by(factor: float, host: float) -> Speeds:
            return Speeds(
                self.half * factor, self.fp32 * factor, self.bandwidth * factor, host, self.tf32 * factor, self.sms,
                self.l2_mb, self.conv, factor,
            )  # fmt: skip

        return Range(
            slow=by(1 - off, LAUNCH_US * LAUNCH_SPREAD),
            likely=by(1.0, LAUNCH_US),
            fast=by(1 + off, LAUNCH_US / LAUNCH_SPREAD),
        )


_KERNELS = "sitar-lab/NeuSight, scripts/asplos/data/dataset: FP32 kernels"
_STEPS = "whole steps, tests/benchmarks/published_steps.csv"
_GEMM = "large products in mli/transformers-benchmarks"
_GEMM_2 = "large products in XHMY/torch_benchmark"

OLD_SOFTWARE, OLD_SOFTWARE_YEAR = 1.12, 2020
"""Time of a step with software of this year or before, over that with later: kernels for a new GPU and its libraries
are tuned over the years. Lambda ran the same programs in containers of 2020 and 2021 and in those of 2022 on six GPUs
(lambdal/deeplearning-benchmark): 30 pairs of steps, median 1.14, 0.97 to 1.27. With 1.12 the steps of each source are
forecast best by shares of the other sources (`python -m tests.benchmarks.published_steps`)."""

HOPPER_CONV = 0.63
"""Of the peak of Hopper's tensor cores the `mma` instructions of earlier generations reach 62.9 % (Luo et al. 2024,
arXiv:2402.13499); matrix products use its own (`wgmma`), and convolutions mostly do not: ResNet-50 and RegNetY-128GF on
H100 and H200 were 20 to 35 % too fast without it."""

_GENERATIONS = (  # the first matching pattern counts
    (r"V100", "Volta"), (r"T4\b|RTX 20|TITAN RTX|Quadro RTX", "Turing"), (r"A100|A800|A30\b", "A100"),
    (r"\bA10\b|\bA40\b|RTX A\d", "Ampere, professional"), (r"RTX 30", "Ampere, GeForce"),
    (r"RTX 6000 Ada|\bL4\b|\bL40", "Ada, professional"), (r"RTX 40", "Ada, GeForce"),
    (r"[HG]H?[128]00\b|\bH20\b", "Hopper"), (r"\bB200\b", "Blackwell"), (r"RTX 50", "Blackwell, GeForce"),
    (r"\bMI\d", "AMD"),
)  # fmt: skip


def generation_of(device: str) -> str:
    """GPUs whose shares are alike: the same multiprocessors under a like limit on their power. Empty if unknown."""
    return next((name for pattern, name in _GENERATIONS if re.search(pattern, device)), "")


_CHIPS = (  # the first matching pattern counts: SMs and L2 MB, by the white papers of their architectures
    (r"V100", 80, 6), (r"T4\b", 40, 4), (r"RTX 2080 Ti", 68, 5.5), (r"TITAN RTX|Quadro RTX [68]000", 72, 6),
    (r"A30\b", 56, 24), (r"A100|A800", 108, 40), (r"A10\b", 72, 6), (r"RTX A4000", 48, 4), (r"RTX A5000", 64, 6),
    (r"A40\b|RTX A6000", 84, 6), (r"RTX 3090", 82, 6), (r"RTX 3080", 68, 5), (r"RTX 3070", 46, 4),
    (r"L4\b", 58, 48), (r"RTX 6000 Ada|L40", 142, 96), (r"RTX 4090", 128, 72), (r"RTX 4080", 76, 64),
    (r"RTX 4070 Ti", 60, 48), (r"H[18]00 PCIe", 114, 50), (r"H20\b", 78, 60), (r"[HG]H?[128]00", 132, 50),
    (r"B200", 148, 126), (r"RTX 5090", 170, 96), (r"RTX 5080", 84, 64), (r"RTX 5070 Ti", 70, 48),
)  # fmt: skip

_TABLE = (  # the first matching pattern counts: FP32, TF32, FP16, bandwidth, spread
    (r"V100.*PCI", Efficiency(0.94, 0, 0.65, 0.85, 0.28, f"{_STEPS}; {_KERNELS} (median 0.85)")),
    (r"V100", Efficiency(0.92, 0, 0.65, 0.85, 0.28, f"{_STEPS}; {_GEMM} (FP32 0.89, FP16 0.76)")),
    (r"T4\b", Efficiency(0.47, 0, 0.37, 0.75, 0.28,
        f"{_KERNELS}; FP16: 24 of 65 TFLOP/s at 70 W, forums.developer.nvidia.com/t/264462")),
    (r"RTX 2080", Efficiency(0.94, 0, 0.68, 0.81, 0.30, _STEPS)),
    (r"TITAN RTX", Efficiency(0.80, 0, 0.68, 0.68, 0.30, f"{_STEPS}; {_GEMM_2} (FP32 0.87, FP16 0.73)")),
    (r"Quadro RTX [68]000", Efficiency(0.90, 0, 0.68, 0.67, 0.30, _STEPS)),
    (r"A100-PCI\w*-40GB|A800.*40GB", Efficiency(0.95, 0.67, 0.62, 0.81, 0.28, _STEPS)),
    (r"A100.*PCI", Efficiency(0.86, 0.73, 0.65, 0.81, 0.28, f"{_STEPS}; {_KERNELS} (median 0.89)")),
    (r"A100.*40GB", Efficiency(0.97, 0.73, 0.65, 0.83, 0.28,
        f"{_STEPS}; FP32: 18.1 of 19.5 TFLOP/s, zzc0721/torch-performance-test-data")),
    (r"A100|A800|A30\b", Efficiency(0.97, 0.83, 0.67, 0.79, 0.28,
        f"{_STEPS}; {_GEMM} (TF32 0.74, FP16 0.74, bandwidth 0.79)")),
    (r"\bA10\b", Efficiency(0.65, 0.46, 0.51, 0.96, 0.28, f"{_STEPS}; 150 W")),
    (r"\bA40\b", Efficiency(0.65, 0.45, 0.67, 0.96, 0.28, _STEPS)),
    (r"RTX A[456]000", Efficiency(0.65, 0.66, 0.66, 0.96, 0.28, f"{_STEPS}; {_GEMM} (TF32 0.78, FP16 0.61)")),
    (r"RTX 30", Efficiency(0.65, 0.95, 0.91, 0.94, 0.30,
        f"{_STEPS}; FP32: 24.5 of 35.6 TFLOP/s, zzc0721/torch-performance-test-data")),
    (r"RTX 40", Efficiency(0.65, 0.95, 0.95, 0.96, 0.30,
        f"{_STEPS}; {_GEMM} (TF32 1.04, FP16 1.04); FP32: 54.8 of 82.6 TFLOP/s, zzc0721/torch-performance-test-data")),
    (r"\bL4\b", Efficiency(0.43, 0.52, 0.59, 0.66, 0.30, f"{_STEPS}; {_KERNELS} (median 0.29)")),
    (r"RTX 6000 Ada|\bL40S?\b", Efficiency(0.43, 0.52, 0.59, 0.82, 0.30, f"{_STEPS}, of RTX 6000 Ada and L40S")),
    (r"H100 PCIe|H800 PCIe", Efficiency(0.76, 0.65, 0.56, 0.87, 0.28, _STEPS)),
    (r"GH200", Efficiency(0.76, 0.65, 0.56, 0.83, 0.28, _STEPS)),
    (r"H200", Efficiency(0.79, 0.65, 0.56, 0.81, 0.28, _STEPS)),
    (r"H[18]00\b|\bH20\b", Efficiency(0.76, 0.65, 0.56, 0.85, 0.28,
        f"{_STEPS}; {_KERNELS} (median 0.74); {_GEMM_2} (FP32 0.77, FP16 0.66)")),
    (r"\bB200\b", Efficiency(0.65, 0.65, 0.65, 0.85, 0.35, f"{_STEPS}; the most in stas00/ml-engineering is 0.78")),
    (r"RTX 50", Efficiency(0.65, 0.95, 0.95, 0.85, 0.35, f"{_STEPS}, of RTX 5090 in FP32")),
)  # fmt: skip
_OTHER = Efficiency(0.65, 0.5, 0.6, 0.8, 0.40, "no measurement of this generation")
EFFICIENCY = _OTHER.range()
"""Of a part that is not in the table."""


def efficiency_of(device: str) -> Efficiency:
    """The shares of a part by its device name; those of an average part if it is not in the table."""
    shares = next((shares for pattern, shares in _TABLE if re.search(pattern, device)), _OTHER)
    if generation_of(device) == "Hopper":
        shares = replace(shares, conv=HOPPER_CONV)
    for pattern, sms, l2_mb in _CHIPS:
        if re.search(pattern, device):
            return replace(shares, sms=sms, l2_mb=l2_mb)
    return shares
