"""Events of a trace as flat arrays: times and numbers, each text once.

    >>> events.texts[events.work.name[0]], events.work.start[0]

`collect` fills them, and drops what counts for nothing, so that a trace of a gigabyte takes some hundred megabytes.
"""

import json
import math
import re
from array import array
from dataclasses import dataclass, field
from typing import Any

from amp_core.schema import RunError

RUNTIMES = "cuda|cu|hip|mc|musa|mu|tops"
"""How calls into a device's runtime or driver begin that are CUDA's under other names: NVIDIA's, AMD's, MetaX's, Moore
Threads' and Enflame's."""
OP, MARK = 0, 1
"""Kinds of spans: an operator, or a marked range."""

MAX_TEXT_CHARS = 2**28
"""Together with the limits of the stream these bound the memory that a hostile trace can take."""
MAX_ARGUMENT_CHARS = 4000
STEP = re.compile(r"ProfilerStep#(\d{1,15})$")
"""A marked step, and its number."""

MAX_NAME_CHARS = 2000
MAX_NAMED_RANKS = 100_000
"""A rank of this number or more is none: HCCL writes 2**32 - 1 where it knows none."""


@dataclass
class Spans:
    """Spans of host threads, one entry each in every array; times in microseconds since the first event."""

    start: "array[float]" = field(default_factory=lambda: array("d"))
    end: "array[float]" = field(default_factory=lambda: array("d"))
    thread: "array[int]" = field(default_factory=lambda: array("i"))
    kind: "array[int]" = field(default_factory=lambda: array("b"))
    name: "array[int]" = field(default_factory=lambda: array("i"))
    shapes: "array[int]" = field(default_factory=lambda: array("i"))
    dtypes: "array[int]" = field(default_factory=lambda: array("i"))
    sequence: "array[int]" = field(default_factory=lambda: array("q"))
    external: "array[int]" = field(default_factory=lambda: array("q"))

    def __len__(self) -> int:
        return len(self.start)


@dataclass
class Calls:
    """Calls into the runtime of a device."""

    start: "array[float]" = field(default_factory=lambda: array("d"))
    end: "array[float]" = field(default_factory=lambda: array("d"))
    thread: "array[int]" = field(default_factory=lambda: array("i"))
    name: "array[int]" = field(default_factory=lambda: array("i"))
    correlation: "array[int]" = field(default_factory=lambda: array("q"))
    """Without one, -2 minus the `External id`; -1 without either."""

    def __len__(self) -> int:
        return len(self.start)


@dataclass
class Allocations:
    """Allocations and frees of device memory (`[memory]`), which are calls without a correlation too."""

    call: "array[int]" = field(default_factory=lambda: array("i"))
    device: "array[int]" = field(default_factory=lambda: array("i"))
    allocated: "array[int]" = field(default_factory=lambda: array("q"))
    """Bytes allocated after it."""
    reserved: "array[int]" = field(default_factory=lambda: array("q"))

    def __len__(self) -> int:
        return len(self.call)


@dataclass
class Work:
    """Kernels, copies and fills."""

    start: "array[float]" = field(default_factory=lambda: array("d"))
    end: "array[float]" = field(default_factory=lambda: array("d"))
    device: "array[int]" = field(default_factory=lambda: array("i"))
    stream: "array[int]" = field(default_factory=lambda: array("q"))
    name: "array[int]" = field(default_factory=lambda: array("i"))
    correlation: "array[int]" = field(default_factory=lambda: array("q"))
    external: "array[int]" = field(default_factory=lambda: array("q"))
    occupancy: "array[float]" = field(default_factory=lambda: array("f"))
    """Achieved occupancy as the profiler estimates it, percent; NaN if not estimated, as the next."""
    blocks_per_sm: "array[float]" = field(default_factory=lambda: array("f"))
    shared_bytes: "array[float]" = field(default_factory=lambda: array("f"))
    """Shared memory of a block, bytes."""
    grid: "array[float]" = field(default_factory=lambda: array("f"))
    """The product of its sizes as the launching call takes them; NaN where not known, as the next, and where the trace
    tells the blocks per SM."""
    block: "array[float]" = field(default_factory=lambda: array("f"))
    """Threads of a block."""
    process: "array[int]" = field(default_factory=lambda: array("i"))
    """The process under which the trace lists it, an index into `processes`; -1 where that is not known."""

    def __len__(self) -> int:
        return len(self.start)


@dataclass
class Frames:
    """Calls of Python functions of `LONG_FRAME_US` or more, where the profiler recorded them (`with_stack=True`); also
    of operators, with their times on the device."""

    start: "array[float]" = field(default_factory=lambda: array("d"))
    end: "array[float]" = field(default_factory=lambda: array("d"))
    thread: "array[int]" = field(default_factory=lambda: array("i"))
    name: "array[int]" = field(default_factory=lambda: array("i"))

    def __len__(self) -> int:
        return len(self.start)


LONG_FRAME_US = 300.0
"""Shorter functions count as time of the function that calls them."""


@dataclass
class TraceEvents:
    """The relevant events of a trace."""

    spans: Spans = field(default_factory=Spans)
    calls: Calls = field(default_factory=Calls)
    work: Work = field(default_factory=Work)
    allocations: Allocations = field(default_factory=Allocations)
    frames: Frames = field(default_factory=Frames)
    loadings: Frames = field(default_factory=Frames)
    """When the runtime loads modules and functions (`LOADING`), where the profiler records that as its own overhead."""
    compiling: Frames = field(default_factory=Frames)
    """When torch.compile compiles (`COMPILING`), in nested ranges."""
    profiling: Frames = field(default_factory=Frames)
    """When the profiler does its own work (`PROFILING`, `PROFILING_IN_PYTHON`), where it records that."""
    timed: Frames = field(default_factory=Frames)
    """Operators with their times on the device (`TIMED_ON_DEVICE`)."""
    texts: list[str] = field(default_factory=list)
    threads: int = 0
    base_us: float = 0.0
    """Time of the first event of the file on the trace's own clock."""
    first_us: float = math.inf
    """Time of the earliest event, also of calls that are dropped; infinite where that is not known."""
    profiled: tuple[float, float] | None = None
    """When torch's profiler started and stopped; None where the trace does not tell it, or has several of these."""
    accelerator: str | None = None
    """Type of the device, as torch names it, where a category of the trace gives it."""
    untimed_work: int = 0
    """Kernels, copies and fills at time 0 and of no length, or all of them if none has a length: their times are
    lost."""
    device_range: tuple[float, float] = (math.inf, -math.inf)
    """Start of the first range that is marked on the device's clock, and end of the last."""
    invalid: int = 0
    """Events that were left out because their time or duration is not a number of microseconds, or is negative."""
    converted: int = 0
    """Events whose time or duration is a number written as text."""
    launches: int = 0
    """Calls that start work on a device."""
    unrecorded_from_us: float = math.inf
    """When the first launch begins from which on no launch has its kernel in the trace."""
    accelerator_ops: int = 0
    """Operators and ranges that an accelerator alone has."""
    device_allocations: int = 0
    """Allocations and frees of memory that the trace states to be a device's."""
    host_peak_bytes: int = 0
    """The most memory of the host that tensors held, where the trace tells it."""
    host_frees: list[tuple[float, int]] = field(default_factory=list)
    """When tensors of `MIN_FREED_BYTES` or more are freed on the host, and how large they are."""
    device_thread_ops: int = 0
    """Operators of a backward that runs on threads of a device, of which nothing else tells."""
    device_steps: dict[tuple[int, int], tuple[float, float]] = field(default_factory=dict)
    """Start and end of the marked steps on the device's own clock, by process and number, where the trace has them."""
    processes: list[str] = field(default_factory=list)
    """Numbers of the processes, as text; a device counts as one."""
    thread_process: "array[int]" = field(default_factory=lambda: array("i"))
    """By thread, its process."""
    process_names: dict[str, str] = field(default_factory=dict)
    """Names of processes by their numbers, where the trace gives them."""
    messages_of_span: dict[int, int] = field(default_factory=dict)
    """By span of `record_param_comms`: the text, JSON, of what it says of the collective (`MESSAGE_KEYS`)."""
    causal_spans: dict[int, int] = field(default_factory=dict)
    """By span of attention whose recorded argument says that its mask is causal: 1."""
    convolution_flops: dict[int, int] = field(default_factory=dict)
    """By span of a forward convolution whose arguments are recorded: its floating-point operations."""
    messages_of_work: dict[int, int] = field(default_factory=dict)
    """The same by kernel."""
    peer_copies: dict[tuple[int, int], tuple[float, float]] = field(default_factory=dict)
    """Bytes and microseconds of copies from one device to another, by their numbers."""
    moved_bytes: dict[int, float] = field(default_factory=dict)
    """By copy or fill: how many bytes it moves, where the trace tells it."""
    kernel_threads: dict[int, int] = field(default_factory=dict)
    """By long elementwise kernel: its threads (`amp_core.traces.elementwise_rate`)."""
    convolutions: int = 0
    """Convolutions of which the trace tells whether cuDNN or MIOpen benchmarks its algorithms."""
    benchmarked: int = 0
    """Those of which it does."""
    norms_in_training: int = 0
    """Calls of batch norm whose recorded argument says that they compute the statistics of their batch."""
    overheads: int = 0
    """Events of the profiler's overhead, which torch's records with the activity of a device alone."""
    event_records: int = 0
    """Calls that record an event, also short ones."""
    stream_waits: "array[float]" = field(default_factory=lambda: array("d"))
    """Start of calls after which a stream waits for an event of another, also short ones."""
    metric_ranges: int = 0
    """Ranges with metrics of CUPTI's, which a profiler writes instead of kernels."""
    named_ranks: int = 0
    """Ranks of the training, at least, by those that parts of collectives name; 0 where none does."""
    waits_us: dict[tuple[int, int], float] = field(default_factory=dict)
    """By this rank and another one: how long collectives wait for the other, where the trace tells it."""

    on_main_thread: bool = False
    """Whether operators run on a thread with the number of its process, as Linux numbers the main one."""
    on_macos: bool = False
    """Whether a thread that calls operators has a number that macOS alone gives."""

    @property
    def uses_device(self) -> bool:
        """Whether the program used a device, recorded or not."""
        shown = self.launches or self.accelerator_ops or self.device_allocations or self.device_thread_ops
        return bool(len(self.work) or self.untimed_work or shown)

    def drop_identifiers(self) -> None:
        """Free the numbers that only linking needs: 60 MB of a trace of a gigabyte."""
        self.spans.thread, self.calls.thread = array("i"), array("i")
        self.spans.sequence, self.spans.external = array("q"), array("q")
        self.calls.correlation, self.work.correlation, self.work.external = array("q"), array("q"), array("q")
        self.work.process, self.thread_process = array("i"), array("i")


class InternedTexts:
    """Interned texts: each distinct text is stored once and has a number."""

    def __init__(self, texts: list[str]) -> None:
        self._texts = texts
        self._number: dict[str, int] = {}
        self._lists: dict[str, int] = {}
        self._chars = 0

    def intern(self, text: str) -> int:
        number = self._number.get(text)
        if number is None:
            number = self._number[text] = len(self._texts)
            self._texts.append(text)
            self._chars += len(text)
            if self._chars > MAX_TEXT_CHARS:
                raise RunError("the trace has more distinct names than a profiled program can have")
        return number

    def intern_list(self, value: Any) -> int:
        """The number of `value` as JSON text; -1 for anything but a list, and for a list that is too long."""
        if not isinstance(value, list) or not value:
            return -1
        key = str(value)  # computed for every operator, and cheaper than JSON
        number = self._lists.get(key)
        if number is None:
            text = json.dumps(value)
            number = self._lists[key] = self.intern(text) if len(text) <= MAX_ARGUMENT_CHARS else -1
            self._chars += len(key)
        return number
