"""Collect the relevant events of a trace: times and numbers in flat arrays, each text once.

    >>> events = collect(TraceStream(path))
    >>> len(events.calls), len(events.work), events.texts[events.work.name[0]]

Three kinds of events count. **Spans** of a host thread: operators, and ranges that programs and torch mark (steps,
optimizers, data loading, modules). **Calls** of a thread into the device's runtime, which launch or wait. **Work** of a
device: kernels, copies, fills. The rest (flow arrows, memory, metadata) is dropped, so that a trace of a gigabyte takes
some hundred megabytes.

Old traces (up to PyTorch 1.10) have "Operator", "Kernel", "Memcpy", "Runtime" where newer ones have "cpu_op", "kernel",
"gpu_memcpy", "cuda_runtime"; they record marked ranges as operators, and thread numbers as text. Those up to PyTorch
1.7 have no categories.
"""

import json
import math
import re
from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from amp_core.schema import RunError
from amp_core.traces.ascend import LAUNCH_ARROW, OPERATOR_ARROW, AscendRows, add_npu_work
from amp_core.traces.causal import is_causal
from amp_core.traces.convolutions import convolution_flops
from amp_core.traces.elementwise_rate import threads_of
from amp_core.traces.events import (
    LONG_FRAME_US,
    MARK,
    MAX_ARGUMENT_CHARS,
    MAX_NAME_CHARS,
    OP,
    STEP,
    Frames,
    InternedTexts,
    TraceEvents,
)
from amp_core.traces.grids import sizes_of_launch
from amp_core.traces.refusals import check_categories, check_content, check_duplicates, is_within
from amp_core.traces.rocprof import BEGAN, torchs_events

MAX_EVENTS = 40_000_000

MARKED = re.compile(
    r"ProfilerStep#\d+$|Optimizer\.|enumerate\(DataLoader\)|ampscope\.|nn\.Module: |## |"
    r"DistributedDataParallel\.forward$"
)
"""Marked ranges that old traces record as operators."""

_QUERIES = re.compile(
    r"Query|EventRecord|GetLastError|PeekAt|Occupancy|IsCapturing|WaitEvent|Attribute|GetDevice|Malloc"
)
"""Calls that neither launch nor wait. They can outnumber all others, so only long ones are kept."""
MIN_FREED_BYTES = 16 * 2**20
"""Smaller blocks may stay with the allocator (the mmap threshold of glibc's malloc grows up to 32 MiB)."""
LONG_CALL_US = 50.0
"""Calls that neither wait nor allocate return sooner: a launch takes a few microseconds, also under the profiler."""
LAUNCHES = re.compile(r"Launch|(?i:enqueue)|runFunction|cnInvokeKernel")
"""Calls that start kernels. A copy or a wait does not indicate one: the profiler itself waits for the device."""
_ACCELERATOR_OPS = re.compile(
    r"(?:aten::)?_?(?:cudnn_(?!is_acceptable)|miopen_|(?:flash|efficient)_attention_)|(?:nccl|hccl|xccl):|"
    r"triton_\w+_\d+$|\w+::\w+_(?:cuda|hip|xpu|npu|hpu)$"
)
"""Operators and ranges that an accelerator alone has, as those in which Inductor launches its kernels of Triton, and
those of libraries that end with the name of one (`fbgemm::split_embedding_backward_exact_cuda`).
Recurrent layers ask on a CPU too whether cuDNN would take them."""
_APPLE_OPS = re.compile(r"aten::(?:linear_backward$|_?mps_|_?lstm_mps|\w+_for_mps)")
"""Operators that torch has for Apple's GPUs, whose work it does not record; nested tensors have the first one too."""
LEGACY_PROCESS = "CPU functions"
"""The process of operators in the format of the older torch.autograd.profiler, which has no kernels."""
TIMED_ON_DEVICE = "CUDA functions"
"""Operators whose time on the device torch measured with events, up to PyTorch 1.7: not their kernels."""
LOADING = re.compile(r"(?:Module|Function) Loading$")
"""What CUPTI calls its overhead while the runtime loads code."""
COMPILING = "(dynamo_timed)"
"""How the ranges end that torch.compile marks while it compiles (torch/_dynamo/utils.py)."""
PROFILING = re.compile(r"(?:Buffer Flush|Activity Buffer Request|Instrumentation|Resource|UVM Activity Init)$")
"""What it calls its own work, which a program does not have without the profiler (`CUpti_ActivityOverheadKind`)."""
PROFILING_IN_PYTHON = re.compile(
    r"_record_function_(?:enter|exit)|_(?:enable|disable)_profiler|prepare_profiler|"
    r"torch[/\\]autograd[/\\]profiler\.py\(\d+\): (?:__(?:enter|exit)__|_(?:start|prepare)_trace)$|"
    r"torch[/\\]profiler[/\\]profiler\.py\(\d+\): (?:start|stop|start_trace|stop_trace|prepare_trace|_transit_action)$"
)
"""Functions of torch's own in which the profiler starts, stops or marks a range."""
_OF_SCHEDULE = re.compile(r"torch[/\\]profiler[/\\]profiler\.py\(\d+\): (start_trace|stop|__exit__)$")
"""Functions in which torch's profiler starts to record, and in which it stops for good."""
MEMORY = "[memory]"
"""Name of the events of torch's allocators."""
MESSAGE_KEYS = {
    "Collective name": "name",
    "dtype": "dtype",
    "In msg nelems": "in",
    "Out msg nelems": "out",
    "Group size": "size",
    "Process Group Name": "group",
    "Process Group Ranks": "ranks",
    "Global rank start": "start",
    "Global rank stride": "stride",
}
"""What newer versions of torch say of a collective, in `record_param_comms` and in NCCL's kernels."""
MAX_DEVICES = 1024
"""Larger numbers of devices are damaged."""
MAX_MESSAGES = 1_000_000


def collect(stream: Iterable[dict[str, Any]]) -> TraceEvents:
    """Collect the relevant events of `stream`. Raises `RunError` if there are none, or too many."""
    collector = _Collector()
    for event in stream:
        if event.get("ph") == "X":
            collector.add(event)
        else:
            collector.add_other(event)
    return collector.collected()


class _Collector:
    """Events of one trace, as they are read."""

    def __init__(self) -> None:
        self.events = TraceEvents()
        self._texts = InternedTexts(self.events.texts)
        self._threads: dict[tuple[str, str], int] = {}
        self._processes: dict[str, int] = {}
        self._npu = AscendRows()
        self._base: float | None = None
        self._functions = 0
        self._starts, self._stops = Frames(), Frames()
        self._of_others: Counter[str] = Counter()
        self._is_known = False
        self._of_memory: str | None = None
        self._profiled: list[tuple[float, float]] = []
        self._add = {
            "op": self._add_span,
            "mark": self._add_span,
            "python": self._add_python,
            "call": self._add_call,
            "work": self._add_work,
            "device mark": self._add_device_mark,
            "timed op": self._add_timed,
        }

    def add(self, event: dict[str, Any]) -> None:
        """Add an event with a duration, if it is of a kind that counts."""
        category, events = event.get("cat", event.get("pid")), self.events
        kind = _CATEGORIES.get(category) if isinstance(category, str) else None
        events.metric_ranges += category == METRIC_RANGE
        is_span = category == PROFILER_SPAN and len(self._profiled) < MAX_PROFILERS
        if is_span and (start := _time(event.get("ts"))) is not None:
            self._profiled.append((start, start + (_time(event.get("dur")) or 0.0)))
        if kind is None and "cat" not in event:
            if made := torchs_events(event, events.process_names):
                for one in made:
                    self.add(one)
                return
            kind = _npu_kind(self._npu, event)
        if not self._is_known:
            self._note_origin(event, is_known=kind is not None)
        if kind is None or event.get("name") == DISPATCH_MODE:
            return
        if category in _ACCELERATORS:
            events.accelerator = _ACCELERATORS[category]
        start, duration, name = _time(event.get("ts")), _time(event.get("dur")), event.get("name")
        if start is None or duration is None or duration < 0 or not isinstance(name, str):
            events.invalid += 1
            return
        if kind in ("work", "call") and start == duration == 0:
            events.untimed_work += kind == "work"
            return
        events.converted += isinstance(event["ts"], str) or isinstance(event["dur"], str)
        self._check_size()
        arguments = event.get("args")
        if self._base is None:
            self._base = events.base_us = start
        item = _Event(
            kind=kind,
            name=name[:MAX_NAME_CHARS],
            start=start - self._base,
            duration=duration,
            arguments=arguments if isinstance(arguments, dict) else {},
            event=event,
        )
        if kind == "overhead":
            events.overheads += 1
            self._add_overhead(item)
            return
        events.first_us = min(events.first_us, item.start)
        self._add[kind](item)

    def add_other(self, event: dict[str, Any]) -> None:
        """Add an event without a duration: an allocation, an arrow between rows of an NPU, the name of a process."""
        if event.get("name") == MEMORY and self._base is not None:
            self._add_allocation(event, self._base)
        elif event.get("cat") in (OPERATOR_ARROW, LAUNCH_ARROW) and (at := _time(event.get("ts"))) is not None:
            self._npu.add_arrow(event, at)
        elif event.get("name") == "process_name":
            _add_process_name(self.events.process_names, event)
        if not self._is_known and event.get("ph") not in ("M", None):
            self._note_origin(event, is_known=False)

    def _note_origin(self, event: dict[str, Any], *, is_known: bool) -> None:
        """Note whether `event` is one of a profiler that is read here, by its kind or by what torch's alone writes; if
        not, its category."""
        is_known |= event.get("cat") == PROFILER_SPAN or PROFILER in str(event.get("name"))
        self._is_known |= is_known or (isinstance(event.get("args"), dict) and BEGAN in event["args"])
        category = str(event.get("cat") or "")[:MAX_CATEGORY_CHARS]
        if not self._is_known and (category in self._of_others or len(self._of_others) < MAX_CATEGORIES):
            self._of_others[category] += 1

    def collected(self) -> TraceEvents:
        """All of them. Raises `RunError` if they tell nothing, or hold the trace twice."""
        events = self.events
        if self._base is not None:
            add_npu_work(events, self._npu.linked(), self._base, self._texts, self._threads)
            if len(self._profiled) == 1:
                events.profiled = self._profiled[0][0] - self._base, self._profiled[0][1] - self._base
        events.named_ranks, events.waits_us = self._npu.named_ranks, self._npu.waits_us
        events.threads = len(self._threads)
        events.thread_process = array("i", [_process(pid, self._processes) for pid, _ in self._threads])
        events.processes = list(self._processes)
        threads = self._operator_threads()
        numbers = [_identifier(thread) for _, thread in threads]
        events.on_macos = any(LINUX_THREADS < number < MACOS_THREADS for number in numbers)
        events.on_main_thread = any(process == thread for process, thread in threads)
        events.accelerator = _accelerator_of_calls(events) or events.accelerator
        if len(events.timed):  # among them the operators that only an accelerator has
            events.accelerator_ops = len(events.timed)
        if not events.uses_device:
            of_apple = [number for number, text in enumerate(events.texts) if _APPLE_OPS.match(text)]
            if of_apple and not any("nested" in text for text in events.texts):
                events.accelerator = "mps"
                events.accelerator_ops = int(np.isin(np.asarray(events.spans.name), of_apple).sum())
        if not (len(events.work) or events.accelerator):
            events.accelerator = self._of_memory
        if not (self._is_known or len(self._npu) or CANN in events.process_names.values()):
            check_categories(self._of_others)
        check_content(events, self._functions, is_within(self._starts, self._stops))
        check_duplicates(events.work)
        return events

    def _operator_threads(self) -> list[tuple[str, str]]:
        """The process and the number of each thread with operators or ranges."""
        threads = list(self._threads)
        return [threads[thread] for thread in np.unique(np.asarray(self.events.spans.thread)).tolist()]

    def _check_size(self) -> None:
        events = self.events
        kept = len(events.spans) + len(events.calls) + len(events.work) + len(events.frames) + len(events.timed)
        if kept + len(self._npu) >= MAX_EVENTS:
            raise RunError(f"the trace has more than {MAX_EVENTS:,} events; profile fewer steps at a time")

    def _thread(self, event: dict[str, Any]) -> int:
        place = (str(event.get("pid"))[:40], str(event.get("tid"))[:40])
        return self._threads.setdefault(place, len(self._threads))

    def _add_overhead(self, item: "_Event") -> None:
        if LOADING.search(item.name):
            _add_frame(self.events.loadings, item, 0, self._texts.intern(item.name))
        elif PROFILING.match(item.name):
            _add_frame(self.events.profiling, item, 0, self._texts.intern(item.name))

    def _add_timed(self, item: "_Event") -> None:
        _add_frame(self.events.timed, item, 0, self._texts.intern(item.name))

    def _add_device_mark(self, item: "_Event") -> None:
        process = _process(item.event.get("pid"), self._processes)
        _add_device_step(self.events.device_steps, process, item.name, item.start, item.end)
        first, last = self.events.device_range
        self.events.device_range = min(first, item.start), max(last, item.end)

    def _add_work(self, item: "_Event") -> None:
        event, arguments, work = item.event, item.arguments, self.events.work
        if event.get("cat") == "mtia_ccp_events" and item.name.startswith("event_"):  # waits, and records of events
            return
        work.start.append(item.start)
        work.end.append(item.end)
        work.device.append(_device_number(arguments.get("device", event.get("pid")), 0))
        work.stream.append(_identifier(arguments.get("stream", event.get("tid"))))
        work.name.append(self._texts.intern(item.name))
        work.correlation.append(_identifier(arguments.get("correlation")))
        work.external.append(_identifier(arguments.get("External id", arguments.get("external id"))))
        for column, key in (
            (work.occupancy, "est. achieved occupancy %"),
            (work.blocks_per_sm, "blocks per SM"),
            (work.shared_bytes, "shared memory"),
        ):
            value = _time(arguments.get(key))
            column.append(math.nan if value is None else value)
        is_told = not math.isnan(work.blocks_per_sm[-1])
        grid, block = (math.nan, math.nan) if is_told else sizes_of_launch(arguments)
        work.grid.append(grid)
        work.block.append(block)
        work.process.append(_process(event.get("pid"), self._processes))
        if (moved := _time(arguments.get("bytes"))) is not None and moved >= 0:
            self.events.moved_bytes[len(work) - 1] = moved
            self._add_peer_copy(arguments, moved, item.duration)
        if threads := threads_of(item.name, item.duration, arguments):
            self.events.kernel_threads[len(work) - 1] = threads
        if "Collective name" in arguments:
            _add_message(self.events.messages_of_work, len(work) - 1, arguments, self._texts)

    def _add_peer_copy(self, arguments: dict[str, Any], moved: float, us: float) -> None:
        devices = arguments.get("fromDevice"), arguments.get("toDevice")
        source, to = (one if isinstance(one, int) and 0 <= one < MAX_DEVICES else -1 for one in devices)
        if min(source, to) >= 0 and source != to:
            before = self.events.peer_copies.get((source, to), (0.0, 0.0))
            self.events.peer_copies[source, to] = before[0] + moved, before[1] + us

    def _add_call(self, item: "_Event") -> None:
        self.events.event_records += item.name == EVENT_RECORD
        if STREAM_WAIT in item.name:
            self.events.stream_waits.append(item.start)
        if item.duration < LONG_CALL_US and _QUERIES.search(item.name):
            return
        calls = self.events.calls
        self.events.launches += LAUNCHES.search(item.name) is not None
        calls.start.append(item.start)
        calls.end.append(item.end)
        calls.thread.append(self._thread(item.event))
        calls.name.append(self._texts.intern(item.name))
        correlation = _identifier(item.arguments.get("correlation"))
        external = min(_identifier(item.arguments.get("External id")), 2**62)
        calls.correlation.append(-2 - external if correlation < 0 else correlation)

    def _add_python(self, item: "_Event") -> None:
        """Add a function if it is long, and a module's as a span."""
        self._functions += 1
        if "profiler.py(" in item.name and (match := _OF_SCHEDULE.search(item.name)) is not None:
            of_name = self._starts if match[1] == "start_trace" else self._stops
            if len(of_name) < MAX_PROFILERS:
                _add_frame(of_name, item, self._thread(item.event), 0)
        if item.duration >= LONG_FRAME_US and PROFILING_IN_PYTHON.search(item.name):
            _add_frame(self.events.profiling, item, 0, self._texts.intern(item.name))
        if item.duration >= LONG_FRAME_US:
            function = self._texts.intern(_function_name(item.name))
            _add_frame(self.events.frames, item, self._thread(item.event), function)
        if item.name.startswith("nn.Module: "):
            self._add_span(item)

    def _add_span(self, item: "_Event") -> None:
        arguments, events, spans, texts = item.arguments, self.events, self.events.spans, self._texts
        if item.name.endswith(COMPILING):
            _add_frame(events.compiling, item, self._thread(item.event), texts.intern(item.name))
        events.accelerator_ops += item.kind != "python" and _ACCELERATOR_OPS.match(item.name) is not None
        spans.start.append(item.start)
        spans.end.append(item.end)
        spans.thread.append(self._thread(item.event))
        spans.kind.append(MARK if item.kind == "mark" or MARKED.match(item.name) is not None else OP)
        spans.name.append(texts.intern(item.name))
        spans.shapes.append(texts.intern_list(arguments.get("Input Dims")))
        spans.dtypes.append(texts.intern_list(arguments.get("Input type")))
        spans.sequence.append(_identifier(arguments.get("Sequence number")))
        spans.external.append(_identifier(arguments.get("External id", arguments.get("external id"))))
        if "Collective name" in arguments:
            _add_message(events.messages_of_span, len(spans) - 1, arguments, texts)
        inputs = arguments.get("Concrete Inputs")
        if item.name == BATCH_NORM and isinstance(inputs, list) and len(inputs) == BATCH_NORM_INPUTS:
            events.norms_in_training += inputs[TRAINING_INPUT] == "True"
        if is_causal(item.name, inputs):
            events.causal_spans[len(spans) - 1] = 1
        if (flops := convolution_flops(item.name, arguments.get("Input Dims"), inputs)) is not None:
            events.convolution_flops[len(spans) - 1] = flops
        if item.name == CONVOLUTION and (benchmark := _benchmark(inputs)) is not None:
            events.convolutions += 1
            events.benchmarked += benchmark

    def _add_allocation(self, event: dict[str, Any], base: float) -> None:
        """Add an allocation or a free on a device; of memory of the host the peak is kept."""
        arguments, at = event.get("args"), _time(event.get("ts"))
        if not isinstance(arguments, dict) or at is None:
            return
        allocated, reserved = (_identifier(arguments.get(f"Total {what}")) for what in ("Allocated", "Reserved"))
        if arguments.get("Device Type") == 0:
            self.events.host_peak_bytes = max(self.events.host_peak_bytes, allocated)
            change = arguments.get("Bytes")
            if (
                type(change) is int
                and -(2**63) < change <= -MIN_FREED_BYTES
                and len(self.events.host_frees) < MAX_EVENTS
            ):
                self.events.host_frees.append((at - base, -change))
            return
        calls, allocations = self.events.calls, self.events.allocations
        if (number := _identifier(arguments.get("Device Type"))) in _OF_MEMORY:
            self.events.device_allocations += 1
            self._of_memory = _OF_MEMORY[number]
        if allocated < 0 or len(calls) >= MAX_EVENTS:
            return
        allocations.call.append(len(calls))
        allocations.device.append(_device_number(arguments.get("Device Id"), 0))
        allocations.allocated.append(allocated)
        allocations.reserved.append(reserved)
        calls.start.append(at - base)
        calls.end.append(at - base)
        calls.thread.append(self._thread(event))
        calls.name.append(self._texts.intern(MEMORY))
        calls.correlation.append(-1)


@dataclass(slots=True)
class _Event:
    """An event with a duration; times in microseconds since the first one."""

    kind: str
    name: str
    start: float
    duration: float
    arguments: dict[str, Any]
    event: dict[str, Any]

    @property
    def end(self) -> float:
        return self.start + self.duration


PROFILER_SPAN, PROFILER, CANN = "Trace", "PyTorch Profiler", "CANN"
"""Category and name of the span of torch's profiler, and name of the process of Ascend's calls."""
MAX_CATEGORIES, MAX_CATEGORY_CHARS = 1000, 60
MAX_PROFILERS = 1000
"""Starts and stops of torch's profiler that are looked at: a program has a few."""
LINUX_THREADS, MACOS_THREADS = 2**22, 2**28
"""Linux numbers threads up to the first, and Windows anew from small numbers; macOS counts all since its start. Larger
numbers are addresses of threads, as some versions of torch write them on any system."""
CONVOLUTION = "aten::_convolution"


def _benchmark(inputs: object) -> bool | None:
    """The argument `benchmark` of a convolution among its concrete inputs; None where it is not recorded."""
    if not isinstance(inputs, list) or len(inputs) < CONVOLUTION_INPUTS:
        return None
    return {"True": True, "False": False}.get(str(inputs[BENCHMARK_INPUT]))


BENCHMARK_INPUT, CONVOLUTION_INPUTS = 9, 12
"""Place of it, and the least number of inputs, of `aten::_convolution` (native_functions.yaml)."""
BATCH_NORM, TRAINING_INPUT, BATCH_NORM_INPUTS = "aten::batch_norm", 5, 9
"""The operator, place of its argument `training`, and number of its inputs (native_functions.yaml)."""
STREAM_WAIT = "StreamWaitEvent"
"""In the names of calls after which a stream waits for an event of another."""
EVENT_RECORD = "cudaEventRecord"
"""The call around each operator where torch measures operators with events instead of recording kernels."""
METRIC_RANGE = "cuda_profiler_range"
"""Category of what the profiler writes instead of kernels where it is asked for metrics (`profiler_metrics`)."""
DISPATCH_MODE = "PythonDispatchMode"
"""What torch calls a mode of Python that an operator runs under: no operator of its own."""

_CATEGORIES = {
    "cpu_op": "op",
    "Operator": "op",
    "cpu": "op",  # torch.autograd.profiler without Kineto
    LEGACY_PROCESS: "op",  # the same in its own format: the process of events without a category
    TIMED_ON_DEVICE: "timed op",
    "user_annotation": "mark",
    "gpu_user_annotation": "device mark",
    "python_function": "python",
    "overhead": "overhead",
    "cuda_runtime": "call",
    "cuda_driver": "call",
    "hip_runtime": "call",
    "hip_driver": "call",
    "xpu_runtime": "call",
    "xpu_driver": "call",
    "mtia_runtime": "call",
    "privateuse1_runtime": "call",
    "privateuse1_driver": "call",
    "mlu_runtime": "call",
    "hpu_op": "call",  # Habana's calls on the host
    "Runtime": "call",
    "kernel": "work",
    "Kernel": "work",
    "gpu_memcpy": "work",
    "Memcpy": "work",
    "gpu_memset": "work",
    "Memset": "work",
    "mtia_ccp_events": "work",
    "mlu_memcpy": "work",
    "mlu_memset": "work",
}
"""What an event is, by its category (libkineto's `ActivityType.cpp`, and that of Cambricon's fork)."""

_ACCELERATORS = {
    **dict.fromkeys(("xpu_runtime", "xpu_driver"), "xpu"),
    **dict.fromkeys(("mtia_runtime", "mtia_ccp_events"), "mtia"),
    **dict.fromkeys(("privateuse1_runtime", "privateuse1_driver"), "privateuseone"),
    **dict.fromkeys(("mlu_runtime", "mlu_memcpy", "mlu_memset"), "mlu"),
    "hpu_op": "hpu",
}
"""Types of devices other than `cuda`, by the categories that only they have."""


_OF_MEMORY = {1: "cuda", 6: "cuda", 12: "xpu", 15: "hpu", 19: "mtia", 20: "privateuseone"}
"""Types of devices by the number that torch's allocators write (`c10/core/DeviceType.h`); 6 is HIP."""


_ACCELERATORS_OF_CALLS = {"musa": "musa", "tops": "gcu"}
"""Types of devices whose calls may have the categories of CUDA's, by how their names begin."""


def _accelerator_of_calls(events: TraceEvents) -> str | None:
    """The type of the device into whose runtime the host calls, where that tells it."""
    names = [events.texts[number] for number in set(events.calls.name)]
    return next((_ACCELERATORS_OF_CALLS[name[:4]] for name in names if name[:4] in _ACCELERATORS_OF_CALLS), None)


def _npu_kind(npu: AscendRows, event: dict[str, Any]) -> str | None:
    """`call` for a call of the host into CANN; a row of an NPU is added to `npu`."""
    start, duration = _time(event.get("ts")), _time(event.get("dur"))
    if start is None or duration is None or duration < 0:
        return None
    return "call" if npu.add(event, start, duration) else None


def _add_frame(frames: Frames, item: _Event, thread: int, name: int) -> None:
    frames.start.append(item.start)
    frames.end.append(item.end)
    frames.thread.append(thread)
    frames.name.append(name)


def _function_name(name: str) -> str:
    """A Python function as `file.py(12): function`, with at most one folder and without addresses in memory."""
    return _ADDRESS.sub("", _FOLDERS.sub("", name))


_FOLDERS = re.compile(r"^[^<>]*/(?=[^/]+/[^/]+\.py\()")
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def _add_device_step(
    steps: dict[tuple[int, int], tuple[float, float]], process: int, name: str, start: float, end: float
) -> None:
    """Add a mark of a step on the device's clock. There is one per stream; together they are the step."""
    match = STEP.match(name)
    if match:
        key = (process, int(match.group(1)))
        first, last = steps.get(key, (start, end))
        steps[key] = min(first, start), max(last, end)


def _process(pid: Any, processes: dict[str, int]) -> int:
    """The number of a process; -1 beyond `MAX_PROCESSES`."""
    text = str(pid)[:40]
    return processes.get(text, -1) if len(processes) >= MAX_PROCESSES else processes.setdefault(text, len(processes))


def _add_process_name(names: dict[str, str], event: dict[str, Any]) -> None:
    """Add the name of a process, if the event gives one."""
    arguments = event.get("args")
    name = arguments.get("name") if isinstance(arguments, dict) else None
    if isinstance(name, str) and len(names) < MAX_PROCESSES:
        names[str(event.get("pid"))[:40]] = name[:MAX_NAME_CHARS]


MAX_PROCESSES = 10_000
"""A trace of more processes is not one of several ranks."""


def _add_message(messages: dict[int, int], item: int, arguments: dict[str, Any], texts: InternedTexts) -> None:
    values = {short: arguments[key] for key, short in MESSAGE_KEYS.items() if isinstance(arguments.get(key), int | str)}
    text = json.dumps(values)
    if len(messages) < MAX_MESSAGES and len(text) <= MAX_ARGUMENT_CHARS:
        messages[item] = texts.intern(text)


def _time(value: Any) -> float | None:
    if isinstance(value, str):  # as some scripts that edit traces write it
        value = float(value) if _NUMBER.fullmatch(value) else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not -1e18 < value < 1e18:
        return None
    return value


_NUMBER = re.compile(r"\s*-?\d{1,20}(?:\.\d{1,20})?(?:[eE][+-]?\d{1,2})?\s*", flags=re.ASCII)


def _identifier(value: Any) -> int:
    """A non-negative identifier, or -1."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63:
        return value
    if isinstance(value, str) and value.isdecimal() and len(value) < 19:
        return int(value)
    return -1


def _device_number(value: Any, otherwise: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1024 else otherwise
