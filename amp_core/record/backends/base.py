"""The interface of a device type for recording and training, with defaults for an unknown type.

    class Xpu(Backend):
        type = "xpu"

        @staticmethod
        def count() -> int:
            return torch.xpu.device_count()

A class is one device type and an instance is one device. With the defaults alone a run has its steps, losses, gradients
and times by the host's clock; every number that only the device could provide is null.
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
        """Whether the device has passed it."""

    def synchronize(self) -> None:
        """Wait until it has."""


class Allocated(NamedTuple):
    """Memory in bytes; null if the device does not provide it."""

    allocated_bytes: int | None = None
    peak_bytes: int | None = None
    """Highest since the reading before."""
    reserved_bytes: int | None = None
    """Held by torch's allocator, in use or not."""


class Sampled(Protocol):
    """One device, while its driver is asked."""

    def read(self) -> tuple[dict[str, Any], dict[str, str]]:
        """Values by column of `device`, and why the other columns have none. Raises `SampleError` where all fail."""


class SampleError(Exception):
    """A device or its driver cannot be asked; the message says why."""


class SampleSource(Protocol):
    """Where rows of `device` come from."""

    def opened(self) -> AbstractContextManager[Sampled]:
        """Ask from here on, on the thread that calls. Raises `SampleError`."""


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

    # the type: what there is

    @staticmethod
    def count() -> int:
        """Devices that torch can use."""
        return 0

    @classmethod
    def available(cls) -> bool:
        """Whether torch can use any."""
        return cls.count() > 0

    @classmethod
    def why_unavailable(cls) -> str:
        """Why torch can use none."""
        return f"torch finds no {cls.type} device"

    @staticmethod
    def current() -> int:
        """The index of the device that torch uses where none is named."""
        return 0

    @staticmethod
    def select(index: int) -> None:
        """Make a device the current one."""

    @staticmethod
    def in_use() -> bool:
        """Whether this process has used any: only then are `synchronize` and `release_memory` called."""
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
        """Switches of precision and speed, by their keys in `environment.flags`; a reader may raise `RuntimeError`."""
        return {}

    # the type: precision

    @staticmethod
    def tf32_matmul() -> bool:
        """Whether FP32 matrix products may use TF32."""
        return False

    @staticmethod
    def tf32_switches() -> list[tuple[Any, str]]:
        """Objects and names of the attributes that allow TF32 where they are True."""
        return []

    @staticmethod
    def fp32_precision_owners() -> list[Any]:
        """Objects with PyTorch's newer switch `fp32_precision`; those that this PyTorch lacks are left out."""
        return []

    # the type: work in flight

    @staticmethod
    def synchronize() -> None:
        """Wait for all work of the current device."""

    @staticmethod
    def release_memory() -> None:
        """Give cached memory back, and begin torch's own peak anew."""

    @staticmethod
    def capturing() -> bool:
        """Whether what this thread launches goes into a graph that is replayed later. Called at every hook."""
        return False

    @staticmethod
    def kernels() -> dict[str, Kernel]:
        """Kernels for its tensors, by their names in `stats.dispatch.KERNELS`; plain torch does what is missing."""
        return {}

    # the type: random numbers

    @staticmethod
    def random_states() -> list[torch.Tensor]:
        """States of its generators, one for each device."""
        return []

    @staticmethod
    def set_random_states(states: Sequence[torch.Tensor]) -> None:
        """Take up what `random_states` returned."""

    # the device

    def clock(self) -> Clock:
        """What times phases: by default the host's clock, which does not see what is still queued on the device."""
        return HostClock()

    def selected(self) -> AbstractContextManager[Any]:
        """While this context lasts the device is the current one."""
        return nullcontext()

    def current_stream(self) -> Any:
        """The queue that this thread launches work into; None where there is one alone."""
        return None

    def come_after(self, stream: Any, tensors: Sequence[torch.Tensor]) -> None:
        """What is launched from now on comes after the work of `stream`, and may read `tensors`, which belong to it."""

    def copy_to_host(self, parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, Event | None]:
        """The values of all parts as one float64 vector on the host, and the event after which it may be read.

        Parts on other devices may be among them. By default each is waited for.
        """
        return torch.cat([part.detach().cpu().reshape(-1).to(torch.float64) for part in parts]), None

    def fork_random(self) -> AbstractContextManager[None]:
        """Random number generators are afterwards as before; by default the host's alone."""
        return torch.random.fork_rng(devices=[])

    def memory_bytes(self) -> tuple[int | None, int | None]:
        """Allocated by torch now, and at most so far."""
        return None, None

    def read_allocator(self) -> Allocated:
        """What is allocated now, and the highest since the last reading; `memory_bytes` keeps the true peak."""
        return Allocated()

    def forget_readings(self) -> None:
        """The peaks that `read_allocator` has read count no more in `memory_bytes`."""

    def forget_peaks(self) -> None:
        """Find the highest use anew, for a process that trains once more. torch's own peak is left alone."""
        self.forget_readings()

    def limit_memory(self, limit_bytes: int) -> None:
        """Let this process take no more. Raises `RunError` where that cannot be done."""
        raise RunError(f"limit_bytes={limit_bytes} cannot be kept to on {self.device}; leave the limit out")

    def sample_source(self) -> SampleSource | None:
        """What is sampled while the device works; None for nothing. Raises `SampleError` with the reason."""
        raise SampleError(f"nothing is known here that samples a device of type {self.device.type}")
