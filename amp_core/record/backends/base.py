"""The interface of a device type for recording and training, with defaults for an unknown type.

    class Xpu(Backend):
        type = "xpu"

        @staticmethod
        def count() -> int:
            return torch.xpu.device_count()

A class is one device type and an instance is one device. With the defaults alone a run has steps, losses, gradients and
times by the host's clock; all numbers that only the device could provide are null.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch.profiler import ProfilerActivity

from amp_core.record.step_phases import Clock, HostClock
from amp_core.schema import RunError

Kernel = Callable[..., Any]
"""One of `stats.dispatch.KERNELS`."""


class Event(Protocol):
    """A point in the work of a device."""

    def query(self) -> bool:
        """Whether the device has reached it."""

    def synchronize(self) -> None:
        """Wait until the device has reached it."""


class Allocated(NamedTuple):
    """Memory in bytes; null if the device does not provide it."""

    allocated_bytes: int | None = None
    peak_bytes: int | None = None
    """Highest since the reading before."""
    reserved_bytes: int | None = None
    """Held by torch's allocator, in use or not."""


class Room(NamedTuple):
    """Memory in bytes of torch's allocator, and of the device."""

    allocated_bytes: int
    peak_bytes: int
    """The most that was allocated since the last reset."""
    free_bytes: int
    """Free on the device; what the allocator caches is not."""


class Sampled(Protocol):
    """An open connection to the driver of one device."""

    def read(self) -> tuple[dict[str, Any], dict[str, str]]:
        """Values by column of `device`, and the reasons why other columns have none. Raises `SampleError` if all
        fail."""


class SampleError(Exception):
    """The driver cannot be queried; the message says why."""


class SampleSource(Protocol):
    """A source of rows for the table `device`."""

    def opened(self) -> AbstractContextManager[Sampled]:
        """Connect to the driver, on the calling thread. Raises `SampleError`."""


class Backend:
    """One device. Class methods concern its type, and every device of it."""

    type: ClassVar[str] = ""
    """As `torch.device.type` has it."""
    has_float64: ClassVar[bool] = False
    """Whether its tensors can be float64, which packed statistics are. Where not, they are packed on the host."""
    may_lack_kernels: ClassVar[bool] = True
    """Whether a kernel that fails is replaced by plain torch. Kernels that compile on first use need a compiler."""
    profiler_activity: ClassVar[ProfilerActivity | None] = None
    """What torch's profiler records of its work; None for nothing."""
    collectives: ClassVar[str] = "gloo"
    """The backend of torch.distributed for its tensors."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    # the type: its devices

    @staticmethod
    def count() -> int:
        """The number of devices that torch can use."""
        return 0

    @classmethod
    def available(cls) -> bool:
        """Whether torch can use any."""
        return cls.count() > 0

    @classmethod
    def why_unavailable(cls) -> str:
        """The reason why torch can use none."""
        return f"torch finds no {cls.type} device"

    @staticmethod
    def current() -> int:
        """The index of torch's current device."""
        return 0

    @staticmethod
    def select(index: int) -> None:
        """Make a device the current one."""

    @staticmethod
    def in_use() -> bool:
        """Whether this process has used any device; else `synchronize` and `release_memory` are not called."""
        return False

    @staticmethod
    def gpus() -> list[dict[str, Any]]:
        """For each device: name, capability (NVIDIA's compute capability as `9.0`, else None), memory_bytes,
        multiprocessors. `hardware.gpus` and `hardware.data_sheets` know the rest by name and capability."""
        return []

    @staticmethod
    def versions() -> dict[str, Any]:
        """Versions of its libraries, by their keys in the `environment` of a run's head."""
        return {}

    @staticmethod
    def flags() -> Mapping[str, Callable[[], Any]]:
        """Functions that read the flags for precision and speed, by their keys in `environment.flags`; may raise
        `RuntimeError`."""
        return {}

    # the type: precision

    @staticmethod
    def tf32_matmul() -> bool:
        """Whether FP32 matrix products may use TF32."""
        return False

    @staticmethod
    def tf32_switches() -> list[tuple[Any, str]]:
        """Pairs of object and attribute name; the attribute allows TF32 if it is True."""
        return []

    @staticmethod
    def fp32_precision_owners() -> list[Any]:
        """Objects with PyTorch's newer flag `fp32_precision`, as far as this PyTorch has them."""
        return []

    # the type: work in flight

    @staticmethod
    def synchronize() -> None:
        """Wait for all work of the current device."""

    @staticmethod
    def release_memory() -> None:
        """Return cached memory to the device, and reset torch's own peak."""

    @staticmethod
    def capturing() -> bool:
        """Whether this thread is capturing a graph that is replayed later. Called at every hook."""
        return False

    @staticmethod
    def kernels() -> dict[str, Kernel]:
        """Kernels for its tensors, by their names in `stats.dispatch.KERNELS`; plain torch replaces missing ones."""
        return {}

    # the type: random numbers

    @staticmethod
    def random_states() -> list[torch.Tensor]:
        """States of its generators, one for each device."""
        return []

    @staticmethod
    def set_random_states(states: Sequence[torch.Tensor]) -> None:
        """Restore the states that `random_states` returned."""

    # the device

    def clock(self) -> Clock:
        """The clock for phases: by default the host's, which does not include work that is still queued on the
        device."""
        return HostClock()

    def selected(self) -> AbstractContextManager[Any]:
        """Make the device the current one within this context."""
        return nullcontext()

    def current_stream(self) -> Any:
        """The queue that this thread launches work into; None where there is one alone."""
        return None

    def come_after(self, stream: Any, tensors: Sequence[torch.Tensor]) -> None:
        """What is launched from now on comes after the work of `stream`, and may read `tensors`, which belong to it."""

    def copy_to_host(self, parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, Event | None]:
        """All parts, vectors of one dtype, as one vector on the host, and the event after which it may be read.

        Parts may be on other devices. The default waits for each.
        """
        return torch.cat([part.cpu() for part in parts]), None

    def fork_random(self) -> AbstractContextManager[None]:
        """Restore random number generators afterwards; by default only the host's."""
        return torch.random.fork_rng(devices=[])

    def room(self) -> Room:
        """What its memory has room for; without any by default."""
        return Room(0, 0, 0)

    def memory_bytes(self) -> tuple[int | None, int | None]:
        """Bytes allocated by torch now, and their peak so far."""
        return None, None

    def read_allocator(self) -> Allocated:
        """Memory allocated now, and its peak since the last reading; `memory_bytes` still returns the true peak."""
        return Allocated()

    def forget_readings(self) -> None:
        """Exclude the peaks that `read_allocator` has read from `memory_bytes`."""

    def forget_peaks(self) -> None:
        """Restart the tracking of the peak, for a process that trains again. torch's own peak stays unchanged."""
        self.forget_readings()

    def limit_memory(self, limit_bytes: int) -> None:
        """Limit the memory of this process. Raises `RunError` if the device has no such limit."""
        raise RunError(f"limit_bytes={limit_bytes} cannot be enforced on {self.device}; remove the limit")

    def sample_source(self) -> SampleSource | None:
        """The source of device samples; None if the type has none. Raises `SampleError` with the reason if it cannot be
        used."""
        raise SampleError(f"no sampler exists for devices of type {self.device.type}")
