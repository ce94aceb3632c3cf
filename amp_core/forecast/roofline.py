"""The roofline: the time of a step's work on a GPU, and what bounds it.

>>> device_time(work, rates, recipe="bf16", speeds=EFFICIENCY.likely).total_us
48120.0
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd

from amp_core.hardware.data_sheets import Rates


@dataclass(frozen=True)
class Speeds:
    """Achieved fractions of a data sheet's peaks (0–1), and the host's cost of a launch (µs)."""

    tensor_cores: float
    cuda_cores: float
    bandwidth: float
    launch_us: float


@dataclass(frozen=True)
class Range:
    """Slow, likely and fast."""

    slow: Speeds
    likely: Speeds
    fast: Speeds

    def corners(self) -> Iterator[Speeds]:
        """Every combination of slow and fast: the errors of the four figures are independent."""
        ends = (self.slow, self.fast)
        for tensor, cuda, bandwidth, launch in itertools.product(ends, repeat=4):
            yield Speeds(tensor.tensor_cores, cuda.cuda_cores, bandwidth.bandwidth, launch.launch_us)


EFFICIENCY = Range(
    slow=Speeds(0.40, 0.55, 0.60, 12.0),
    likely=Speeds(0.60, 0.80, 0.75, 8.0),
    fast=Speeds(0.80, 0.95, 0.90, 5.0),
)
"""The default range. Tensor cores: large matrix products in FP16 reach 27 % of the peak on an A40, 49 % on an A100
(69 % in TF32) and 83 % on an RTX 3090 Ti (bewantbe/busy-gemm-benchmark, README); training steps of large language
models 52 % on A100 (Narayanan et al. 2021, arXiv:2104.04473, abstract). CUDA cores: 51 to 85 % in the same README.
Bandwidth: 60 % for 1 MB, 75 % for 10 MB, 90 % from 100 MB on (calculon-ai/calculon, systems/a100_80g.json). Launches:
our own estimate of the host's time per eager operator, including autograd and dispatch."""

MIN_KERNEL_US = 2.0
"""Shortest kernel: starting and draining it takes as long on the device."""

TERMS = ("GEMM/conv", "memory bandwidth", "kernel latency")
"""What may bound an operator's time on the device."""


@dataclass(frozen=True)
class DeviceTime:
    """Time of a step, microseconds."""

    by_term: dict[str, float]
    """Time on the device of the operators that each of `TERMS` bounds."""
    host_us: float
    """Time that the host needs to launch them."""

    @property
    def device_us(self) -> float:
        """Time on the device."""
        return sum(self.by_term.values())

    @property
    def total_us(self) -> float:
        """The longer of both: host and device work concurrently."""
        return max(self.device_us, self.host_us)

    @property
    def bound_by(self) -> str:
        """The dominant term; `launches` if the device waits for the host."""
        if self.host_us > self.device_us:
            return "launches"
        return max(self.by_term, key=self.by_term.__getitem__)


def why_not(rates: Rates, recipe: str) -> str:
    """The reason why a GPU cannot run a recipe on tensor cores; empty if it can."""
    if recipe == "tf32" and rates.tf32 is None:
        return "no TF32 before Ampere (compute capability 8.0)"
    if recipe == "bf16" and not rates.bf16:
        return "no BF16 on tensor cores before Ampere (compute capability 8.0)"
    if recipe == "fp8" and rates.fp8 is None:
        return "no FP8 on tensor cores before Ada and Hopper (compute capability 8.9)"
    if recipe == "nvfp4" and rates.fp4 is None:
        return "no FP4 on tensor cores before Blackwell (compute capability 10.0)"
    return ""


def device_time(work: pd.DataFrame, rates: Rates, recipe: str, speeds: Speeds) -> DeviceTime:
    """The time of `work`. `tf32` lets FP32 products run on tensor cores; recipes in 8 and 4 bits give the share
    `low_frac` of each product's operations their own peak (`quantized_work`)."""
    wide = rates.fp32 * speeds.cuda_cores
    if recipe == "tf32" and rates.tf32 is not None:
        wide = max(wide, rates.tf32 * speeds.tensor_cores)  # libraries choose the faster kernel
    per_us = np.where(work["narrow"], rates.half * speeds.tensor_cores, wide) * 1e6  # flop per µs
    low = rates.peak(recipe)
    if "low_frac" in work and low is not None:
        low_frac = work["low_frac"].to_numpy(dtype=np.float64)
        per_us = 1 / ((1 - low_frac) / per_us + low_frac / (low * speeds.tensor_cores * 1e6))
    times = np.stack(
        [
            work["flops"].to_numpy(dtype=np.float64) / per_us,
            work["bytes"].to_numpy(dtype=np.float64) / (rates.gb_per_s * speeds.bandwidth * 1e3),
            work["count"].to_numpy(dtype=np.float64) * MIN_KERNEL_US,
        ]
    )
    longest = times.max(axis=0)
    which = times.argmax(axis=0)
    by_term = {term: float(longest[which == i].sum()) for i, term in enumerate(TERMS)}
    return DeviceTime(by_term, float(work["count"].sum()) * speeds.launch_us)
