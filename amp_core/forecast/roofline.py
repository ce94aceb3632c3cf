"""The roofline: the time of a step's work on a GPU, and what bounds it.

>>> device_time(Work.of(trace.work), rates, recipe="bf16", speeds=EFFICIENCY.likely).total_us
48120.0
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import numpy.typing as npt
import pandas as pd

from amp_core.forecast.kernel_classes import (
    ALIGNED_BYTES,
    ATTENTION_SHARE,
    BANDWIDTH_SHARES,
    UNALIGNED_FLOP_PER_US,
    WINOGRAD_POINTS,
    WINOGRAD_TILE,
    shape_share,
)
from amp_core.hardware.data_sheets import Rates

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Speeds:
    """Achieved fractions of a data sheet's peaks (0–1), and the host's cost of a launch (µs)."""

    tensor_cores: float
    cuda_cores: float
    bandwidth: float
    launch_us: float
    tf32: float | None = None
    """In TF32, where it differs from `tensor_cores`."""
    sms: int | None = None
    """Multiprocessors, over which the tiles of a product are spread; None: sizes do not matter."""
    l2_mb: float = 0.0
    """L2 cache, 10^6 bytes: what one kernel of a model writes and the next reads need not leave it."""
    conv: float = 1.0
    """Speed of convolutions on tensor cores over that of matrix products."""
    latency: float = 1.0
    """Speed of kernels that wait for single loads (`sm_us` and `serial_us` of the work), over the likely one."""


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
            yield replace(tensor, cuda_cores=cuda.cuda_cores, bandwidth=bandwidth.bandwidth, launch_us=launch.launch_us)


LAUNCH_US = 30.0
"""The host's time per eager operator, with Python, dispatch and autograd. From models whose steps wait for the host, 12
images, on the hosts of an A100 and an RTX 3090 (ryujaehun/pytorch-gpu-benchmark): DenseNet-201 30, DenseNet-121 35,
ResNet-50 and MobileNetV2 41 to 50. DenseNet-201 on the host of an H100: 28 (XHMY/torch_benchmark)."""
OPTIMIZER_LAUNCH_FRAC = 1 / 3
"""Of that, what an operator of an optimizer takes: there is neither autograd nor a module around it. 10 µs are what
NVIDIA's BertAdam, which waits for 25 operators for each of 391 tensors, leaves for one on RTX 3080 and RTX 3070."""
LAUNCH_SPREAD = 1.7
"""Ratio of a slow host to the likely one, and of that to a fast one: a desktop's took 18 µs on the same models."""

MIN_KERNEL_US = 2.0
"""Shortest kernel: starting and draining it takes as long on the device."""

MIN_DRAM_FRAC = 0.4
"""Share of the traffic of an operator that fits into L2 which still goes to memory, or takes as long: L2 is two to four
times as fast. On L4, softmax and layer norm over 64 MB run at 1.4 to 1.9 times the memory's bandwidth (NeuSight)."""
TF32_TRANSPOSED_FRAC = 0.5
"""Share of convolutions that are brought into another layout in TF32: cuDNN has kernels for both. Fitted to ResNet-50
on seven GPUs (lambdal/deeplearning-benchmark, FP32)."""

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


@dataclass(frozen=True)
class Work:
    """The columns of a step's work (`StepTrace.work`) as arrays, one element per operator and shape."""

    count: Floats
    flops: Floats
    bytes: Floats
    narrow: npt.NDArray[np.bool_]
    low_frac: Floats
    """Share of the operations in 8 or 4 bits (`quantized_work`)."""
    bandwidth_share: Floats
    peak_share: Floats
    """Below 1 for fused attention alone (`ATTENTION_SHARE`)."""
    sizes: tuple[Floats, Floats, Floats, Floats] | None
    """Of the product: batch, m, n, k."""
    transposed: Floats
    sm_us: Floats
    serial_us: Floats
    winograd_flops: Floats
    winograd_bytes: Floats
    aligned: Floats
    optimizer: npt.NDArray[np.bool_]
    """Operators of the optimizer."""
    convolution: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, frame: pd.DataFrame) -> Self:
        """The work of a table with at least the columns count, flops, bytes and narrow."""
        none = np.zeros(len(frame))

        def column(name: str) -> Floats:
            return frame[name].to_numpy(dtype=np.float64) if name in frame else none

        kind = frame["kind"].astype(object) if "kind" in frame else pd.Series([""] * len(frame), dtype=object)
        return cls(
            count=column("count"),
            flops=column("flops"),
            bytes=column("bytes"),
            narrow=frame["narrow"].to_numpy(dtype=bool),
            low_frac=column("low_frac"),
            bandwidth_share=np.array([BANDWIDTH_SHARES.get(name, 1.0) for name in kind], dtype=np.float64),
            peak_share=np.where(kind == "attention", ATTENTION_SHARE, 1.0),
            sizes=(column("batch"), column("m"), column("n"), column("k")) if "batch" in frame else None,
            transposed=column("transposed"),
            sm_us=column("sm_us"),
            serial_us=column("serial_us"),
            winograd_flops=column("winograd_flops"),
            winograd_bytes=column("winograd_bytes"),
            aligned=column("aligned"),
            optimizer=(frame["phase"] == "optimizer").to_numpy(dtype=bool) if "phase" in frame else none > 0,
            convolution=frame["op"].str.contains("conv").to_numpy(dtype=bool) if "op" in frame else none > 0,
        )

    @property
    def launches(self) -> float:
        """Operators that the host launches, each of an optimizer's counted as `OPTIMIZER_LAUNCH_FRAC`."""
        return float((self.count * np.where(self.optimizer, OPTIMIZER_LAUNCH_FRAC, 1.0)).sum())


def device_time(work: Work, rates: Rates, recipe: str, speeds: Speeds) -> DeviceTime:
    """The time of `work`. `tf32` lets FP32 products run on tensor cores; recipes in 8 and 4 bits give the share
    `low_frac` of each product's operations their own peak."""
    times = _times(work, rates, recipe, speeds)
    longest = times.max(axis=0)
    which = times.argmax(axis=0)
    by_term = {term: float(longest[which == i].sum()) for i, term in enumerate(TERMS)}
    share = TF32_TRANSPOSED_FRAC if recipe == "tf32" else 1.0
    transposed = share * float(work.transposed[work.narrow | (recipe == "tf32")].sum())
    by_term[TERMS[1]] += transposed / (rates.gb_per_s * speeds.bandwidth * BANDWIDTH_SHARES["copy"] * 1e3)
    return DeviceTime(by_term, work.launches * speeds.launch_us)


def operator_us(work: Work, rates: Rates, recipe: str, speeds: Speeds) -> Floats:
    """The time of each row of `work` on the device."""
    longest: Floats = _times(work, rates, recipe, speeds).max(axis=0)
    return longest


def _times(work: Work, rates: Rates, recipe: str, speeds: Speeds) -> Floats:
    """The time that each of `TERMS` allows each row of `work`: one row per term."""
    tensor, cuda = rates.half * speeds.tensor_cores, rates.fp32 * speeds.cuda_cores
    wide = np.full_like(work.flops, cuda)
    if recipe == "tf32" and rates.tf32 is not None:
        faster = max(cuda, rates.tf32 * (speeds.tf32 or speeds.tensor_cores))  # libraries choose the faster kernel
        wide[work.peak_share == 1] = faster  # fused attention has no kernel for TF32
    per_us = np.where(work.narrow, tensor, wide) * 1e6  # flop per µs
    per_us *= np.where(work.convolution & (work.narrow | (recipe == "tf32")), speeds.conv, 1.0)
    low = rates.peak(recipe)
    if low is not None and work.low_frac.any():
        per_us = 1 / ((1 - work.low_frac) / per_us + work.low_frac / (low * speeds.tensor_cores * 1e6))
    per_us = per_us * work.peak_share
    moved = work.bytes
    if speeds.l2_mb:
        per_call = moved / np.maximum(work.count, 1)
        cached = np.clip(per_call / (2e6 * speeds.l2_mb), MIN_DRAM_FRAC, 1.0)
        moved = moved * np.where(work.optimizer, 1.0, cached)  # each of its tensors was last read a step ago
    bytes_per_us = rates.gb_per_s * speeds.bandwidth * 1e3 * work.bandwidth_share
    if work.sizes is not None and speeds.sms is not None:
        per_us *= shape_share(*work.sizes, speeds.sms)
        wanted = np.where(work.narrow, ALIGNED_BYTES / 2, ALIGNED_BYTES / 4 if recipe == "tf32" else 1)
        unaligned = (work.aligned > 0) & (work.aligned < wanted)
        fastest = speeds.sms * UNALIGNED_FLOP_PER_US * work.aligned * speeds.latency
        per_us = np.where(unaligned, np.fmin(per_us, fastest), per_us)
    busy = work.sm_us / (speeds.sms * speeds.latency) if speeds.sms else np.zeros_like(work.sm_us)
    products = np.where(work.flops > 0, np.fmax(work.flops / per_us, busy), 0.0)
    if recipe == "fp32" and work.sizes is not None and speeds.sms is not None:
        threes = work.winograd_flops > 0
        products[threes] = np.fmin(products[threes], _winograd_us(work, threes, rates, speeds))
    latency = np.fmax(work.count * MIN_KERNEL_US, work.serial_us / speeds.latency)
    latency = np.where(work.flops > 0, latency, np.fmax(latency, busy))
    return np.stack([products, moved / bytes_per_us, latency])


def _winograd_us(work: Work, which: npt.NDArray[np.bool_], rates: Rates, speeds: Speeds) -> Floats:
    """The time of convolutions in Winograd's form, of which libraries take the faster."""
    assert work.sizes is not None and speeds.sms is not None
    _, positions, outputs, k = (size[which] for size in work.sizes)
    flops = work.winograd_flops[which]
    rounded = flops / (work.flops[which] * WINOGRAD_POINTS / (9 * WINOGRAD_TILE**2))  # by tiles beyond the image
    tiles = positions / WINOGRAD_TILE**2 * rounded
    share = shape_share(np.full_like(k, WINOGRAD_POINTS), tiles, outputs, k / 9, speeds.sms)
    products = flops / (rates.fp32 * speeds.cuda_cores * 1e6 * share)
    result: Floats = products + work.winograd_bytes[which] / (rates.gb_per_s * speeds.bandwidth * 1e3)
    return result
