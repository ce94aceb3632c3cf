"""Read a trace of torch.profiler as rows of a run's tables.

    >>> trace = read_trace("rank0.pt.trace.json.gz")
    >>> trace.rank, trace.steps, len(trace.kernels["name"])
    (0, 5, 143)
    >>> trace.write(writer)            # a RunWriter: `kernels`, `windows`, `steps` and other tables of this rank

Needs neither torch nor a GPU, and less memory than the size of the trace.
"""

import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from amp_core.hardware.gpus import AMD_WARP, amd_name, is_amd
from amp_core.schema import RunError
from amp_core.store.writer import RunWriter
from amp_core.text.formatting import duration, number
from amp_core.traces import rocprof
from amp_core.traces.chains import ACCUMULATES
from amp_core.traces.collect import LEGACY_PROCESS, collect
from amp_core.traces.collective_rows import collective_rows, host_collective_rows, named_ranks
from amp_core.traces.cpu_calls import CallCost, SlowCalls, SlowSteps, call_cost, slow_calls, slow_steps
from amp_core.traces.decoding import Decoding, decoding
from amp_core.traces.device_threads import operators_on_device_threads
from amp_core.traces.device_times import (
    MIN_UNRECORDED_US,
    DeviceClock,
    cut_last_step,
    drop_cut_step,
    drop_steps_without_work,
    step_times,
)
from amp_core.traces.elementwise_rate import ElementwiseRate, elementwise_rate
from amp_core.traces.events import OP, TraceEvents
from amp_core.traces.few_operators import FewOperators, few_operators
from amp_core.traces.first_calls import first_calls
from amp_core.traces.first_sizes import FirstSizes, first_sizes
from amp_core.traces.gpu_work import LinkedWork, launches_block, launches_without_work, link_work
from amp_core.traces.graphs import (
    CAPTURES,
    GRAPH_BUILDS,
    GRAPH_LAUNCHES,
    CapturedCalls,
    Compilations,
    captured_calls,
    compilations,
    compiled_calls,
    compiled_launch_frac,
    compiled_regions,
    count_calls,
    tokens_of_smallest_pass,
)
from amp_core.traces.growing_rows import GrowingRows, growing_rows
from amp_core.traces.host_alone import HostPart, longest_host_part, longest_timed_op
from amp_core.traces.json_stream import TraceStream
from amp_core.traces.kernel_rows import Rows, kernel_rows, launch_windows, trace_windows
from amp_core.traces.left_out import PartLeftOut, parts_left_out
from amp_core.traces.link import EVALUATE, link, optimizer_names
from amp_core.traces.loader_workers import WITH_WORKERS, WorkerTimes, worker_times
from amp_core.traces.long_calls import outer_frees
from amp_core.traces.long_views import LongView, long_view
from amp_core.traces.loops import OperatorLoop, operator_loop
from amp_core.traces.lost_tail import lost_tail_us
from amp_core.traces.memory_rows import add_step_memory, memory_rows
from amp_core.traces.merged_ranks import split_ranks
from amp_core.traces.misclocked import Misclocked, drop_misclocked
from amp_core.traces.passes import Passes, equal_passes, repeated_passes
from amp_core.traces.peer_links import PeerLinks, peer_links
from amp_core.traces.phases import infer_phases
from amp_core.traces.products import join_products
from amp_core.traces.recomputation import Recomputation, recomputation
from amp_core.traces.slow_device import SlowDevice, slow_device
from amp_core.traces.step_rows import op_rows, step_rows
from amp_core.traces.thinned import Sampled, is_thinned, sampled
from amp_core.traces.timeline_rows import timeline_rows
from amp_core.traces.unequal_products import UnequalProducts, unequal_products
from amp_core.traces.waits import main_wait
from amp_core.traces.window_rows import window_rows

MIN_RECORDS_PER_OPERATOR = 1.5
"""Calls that record an event, per operator and range, from which each of these has a pair of them."""

MAX_ROWS_AT_A_TIME = 10_000
"""Rows that are written at a time: four copies of them are in memory meanwhile."""


@dataclass(frozen=True)
class Trace:
    """One trace file: columns of rows by table, and facts about where it was recorded."""

    name: str
    """Name of the file."""
    rank: int | None
    world_size: int | None
    """Ranks of the training, as the trace states."""
    named_ranks: int = 0
    """The same, at least, by the ranks that its collectives name; 0 where they name none."""
    waits_us: dict[tuple[int, int], float] = field(default_factory=dict)
    """By this rank and another one: how long collectives wait for the other, where the trace tells it."""
    gpus: list[dict[str, Any]] = field(default_factory=list)
    """name, memory_bytes, capability, multiprocessors of each GPU that the trace lists."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Other values of its head: versions, flags of the profiler."""
    began_us: float = 0.0
    """Time of the first event; microseconds since 1970 in traces with absolute times."""
    kernels: Rows = field(default_factory=dict)
    windows: Rows = field(default_factory=dict)
    step_rows: Rows = field(default_factory=dict)
    ops: Rows = field(default_factory=dict)
    collectives: Rows = field(default_factory=dict)
    memory: Rows = field(default_factory=dict)
    timeline: Rows = field(default_factory=dict)
    accelerator: str = "cuda"
    """Type of its devices, as torch names it."""
    unrecorded: bool = False
    """Whether the program used a device and the trace holds none of its work. Then it has no kernels and no windows:
    the times of operators are those of launching."""
    launches: int = 0
    """Calls that start work on a device."""
    overheads: int = 0
    """Events of the profiler's overhead, which torch's records with the activity of a device alone."""
    accelerator_ops: int = 0
    """Operators and ranges that an accelerator alone has."""
    device_allocations: int = 0
    """Allocations and frees of memory that the trace states to be a device's."""
    host_peak_bytes: int = 0
    """The most memory of the host that tensors held, where memory was recorded."""
    unused_device: bool = False
    """Whether the profiler recorded calls into a device's runtime, and none of them uses the device."""
    device_thread_ops: int = 0
    """Operators of a backward that runs on threads of a device, of which nothing else tells."""
    host_part: HostPart | None = None
    """If it is unrecorded: what keeps the host busy the longest."""
    timed_op: tuple[str, float] | None = None
    """If it is unrecorded, and torch timed operators on the device: the longest there, and its share of the time."""
    earlier_us: float = 0.0
    """Time at the beginning of a trace without steps in which the device did what was launched before it."""
    queued_us: float = 0.0
    """For how long after the first event of the host the device did what was launched before the trace began."""
    lost_tail_us: float = 0.0
    """How long the host waits for the device after its last recorded work; 0 where it does not, or not long."""
    launch_blocking: bool = False
    """Whether each launch of a kernel returns only when the kernel has ended."""
    captures: int = 0
    """Captures of graphs on the device."""
    graph_launches: int = 0
    """Launches of captured graphs."""
    graph_builds: int = 0
    """Calls that instantiate or change a graph."""
    compiled_calls: int = 0
    """Calls of compiled code."""
    compiled_regions: int = 0
    """Pieces of code that are called compiled, where torch numbers them."""
    outer_frees: int = 0
    """Long calls that free memory of a device outside of operators."""
    pass_tokens: int = 0
    """Tokens of the smallest pass that a serving engine marks."""
    decoding: Decoding | None = None
    peer_links: PeerLinks | None = None
    captured_calls: CapturedCalls | None = None
    """Calls of compiled code in which graphs are captured, if there are several."""
    compiled_launch_frac: float = 0.0
    """Share of the device's work that the host launches from compiled code."""
    without_operators: bool = False
    """Whether it holds a device's work and none of the operators that launch it."""
    thinned: bool = False
    """Whether most operators were removed from it."""
    sampled: Sampled | None = None
    times_by_events: bool = False
    """Whether the program recorded a pair of events around each operator, as torch does where it is not asked for
    kernels."""
    legacy_format: bool = False
    """Whether it has the format of the older torch.autograd.profiler, which never records kernels."""
    metric_ranges: int = 0
    """Ranges with metrics, which a profiler writes instead of kernels."""
    misclocked: Misclocked | None = None
    """Work that is left out, for its times are none of the trace."""
    unequal_products: UnequalProducts | None = None
    slow_calls: SlowCalls | None = None
    slow_steps: SlowSteps | None = None
    call_cost: CallCost | None = None
    recomputation: Recomputation | None = None
    compilations: Compilations | None = None
    slow_device: SlowDevice | None = None
    elementwise_rate: ElementwiseRate | None = None
    first_sizes: FirstSizes | None = None
    long_view: LongView | None = None
    few_operators: FewOperators | None = None
    operator_loop: OperatorLoop | None = None
    """A loop of Python over small operators that takes long."""
    growing_rows: GrowingRows | None = None
    gathers_weights: bool = False
    """Whether torch's FullyShardedDataParallel gathers weights before the layers that need them, as its marks tell."""
    accumulates_gradients: bool = False
    """Whether autograd adds gradients to those of leaves, as `backward()` does and `torch.autograd.grad` does not."""
    loader: str = ""
    """Where a DataLoader loads: `own process` of the loop, or its `workers`; "" where no mark tells it."""
    norms_in_training: int = 0
    """Calls of batch norm that compute the statistics of their batch, where their arguments are recorded."""
    on_macos: bool = False
    """Whether the numbers of its threads are those of macOS."""
    benchmarks: bool = False
    """Whether cuDNN or MIOpen benchmarks the algorithms of all convolutions that tell it."""
    equal_passes: int = 0
    """How often the same launches repeat, in a trace without marked steps."""
    worker_times: WorkerTimes | None = None
    launches_without_work: tuple[int, int, bool] = (0, 0, False)
    """Launches of kernels whose kernel is not recorded, and all launches of kernels."""
    first_calls: dict[str, tuple[float, int]] = field(default_factory=dict)
    """What first calls take nearly all of the time of, as operators, and how long these take, microseconds."""
    optimizers: list[str] = field(default_factory=list)
    """Classes of the optimizers that step, where torch marks their steps."""
    sync_call: str = ""
    """Name of the calls in which the host waits for the device most often; see `main_wait`."""
    left_out: tuple[PartLeftOut, ...] = ()
    """Large parts outside of the windows of a trace without marked steps."""
    passes: Passes | None = None
    """Equal series of launches without step marks, of which the first takes most of the time."""
    repaired: int = 0
    """Number of values that were not valid JSON and were repaired."""
    converted: int = 0
    """Number of events whose time was a number written as text."""
    invalid: int = 0
    """Number of events without a valid time, which were left out."""

    @property
    def notes(self) -> list[str]:
        """What an import has to say of it, in words."""
        notes = []
        if self.repaired:
            were = "value was not valid JSON and was" if self.repaired == 1 else "values were not valid JSON and were"
            notes.append(f"{self.name}: {self.repaired:,} {were} repaired or left out")
        if self.converted:
            notes.append(f"{self.name}: {_events(self.converted)} with times written as text, read as numbers")
        if self.invalid:
            notes.append(f"{self.name}: {_events(self.invalid)} without a valid time and duration, left out")
        if self.misclocked is not None:
            notes.append(
                f"{self.name}: {self.misclocked.count:,} activities of the device start "
                f"{duration(self.misclocked.off_us / 1e6)} or more away from the host's events, left out"
            )
        if self.thinned:
            notes.append(
                f"{self.name}: most operators are missing, as their numbers show: what the host does is unknown"
            )
        if self.earlier_us >= MIN_UNRECORDED_US:
            holds = (
                "work launched before the trace began, and what follows it until the first work launched in the trace"
            )
            if any(part.kind == "unrecorded" for part in self.left_out):
                holds = "no work launched in the trace: the device does earlier work, or the profiler starts"
            notes.append(
                f"{self.name}: its first {number(self.earlier_us / 1e3, 'ms')} are left out: they hold {holds}"
            )
        if self.unrecorded:
            notes.append(f"{self.name}: {self.seen_of_device} but no kernel: device activity was not recorded")
        return notes

    @property
    def seen_of_device(self) -> str:
        """What shows that a device was used whose work is not in the trace."""
        if self.launches:
            return f"{self.launches:,} launches"
        if self.device_thread_ops:
            return "a backward on threads of a device"
        return "operators of a GPU" if self.accelerator_ops else "memory of a device"

    @property
    def steps(self) -> int:
        """Number of marked steps."""
        return len(self.step_rows.get("step", []))

    @property
    def device(self) -> str:
        """The device with the most work in the trace: `cuda:0`, or `cpu`."""
        if self.unrecorded:
            return self.accelerator
        us: dict[str, float] = {}
        for device, time_us in zip(self.kernels["device"], self.kernels["total_us"], strict=True):
            us[device] = us.get(device, 0.0) + time_us
        return max(us, key=lambda device: us[device], default="cpu")

    def write(self, writer: RunWriter, tables: tuple[str, ...] | None = None) -> None:
        """Append its rows to `tables` of a run, by default to all."""
        columns = {
            "kernels": self.kernels,
            "windows": self.windows,
            "steps": self.step_rows,
            "ops": self.ops,
            "collectives": self.collectives,
            "memory": self.memory,
            "timeline": self.timeline,
        }
        for table in tables or columns:
            rows = columns[table]
            count = len(rows[next(iter(rows))]) if rows else 0
            for low in range(0, count, MAX_ROWS_AT_A_TIME):
                writer.append(table, {name: values[low : low + MAX_ROWS_AT_A_TIME] for name, values in rows.items()})


def read_trace(
    path: str | os.PathLike[str], accelerator: str | None = None, progress: Callable[[float], None] | None = None
) -> Trace:
    """Read a Chrome trace that torch.profiler exported, `.json` or `.json.gz`. Raises `RunError` for anything else.

    A trace numbers its devices; `accelerator` is their type, by default derived from the categories of its events.
    AMD's GPUs are `cuda` too, as for torch. `progress` is called with the share of the file that has been read, 0–1.
    """
    stream, events = _collected(path, progress)
    return _trace(stream, events, accelerator)


def read_ranks(path: str | os.PathLike[str], progress: Callable[[float], None] | None = None) -> list[Trace]:
    """The same of a file into which the traces of several ranks may be merged: one trace per rank."""
    stream, events = _collected(path, progress)
    ranks = split_ranks(events)
    if not ranks:
        return [_trace(stream, events, None)]
    name = stream.path.name
    traces: list[Trace] = []
    while ranks:  # each needs much memory until it is read
        rank = min(ranks)
        trace = _trace(stream, ranks.pop(rank), None)
        traces.append(replace(trace, name=f"{name}, rank {rank}", rank=rank, repaired=0 if traces else stream.repaired))
    return traces


def _collected(
    path: str | os.PathLike[str], progress: Callable[[float], None] | None
) -> tuple[TraceStream, TraceEvents]:
    if not Path(path).is_file():
        raise RunError(
            f"trace={os.fspath(path)!r} is not a file; give a trace (.json or .json.gz) written by the profiler"
        )
    stream = TraceStream(path, progress)
    try:
        return stream, collect(stream)
    except MemoryError:
        raise RunError(f"trace={stream.path.name!r} does not fit into memory; profile fewer steps at a time") from None
    except RunError as error:
        raise RunError(
            f"trace={stream.path.name!r}: {error}" if not str(error).startswith("trace=") else str(error)
        ) from None


def _trace(stream: TraceStream, events: TraceEvents, accelerator: str | None) -> Trace:
    if not events.uses_device:
        events.device_thread_ops = operators_on_device_threads(events)
    misclocked = drop_misclocked(events)
    host = link(events)
    linked = link_work(events, host)
    join_products(events, host, linked)
    drop_steps_without_work(host, linked)
    cut_last_step(events, host)
    without_work = launches_without_work(events)
    thinned, left = _what_is_left(events)
    loop = operator_loop(events, host)
    events.drop_identifiers()
    clock = DeviceClock(linked, on_cpu=not len(events.work))
    times = step_times(events, host, linked, clock)
    drop_cut_step(events, host, linked, times)
    steps = step_rows(events, host, times, clock)
    del clock  # ten megabytes in a trace of a gigabyte
    windows = trace_windows(events, host, linked, times)
    inside = launch_windows(windows, linked)
    queued_us = _queued_us(events, linked)
    earlier_us = 0.0
    if len(events.work) and windows[0].first is None:
        earlier_us = windows[0].device_start - float(linked.start_us.min())
    gpus = _gpus(stream.head)
    accelerator = accelerator or events.accelerator or "cuda"
    amd = any(is_amd(gpu["name"]) for gpu in gpus) or any(_ROCM.search(text) for text in events.texts)
    unrecorded = not len(events.work) and events.uses_device
    kernels = {} if unrecorded else kernel_rows(events, host, linked, windows, inside, accelerator, amd)
    names = {place: gpu["name"] for place, gpu in zip(_device_ids(stream.head), gpus, strict=True)}
    if amd and not names:  # PyTorch's older ROCm builds do not list the devices
        names = dict.fromkeys(events.work.device, amd_name(None, None, None))
    # A launch between two operators has the phase of its time, and so does each operator in `ops`.
    of_span = infer_phases(host, host.region_of_span, np.asarray(events.spans.start))
    memory = memory_rows(events, host, accelerator)
    add_step_memory(steps, memory)
    distributed = stream.head.get("distributedInfo")
    distributed = distributed if isinstance(distributed, dict) else {}
    return Trace(
        name=stream.path.name,
        rank=_count(distributed.get("rank")),
        world_size=_count(distributed.get("world_size")) or None,
        named_ranks=named_ranks(events),
        waits_us=events.waits_us,
        gpus=gpus,
        facts={key: stream.head[key] for key in _FACTS if isinstance(stream.head.get(key), int | str)},
        began_us=events.base_us + min(events.spans.start, default=0.0) + _origin_us(stream.head),
        kernels=kernels,
        windows={}
        if unrecorded
        else window_rows(
            *(events, host, linked, windows, inside, kernels, names, accelerator, amd),
            events.base_us + _origin_us(stream.head),
        ),
        step_rows=steps,
        ops=op_rows(events, host, windows, of_span),
        collectives={}
        if unrecorded
        else collective_rows(events, host, linked, accelerator, events.base_us + _origin_us(stream.head))
        if len(events.work)
        else host_collective_rows(events, host, linked, events.base_us + _origin_us(stream.head)),
        memory=memory,
        timeline={} if unrecorded else timeline_rows(events, host, linked, windows, times, accelerator, amd),
        accelerator=accelerator,
        unrecorded=unrecorded,
        launches=events.launches,
        overheads=events.overheads,
        accelerator_ops=events.accelerator_ops,
        device_allocations=events.device_allocations,
        host_peak_bytes=events.host_peak_bytes,
        unused_device=not events.uses_device and len(events.calls) > 0,
        device_thread_ops=events.device_thread_ops,
        host_part=longest_host_part(events, host, linked) if unrecorded else None,
        timed_op=longest_timed_op(events) if unrecorded else None,
        earlier_us=earlier_us,
        queued_us=queued_us,
        lost_tail_us=lost_tail_us(events, linked) if len(events.work) else 0.0,
        launch_blocking=len(events.work) > 0 and launches_block(events, linked),
        captures=count_calls(events, CAPTURES),
        graph_launches=count_calls(events, GRAPH_LAUNCHES),
        graph_builds=count_calls(events, GRAPH_BUILDS),
        compiled_calls=compiled_calls(events),
        compiled_regions=compiled_regions(events),
        pass_tokens=tokens_of_smallest_pass(events),
        peer_links=peer_links(events.peer_copies),
        decoding=decoding(events, linked) if len(events.work) else None,
        outer_frees=outer_frees(events, host),
        captured_calls=captured_calls(events),
        compiled_launch_frac=compiled_launch_frac(events, linked) if len(events.work) else 0.0,
        without_operators=len(events.work) > 0 and OP not in events.spans.kind,
        thinned=thinned,
        sampled=left,
        misclocked=misclocked,
        metric_ranges=events.metric_ranges,
        legacy_format=LEGACY_PROCESS in events.processes,
        times_by_events=events.event_records >= MIN_RECORDS_PER_OPERATOR * len(events.spans) > 0,
        unequal_products=unequal_products(events, linked),
        slow_calls=slow_calls(events, linked),
        slow_steps=slow_steps(events, host, linked),
        call_cost=call_cost(events, host, linked),
        recomputation=recomputation(events, host, linked),
        compilations=compilations(events),
        slow_device=slow_device(events, host, linked),
        elementwise_rate=elementwise_rate(events, amd=amd),
        growing_rows=growing_rows(events, linked),
        first_sizes=first_sizes(events, linked),
        long_view=long_view(events, host, linked),
        few_operators=few_operators(events),
        operator_loop=loop,
        gathers_weights=any(map(_FSDP.match, events.texts)),
        accumulates_gradients=any(ACCUMULATES in text and not text.startswith(EVALUATE) for text in events.texts),
        loader=next((place for place, mark in _LOADERS.items() if any(map(mark.match, events.texts))), ""),
        norms_in_training=events.norms_in_training,
        on_macos=events.on_macos,
        benchmarks=0 < events.convolutions == events.benchmarked,
        worker_times=None if len(events.work) else worker_times(events, host),
        launches_without_work=without_work,
        first_calls=first_calls(events, host, linked),
        optimizers=optimizer_names(events),
        sync_call=main_wait(events),
        left_out=parts_left_out(events, host, linked, windows),
        passes=repeated_passes(events, linked, windows),
        equal_passes=equal_passes(events, linked, windows),
        repaired=stream.repaired,
        converted=events.converted,
        invalid=events.invalid,
    )


def _what_is_left(events: TraceEvents) -> tuple[bool, Sampled | None]:
    """Whether most operators were removed from the trace, and what is left of it then."""
    # Operators of an NPU's work are numbered here, where work is linked to them.
    numbers = [
        np.asarray(column, dtype=np.int64)
        for column in (events.spans.external, events.calls.correlation, events.work.correlation)
    ]
    thinned = events.accelerator != "npu" and is_thinned(numbers[0])
    return thinned, sampled(*numbers) if thinned else None


def _queued_us(events: TraceEvents, linked: LinkedWork) -> float:
    before = np.isneginf(linked.launched_us)
    if not len(events.work) or not before.any():
        return 0.0
    began_us = min((min(of.start) for of in (events.spans, events.calls) if len(of)), default=math.inf)
    return max(0.0, float(linked.end_us[before].max()) - began_us)


_LOADERS = {
    "workers": WITH_WORKERS,
    "own process": re.compile(r"enumerate\(DataLoader\)#_SingleProcess"),
}
"""Where data is loaded, and the mark of the iterator that does it."""
_FSDP = re.compile(r"FSDP::|FullyShardedDataParallel\.")
"""Ranges of both of its versions."""
_ROCM = re.compile(r"^hip[A-Z]|^(?:Custom_)?Cijk_|gtcx|^__amd_rocclr_")
"""Calls and kernels that only AMD's GPUs have."""
_FACTS = (
    "schemaVersion",
    "record_shapes",
    "profile_memory",
    "with_stack",
    "with_flops",
    "with_modules",
    "cuda_runtime_version",
    "cuda_driver_version",
    "cupti_version",
    "hip_runtime_version",
    "hip_driver_version",
)


def _events(count: int) -> str:
    return f"{count:,} event{'s' if count != 1 else ''}"


def _gpus(head: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The GPUs in the form of a run's environment."""
    gpus: list[dict[str, Any]] = []
    for one in _listed(head):
        major, minor = _count(one.get("computeMajor")), _count(one.get("computeMinor"))
        multiprocessors = _count(one.get("numSms"))
        name = str(one.get("name") or "")[:200]
        if one.get("warpSize") == AMD_WARP and not is_amd(name):  # some versions of ROCm give no name
            name = amd_name(major, minor, multiprocessors)
        gpus.append(
            {
                "name": name or "GPU",
                "capability": None if major is None or minor is None else f"{major}.{minor}",
                "memory_bytes": _count(one.get("totalGlobalMem")),
                "multiprocessors": multiprocessors,
            }
        )
    return gpus


def _device_ids(head: Mapping[str, Any]) -> list[int]:
    """The numbers by which the events of the trace name the devices that it lists."""
    given = [_count(one.get("id")) for one in _listed(head)]
    return [number if number is not None else place for place, number in enumerate(given)]


def _listed(head: Mapping[str, Any]) -> list[dict[str, Any]]:
    listed = head.get("deviceProperties")
    if not isinstance(listed, list):
        return rocprof.devices(head.get(rocprof.AGENTS))
    return [one for one in listed[:1024] if isinstance(one, dict)]


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63 else None


def _origin_us(head: Mapping[str, Any]) -> float:
    """Time zero of newer traces: `baseTimeNanoseconds`, since 1970."""
    base = _count(head.get("baseTimeNanoseconds"))
    return base / 1e3 if base is not None else 0.0
