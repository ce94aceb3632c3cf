"""NVIDIA's GPUs, and AMD's under ROCm, which torch calls `cuda` too: events, torch's allocator, NVML."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from amp_core.hardware.gpu_state import Device, find
from amp_core.hardware.nvml import Nvml, NvmlError
from amp_core.record.backends.base import Allocated, Backend, Event, Kernel, Room, SampleError


class CudaClock:
    """Marks are events on the current stream of one device, whichever device is the thread's current one."""

    adds_up = False

    def __init__(self, backend: "Cuda") -> None:
        self._backend = backend

    def mark(self) -> Any:
        """This moment on the device's current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._backend.current_stream())
        return event

    def ms(self, start: Any, stop: Any) -> float:
        """Milliseconds of device time between two marks."""
        try:
            return float(start.elapsed_time(stop))
        except RuntimeError:  # a mark on a stream that the host transfer does not come after
            start.synchronize()
            stop.synchronize()
            return float(start.elapsed_time(stop))


class Cuda(Backend):
    """One GPU."""

    type = "cuda"
    has_float64 = True
    profiler_activity = ProfilerActivity.CUDA
    collectives = "nccl"

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._earlier_peak = 0  # before `read_allocator` began torch's own peak anew
        self._streams: dict[Any, torch.cuda.Stream] = {}

    @staticmethod
    def count() -> int:
        return torch.cuda.device_count()

    @classmethod
    def available(cls) -> bool:
        return torch.cuda.is_available()

    @classmethod
    def why_unavailable(cls) -> str:
        return "torch was built without CUDA" if torch.version.cuda is None else "torch finds no CUDA device"

    @staticmethod
    def current() -> int:
        return torch.cuda.current_device()

    @staticmethod
    def select(index: int) -> None:
        torch.cuda.set_device(index)

    @staticmethod
    def in_use() -> bool:
        """Whether torch has memory of any: it is initialized where only the GPUs' names were read, and to wait for one
        would then take some hundred megabytes of it."""
        if not torch.cuda.is_initialized():
            return False
        try:
            return any(torch.cuda.memory_reserved(index) for index in range(torch.cuda.device_count()))
        except RuntimeError:  # of an allocator that does not count
            return True

    @staticmethod
    def gpus() -> list[dict[str, Any]]:
        return [_described(torch.cuda.get_device_properties(index)) for index in range(torch.cuda.device_count())]

    @staticmethod
    def versions() -> dict[str, Any]:
        values = {"cuda": torch.version.cuda, "cudnn": cudnn_version()}
        return values | ({"hip": torch.version.hip} if torch.version.hip is not None else {})

    @staticmethod
    def flags() -> Mapping[str, Callable[[], Any]]:
        return {
            "tf32_matmul": Cuda.tf32_matmul,
            "tf32_cudnn": lambda: torch.backends.cudnn.allow_tf32,
            "cudnn_benchmark": lambda: torch.backends.cudnn.benchmark,
        }

    @staticmethod
    def tf32_matmul() -> bool:
        newer = getattr(torch.backends.cuda.matmul, "fp32_precision", None)  # from PyTorch 2.9 on
        return bool(torch.backends.cuda.matmul.allow_tf32) if newer is None else newer == "tf32"

    @staticmethod
    def tf32_switches() -> list[tuple[Any, str]]:
        return [(torch.backends.cuda.matmul, "allow_tf32"), (torch.backends.cudnn, "allow_tf32")]

    @staticmethod
    def fp32_precision_owners() -> list[Any]:
        cudnn = torch.backends.cudnn
        owners = [torch.backends.cuda.matmul, *(getattr(cudnn, op, None) for op in ("matmul", "conv", "rnn"))]
        return [owner for owner in owners if hasattr(owner, "fp32_precision")]

    @staticmethod
    def synchronize() -> None:
        torch.cuda.synchronize()

    @staticmethod
    def release_memory() -> None:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    @staticmethod
    def capturing() -> bool:
        """Whether a CUDA graph is captured: a single query of an event would end the capture."""
        return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()

    @staticmethod
    def kernels() -> dict[str, Kernel]:
        """Those in CUDA C++; ROCm has none."""
        if torch.version.hip is not None:
            raise RuntimeError("the kernels are written for CUDA, but this torch is built for ROCm")
        from amp_core.record.stats.cuda.blocks import distances_cuda
        from amp_core.record.stats.cuda.measure import (
            channels_cuda,
            largest_cuda,
            measure_cuda,
            norms_cuda,
            outputs_cuda,
        )

        return {
            "measure": measure_cuda,
            "channels": channels_cuda,
            "norms": norms_cuda,
            "largest": largest_cuda,
            "outputs": outputs_cuda,
            "blocks": distances_cuda,
        }

    @staticmethod
    def random_states() -> list[torch.Tensor]:
        return torch.cuda.get_rng_state_all()

    @staticmethod
    def set_random_states(states: Sequence[torch.Tensor]) -> None:
        torch.cuda.set_rng_state_all(states)

    def clock(self) -> CudaClock:
        """Events on the device's current stream, so that phases are times of the device."""
        return CudaClock(self)

    def selected(self) -> AbstractContextManager[Any]:
        return torch.cuda.device(self.device)

    def current_stream(self) -> Any:
        """A `torch.cuda.Stream`, the same object for the same stream: torch takes some 10 µs to make one, which a
        sampled step would pay a thousand times."""
        current = getattr(torch._C, "_cuda_getCurrentStream", None)  # not in builds for a CPU
        if current is None or self.device.index is None:
            return torch.cuda.current_stream(self.device)
        key = current(self.device.index)
        stream = self._streams.get(key)
        if stream is None:
            stream = self._streams[key] = torch.cuda.current_stream(self.device)
        return stream

    def come_after(self, stream: Any, tensors: Sequence[torch.Tensor]) -> None:
        """Wait on the device; the allocator records the second stream."""
        current = self.current_stream()
        if stream != current:
            current.wait_stream(stream)
            for tensor in tensors:
                tensor.record_stream(current)

    def architecture(self) -> str:
        """The generation as NVIDIA's compilers name it, such as `sm_90`."""
        major, minor = torch.cuda.get_device_capability(self.device)
        return f"sm_{major}{minor}"

    def copy_to_host(self, parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, Event | None]:
        """One copy to pinned memory on this device's current stream, which nobody waits for."""
        here = [part.to(parts[0].device, non_blocking=True) for part in parts]
        whole = here[0] if len(here) == 1 else torch.cat(here)
        host = torch.empty(whole.shape, dtype=whole.dtype, device="cpu", pin_memory=True)
        host.copy_(whole, non_blocking=True)
        event = torch.cuda.Event()
        event.record(self.current_stream())
        return host, event

    def fork_random(self) -> AbstractContextManager[None]:
        """The host's generator, and this device's."""
        return torch.random.fork_rng(devices=[self.device], device_type="cuda")

    def memory_bytes(self) -> tuple[int | None, int | None]:
        # `memory_allocated` and `max_memory_allocated` each sort a hundred figures into a dictionary of their own.
        stats = self._stats()
        if stats is None:
            return None, None
        allocated = stats["allocated_bytes"]["all"]
        return allocated["current"], max(allocated["peak"], self._earlier_peak)

    def read_allocator(self) -> Allocated:
        """Reset torch's own peak: `torch.cuda.max_memory_allocated` then refers to the time since the last reading."""
        stats = self._stats()
        if stats is None:
            return Allocated()
        allocated = stats["allocated_bytes"]["all"]
        values = Allocated(allocated["current"], allocated["peak"], stats["reserved_bytes"]["all"]["current"])
        self._earlier_peak = max(self._earlier_peak, allocated["peak"])
        torch.cuda.reset_peak_memory_stats(self.device)
        return values

    def room(self) -> Room:
        stats = self._stats()
        if stats is None:
            return super().room()
        allocated = stats["allocated_bytes"]["all"]
        free, _ = torch.cuda.mem_get_info(self.device)
        return Room(allocated["current"], allocated["peak"], free)

    def _stats(self) -> dict[str, Any] | None:
        """What torch's allocator counts; None where another one, such as RAPIDS', has taken its place."""
        try:
            return torch.cuda.memory_stats_as_nested_dict(self.device)
        except RuntimeError:
            return None

    def forget_readings(self) -> None:
        self._earlier_peak = 0

    def limit_memory(self, limit_bytes: int) -> None:
        total = torch.cuda.get_device_properties(self.device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total), self.device)

    def sample_source(self) -> "NvmlSource":
        """NVML, which is NVIDIA's: nothing samples a GPU under ROCm."""
        try:
            uuids, pci_bus_id = addresses(self.device)
        except (RuntimeError, AssertionError) as error:  # CUDA cannot be queried: the training will fail likewise
            raise SampleError(str(error)) from error
        if torch.version.hip is not None:
            raise SampleError("NVML is NVIDIA's, but this torch is built for ROCm")
        return NvmlSource(uuids, pci_bus_id)


class NvmlSource:
    """Samples the GPU that NVML knows by one of these addresses. `library` stands in for `pynvml`."""

    def __init__(self, uuids: Sequence[str], pci_bus_id: str | None = None, library: Any = None) -> None:
        try:
            self._nvml = Nvml(library)  # imports pynvml here, not in the thread: a fork must not find it half imported
        except NvmlError as error:
            raise SampleError(str(error)) from error
        self._uuids, self._pci_bus_id = uuids, pci_bus_id

    @contextmanager
    def opened(self) -> Iterator[Device]:
        """NVML from here on."""
        try:
            with self._nvml as nvml:
                device = find(nvml, self._uuids, self._pci_bus_id)
                try:
                    yield device
                finally:
                    device.close()
        except NvmlError as error:
            raise SampleError(str(error)) from error


def addresses(device: torch.device) -> tuple[list[str], str | None]:
    """UUIDs and PCI address by which NVML may know a CUDA device.

    NVML numbers all GPUs of the machine and torch those of CUDA_VISIBLE_DEVICES, so the numbers do not do. Where that
    names a MIG instance, the process has that one alone.
    """
    properties: Any = torch.cuda.get_device_properties(device)
    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    uuids = [name for name in visible[:1] if name.startswith("MIG-")]
    if (uuid := getattr(properties, "uuid", None)) is not None:
        uuids += [f"GPU-{uuid}", f"MIG-{uuid}"]
    parts: list[Any] = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    if None in parts:  # not every version of torch provides them
        return uuids, None
    return uuids, "{:08x}:{:02x}:{:02x}.0".format(*parts)


def cudnn_version() -> int | None:
    """The version of cuDNN; None without one, or if torch refuses it: cuDNN 9.11 and later do not run on a GPU before
    Turing, nor one of another release than torch was built with."""
    try:
        version: int | None = torch.backends.cudnn.version()
    except RuntimeError:
        return None
    return version


def _described(properties: Any) -> dict[str, Any]:
    # ROCm numbers its parts by another count, which would pass for a compute capability.
    amd = torch.version.hip is not None
    return {
        "name": f"AMD {properties.name}" if amd and "AMD" not in properties.name else properties.name,
        "capability": None if amd else f"{properties.major}.{properties.minor}",
        "memory_bytes": properties.total_memory,
        "multiprocessors": getattr(properties, "multi_processor_count", None),
    }
