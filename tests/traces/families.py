"""Traces as the profilers of several drivers write them: the same small training, in each one's categories and names.

    file = write(tmp_path / "trace.json", training_of("rocm"))

A step takes 1,000 µs: a product of 300 in forward and one of 200 in backward, a collective of 100 beside nothing, an
optimizer of 50; the device is busy for 650.
"""

from dataclasses import dataclass, field
from typing import Any

from tests.traces.made import BASE, Made


@dataclass(frozen=True)
class Family:
    """What a driver's profiler writes, and what the importer is to make of it."""

    call: str
    """Category of calls into its runtime."""
    launch: str
    product: str
    """Name of a matrix product's kernel."""
    other: str
    """Name of an elementwise kernel."""
    collective: str
    device: str
    """The importer's name of the device."""
    tensor_core: str
    kernel: str = "kernel"
    """Category of its work."""
    gpu: dict[str, Any] = field(default_factory=dict)
    """The device in the trace's head."""
    marks: str = "none"
    """Marks of steps on the device: none, whole ones, or tiny ones that cover hardly any work."""
    memory_type: int = 1
    """`Device Type` of its memory events."""


_RELU = "void at::native::vectorized_elementwise_kernel<4, at::native::launch_clamp_scalar>"
_MI300 = {"name": "AMD Instinct MI300X", "computeMajor": 9, "computeMinor": 4, "warpSize": 64, "numSms": 304}
_H100 = {"name": "NVIDIA H100 80GB HBM3", "computeMajor": 9, "computeMinor": 0, "warpSize": 32, "numSms": 132}

FAMILIES = {
    "cuda": Family(
        "cuda_runtime", "cudaLaunchKernel", "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NTN", _RELU,
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "cuda:0", "yes", gpu=_H100,
        marks="whole",
    ),
    "cuda driver": Family(
        "cuda_driver", "cuLaunchKernelEx", "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64",
        "triton_poi_fused_relu_0", "ncclKernel_AllReduce_RING_LL_Sum_bf16(ncclWorkElem)", "cuda:0", "yes", gpu=_H100,
    ),
    "rocm": Family(
        "cuda_runtime", "hipExtModuleLaunchKernel", "Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_MT128x128x64_MI16x16x1_SN",
        _RELU, "ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)", "cuda:0", "yes", gpu=_MI300, marks="tiny",
        memory_type=6,
    ),
    "rocm 7": Family(
        "hip_runtime", "hipLaunchKernel", "Cijk_Alik_Bljk_HHS_BH_MT64x64x32_MI32x32x1_SN", _RELU,
        "ncclDevKernel_AllReduce_Sum_f16_RING_LL", "cuda:0", "yes", gpu=_MI300, memory_type=6,
    ),
    "xpu": Family(
        "xpu_runtime", "urEnqueueKernelLaunch", "gemm_kernel", "at::native::xpu::VectorizedKernel", "oneccl_allreduce",
        "xpu:0", "yes",
    ),
    "npu": Family(
        "privateuse1_runtime", "AscendCL@aclrtLaunchKernel", "MatMulV2", "Relu", "hcom_allReduce_", "privateuseone:0",
        "unknown",
    ),
    "mlu": Family(
        "mlu_runtime", "cnInvokeKernel", "MLUMatMulKernel", "MLUOpTensor", "cnclAllReduce", "mlu:0", "unknown",
    ),
}  # fmt: skip


def training_of(name: str, steps: int = 2) -> Any:
    """The trace of a training in the manner of a family."""
    family = FAMILIES[name]
    trace = Made()
    trace._names = {**trace._names, "call": family.call, "kernel": family.kernel}
    for number in range(steps):
        _step(trace, family, number)
    properties = [{"id": 0, **family.gpu}] if family.gpu else []
    return trace.document(deviceProperties=properties, distributedInfo={"rank": 0, "world_size": 8})


def _step(trace: Made, family: Family, number: int) -> None:
    at, sequence = 1000.0 * number, 50 + number
    types = {"Input type": ["c10::BFloat16"] * 2, "Input Dims": [[64, 128], [128, 256]]}
    trace.event("mark", f"ProfilerStep#{4 + number}", at, 1000, 1)
    trace.event("python_function", "nn.Module: Linear_0", at + 10, 80, 1)
    trace.op("aten::mm", at + 20, 60, **{"Sequence number": sequence, "Fwd thread id": 0}, **types)
    _allocation(trace, family, at + 25, 12)
    _launch(trace, family, family.product, at + 40, at + 30, 300)
    trace.op("MmBackward0", at + 120, 60, 2, **{"Sequence number": sequence, "Fwd thread id": 1})
    trace.op("aten::mm", at + 125, 50, 2, **types)
    _allocation(trace, family, at + 126, 20, thread=2)
    _launch(trace, family, family.product, at + 340, at + 130, 200, thread=2)
    message = {"Collective name": "allreduce", "dtype": "BFloat16", "In msg nelems": 512, "Group size": 8}
    trace.op("record_param_comms", at + 200, 20, 2, **message)
    _launch(trace, family, family.collective, at + 540, at + 205, 100, thread=2)
    trace.event("mark", "Optimizer.step#SGD.step", at + 300, 60, 1)
    trace.op("aten::_foreach_add_", at + 310, 40)
    _allocation(trace, family, at + 320, 10)
    _launch(trace, family, family.other, at + 640, at + 325, 50)
    if family.marks != "none":
        first, length = (at + 40, 650) if family.marks == "whole" else (at + 700, 2)
        trace.event("gpu_user_annotation", f"ProfilerStep#{4 + number}", first, length, 7)


def _launch(trace: Made, family: Family, name: str, at: float, launched: float, length: float, thread: int = 1) -> None:
    correlation = 10_000 + len(trace.events)
    trace.event("call", family.launch, launched, 2, thread, correlation=correlation)
    trace.event("kernel", name, at, length, "stream 7", correlation=correlation, device=0, stream=7)


def _allocation(trace: Made, family: Family, at: float, mib: int, thread: int = 1) -> None:
    arguments = {
        "Device Type": family.memory_type,
        "Device Id": 0,
        "Total Allocated": mib * 2**20,
        "Total Reserved": 2**26,
    }
    event = {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "pid": 77, "tid": thread, "ts": BASE + at}
    trace.events.append({**event, "args": arguments})
