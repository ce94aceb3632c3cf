"""`torch.cuda` of the fake machine: the functions of torch, with the rules of CUDA.

    >>> install(devices=2)          # torch keeps a device type until the process ends
    >>> torch.cuda.current_stream("cuda:1")
    Stream(device=1, stream=0)

An event without a stream is recorded on the current stream of the thread's current device, and belongs to that device
from then on. The time between events of two devices, or before an event has passed, raises.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch._dynamo  # it inspects torch.cuda once, before the patches
from torch.optim.optimizer import _foreach_supported_types

from tests.fake_cuda import tensors
from tests.fake_cuda.machine import launch, library

TICK_MS = 0.001
NAME = "NVIDIA Fake H100"
MEMORY = ("requested_bytes", "allocated_bytes", "reserved_bytes", "active_bytes")  # all alike: no rounding, no cache

Device = torch.device | str | int | None


def index_of(device: Device) -> int:
    """The index of a device, by default of the current one."""
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return library().fake_current_device() if index is None else index


class Stream:
    """A stream of one device."""

    def __init__(self, device: Device = None, priority: int = 0, *, number: int | None = None) -> None:
        self.device = torch.device("cuda", index_of(device))
        self.stream_id = library().fake_new_stream() if number is None else number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and (other.device, other.stream_id) == (self.device, self.stream_id)

    def __hash__(self) -> int:
        return hash((self.device, self.stream_id))

    def __repr__(self) -> str:
        return f"Stream(device={self.device.index}, stream={self.stream_id})"

    @property
    def device_index(self) -> int:
        return self.device.index

    def query(self) -> bool:
        return bool(library().fake_stream_is_done(self.device.index, self.stream_id))

    def synchronize(self) -> None:
        tensors.waits.append("stream.synchronize")
        library().fake_synchronize(self.device.index, self.stream_id)
        tensors.arrive()

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: "Event") -> None:
        event.wait(self)

    def wait_stream(self, stream: "Stream") -> None:
        self.wait_event(stream.record_event())

    def __enter__(self) -> "Stream":
        self._context = torch.cuda.stream(self)
        self._context.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)


class Event:
    """A point in the queue of a stream."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self._timed = enable_timing
        self._event = library().fake_new_event()
        self._captured = False
        self.device: torch.device | None = None

    def __del__(self) -> None:
        library().fake_free_event(self._event)

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or current_stream()
        if self.device is not None and self.device != stream.device:
            raise RuntimeError(
                f"Event device {self.device.index} does not match recording stream's device {stream.device.index}."
            )
        self.device = stream.device
        self._captured = any(captured.stream == stream for captured in tensors.capturing)
        recorded["events"] += 1
        library().fake_record(self._event, stream.device.index, stream.stream_id)

    def wait(self, stream: Stream | None = None) -> None:
        stream = stream or current_stream()
        if self.device is not None:
            library().fake_block(self._event, stream.device.index, stream.stream_id)

    def _must_be_of_the_host(self) -> None:
        tensors.not_while_capturing()
        if self._captured:
            raise RuntimeError("CUDA error: operation not permitted on an event last recorded in a capturing stream")

    def query(self) -> bool:
        self._must_be_of_the_host()
        passed = self.device is None or bool(library().fake_query(self._event))
        tensors.arrive()
        return passed

    def synchronize(self) -> None:
        self._must_be_of_the_host()
        if self.device is not None:
            tensors.waits.append("event.synchronize")
            library().fake_wait(self._event)
            tensors.arrive()

    def elapsed_time(self, end: "Event") -> float:
        if self.device is None or end.device is None or not (self._timed and end._timed):
            raise ValueError("Both events must be created with argument 'enable_timing=True' and recorded.")
        if self.device != end.device:
            raise RuntimeError("CUDA error: invalid resource handle")
        self._must_be_of_the_host()
        end._must_be_of_the_host()
        lib = library()
        start, stop = lib.fake_passes_at(self._event), lib.fake_passes_at(end._event)
        if max(start, stop) > lib.fake_now():
            raise RuntimeError("CUDA error: device not ready")
        return float(stop - start) * TICK_MS


recorded = {"events": 0}
"""The number of recorded events."""


class CUDAGraph:
    """Captured work runs during the capture already, and in every replay again, on the same memory."""

    replays = 0

    def __init__(self) -> None:
        self.stream: Stream | None = None
        self.writes: list[tensors.Block] = []
        self.work: list[Callable[[], None]] = []

    def replay(self) -> None:
        CUDAGraph.replays += 1
        with torch.no_grad(), torch._C.DisableTorchFunction():
            for again in self.work:
                again()
        for block in self.writes:
            block.written = block.device, *launch(block.device)[:2]


@contextmanager
def graph(captured: CUDAGraph, *args: Any, **kwargs: Any) -> Iterator[None]:
    """Within this context work is captured, on a side stream, after all work of the current device."""
    synchronize()
    captured.stream = Stream()
    with _stream(captured.stream):
        tensors.capturing.append(captured)
        try:
            yield
        finally:
            tensors.capturing.remove(captured)


def current_stream(device: Device = None) -> Stream:
    index = index_of(device)
    return Stream(index, number=library().fake_current_stream(index))


@contextmanager
def _stream(stream: Stream | None) -> Iterator[None]:
    if stream is None:
        yield
        return
    lib = library()
    device, before = lib.fake_current_device(), lib.fake_current_stream(stream.device.index)
    lib.fake_set_device(stream.device.index)
    lib.fake_set_stream(stream.device.index, stream.stream_id)
    try:
        yield
    finally:
        lib.fake_set_stream(stream.device.index, before)
        lib.fake_set_device(device)


class device:  # noqa: N801 - torch's name
    """A device is the current one within this context; None or -1 changes nothing."""

    def __init__(self, device: Device) -> None:
        self.idx = -1 if device is None or device == -1 else index_of(device)

    def __enter__(self) -> None:
        self._before = library().fake_current_device()
        if self.idx >= 0:
            library().fake_set_device(self.idx)

    def __exit__(self, *error: Any) -> None:
        library().fake_set_device(self._before)


def synchronize(device: Device = None) -> None:
    tensors.not_while_capturing()
    tensors.waits.append("synchronize")
    library().fake_synchronize_device(index_of(device))
    tensors.arrive()


def memory_stats_as_nested_dict(device: Device = None) -> dict[str, Any]:
    held = tensors.memory[index_of(device)]
    values = {"current": held.current, "peak": held.peak, "allocated": 0, "freed": 0}
    return {name: {"all": dict(values)} for name in MEMORY}


def reset_peak_memory_stats(device: Device = None) -> None:
    held = tensors.memory[index_of(device)]
    held.peak = held.current


def get_device_properties(device: Device = None) -> Any:
    index = index_of(device)
    return SimpleNamespace(
        name=NAME, major=9, minor=0, total_memory=tensors.memory[index].total, multi_processor_count=132,
        uuid=f"fake-{index}", pci_domain_id=0, pci_bus_id=index + 1, pci_device_id=0,
    )  # fmt: skip


def get_rng_state(device: Device = "cuda") -> torch.Tensor:
    return tensors.generators[index_of(device)].clone()


def set_rng_state(state: torch.Tensor, device: Device = "cuda") -> None:
    tensors.generators[index_of(device)] = state.clone()


def manual_seed_all(seed: int) -> None:
    state = torch.Generator().manual_seed(seed).get_state()
    for index in range(torch.cuda.device_count()):
        tensors.generators[index] = state.clone()


_libraries: list[Any] = []


def install(devices: int = 2, device_ticks: int = 3) -> None:
    """Give torch this many CUDA devices. Call it before the first backward, at which autograd counts devices."""
    lib = library()
    lib.fake_set_up(devices, device_ticks)
    if _libraries:
        return
    fallback = torch.library.Library("_", "IMPL")
    fallback.fallback(tensors.run, "CUDA")  # for factory functions; all others reach `__torch_dispatch__`
    _libraries.append(fallback)
    _foreach_supported_types.append(tensors.CudaTensor)
    torch.__future__.set_overwrite_module_params_on_conversion(
        True
    )  # `data` of a plain tensor cannot become a subclass
    names: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda *args, **kwargs: True,
        "device_count": lambda: devices,
        "current_device": lib.fake_current_device,
        "set_device": lambda device: lib.fake_set_device(index_of(device)),
        "_lazy_init": lambda: None,
        "is_current_stream_capturing": lambda: any(one.stream == current_stream() for one in tensors.capturing),
        "_is_in_bad_fork": lambda: False,
        "CUDAGraph": CUDAGraph,
        "graph": graph,
        "device": device,
        "Stream": Stream,
        "Event": Event,
        "current_stream": current_stream,
        "default_stream": lambda device=None: Stream(device, number=0),
        "stream": _stream,
        "synchronize": synchronize,
        "get_device_properties": get_device_properties,
        "get_device_name": lambda device=None: NAME,
        "get_device_capability": lambda device=None: (9, 0),
        "memory_stats_as_nested_dict": memory_stats_as_nested_dict,
        "memory_allocated": lambda device=None: tensors.memory[index_of(device)].current,
        "max_memory_allocated": lambda device=None: tensors.memory[index_of(device)].peak,
        "memory_reserved": lambda device=None: tensors.memory[index_of(device)].current,
        "mem_get_info": lambda device=None: (2**34 - tensors.memory[index_of(device)].current, 2**34),
        "reset_peak_memory_stats": reset_peak_memory_stats,
        "empty_cache": lambda: None,
        "get_rng_state": get_rng_state,
        "set_rng_state": set_rng_state,
        "get_rng_state_all": lambda: [get_rng_state(index) for index in range(devices)],
        "set_rng_state_all": lambda states: [set_rng_state(state, i) for i, state in enumerate(states)],
        "manual_seed": lambda seed: set_rng_state(torch.Generator().manual_seed(seed).get_state()),
        "manual_seed_all": manual_seed_all,
    }
    torch.cuda.graphs.graph_pool_handle = object
    torch._C._cuda_getCurrentStream = lambda index: (library().fake_current_stream(index), index, 1)  # as torch's tuple
    for name, value in names.items():
        setattr(torch.cuda, name, value)
    manual_seed_all(0)
