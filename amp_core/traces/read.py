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
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from amp_core.hardware.gpus import AMD_WARP, amd_name, is_amd
from amp_core.schema import RunError
from amp_core.traces import rocprof
from amp_core.traces.blocks_per_sm import add_blocks_per_sm
from amp_core.traces.chains import ACCUMULATES
from amp_core.traces.cold_calls import cold_calls
from amp_core.traces.collect import LEGACY_PROCESS, collect
from amp_core.traces.collective_rows import collective_rows, host_collective_rows, named_ranks
from amp_core.traces.cpu_calls import call_cost, slow_calls, slow_steps
from amp_core.traces.decoding import decoding
from amp_core.traces.device_threads import operators_on_device_threads
from amp_core.traces.device_times import (
    DeviceClock,
    cut_last_step,
    drop_cut_step,
    drop_steps_without_work,
    step_times,
)
from amp_core.traces.dropout import dropout_time
from amp_core.traces.elementwise_rate import elementwise_rate
from amp_core.traces.events import OP, TraceEvents
from amp_core.traces.few_operators import few_operators
from amp_core.traces.first_calls import first_calls
from amp_core.traces.first_sizes import first_sizes
from amp_core.traces.freeing import freeing
from amp_core.traces.gpu_work import LinkedWork, launches_block, launches_without_work, link_work, unrecorded_from_us
from amp_core.traces.graphs import (
    CAPTURES,
    GRAPH_BUILDS,
    GRAPH_LAUNCHES,
    captured_calls,
    compilations,
    compiled_calls,
    compiled_launch_frac,
    compiled_regions,
    count_calls,
    tokens_of_smallest_pass,
)
from amp_core.traces.growing_rows import growing_rows
from amp_core.traces.host_alone import longest_host_part, longest_timed_op
from amp_core.traces.json_stream import TraceStream
from amp_core.traces.kernel_rows import kernel_rows, launch_windows, trace_windows
from amp_core.traces.left_out import parts_left_out
from amp_core.traces.link import EVALUATE, link, optimizer_names
from amp_core.traces.loader_workers import WITH_WORKERS, worker_times
from amp_core.traces.long_calls import later_frees, outer_frees
from amp_core.traces.long_views import long_view
from amp_core.traces.loops import operator_loop
from amp_core.traces.lost_tail import lost_tail_us
from amp_core.traces.memory_rows import add_step_memory, memory_rows
from amp_core.traces.merged_ranks import split_ranks
from amp_core.traces.misclocked import drop_misclocked, drop_untimed, untimed_work
from amp_core.traces.own_ranges import outside_ranges
from amp_core.traces.passes import equal_passes, repeated_passes
from amp_core.traces.peer_links import peer_links
from amp_core.traces.phases import infer_phases
from amp_core.traces.products import join_products
from amp_core.traces.recomputation import recomputation
from amp_core.traces.single_call import single_call
from amp_core.traces.slow_device import slow_device
from amp_core.traces.step_rows import op_rows, step_rows
from amp_core.traces.thinned import Sampled, is_thinned, sampled
from amp_core.traces.timeline_rows import timeline_rows
from amp_core.traces.trace import Trace
from amp_core.traces.unequal_products import unequal_products
from amp_core.traces.unrecorded_host import unrecorded_host
from amp_core.traces.waits import main_wait
from amp_core.traces.window_rows import window_rows

MIN_RECORDS_PER_OPERATOR = 1.5
"""Calls that record an event, per operator and range, from which each of these has a pair of them."""


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
    drop_untimed(events)
    misclocked = drop_misclocked(events)
    host = link(events)
    linked = link_work(events, host)
    gpus = _gpus(stream.head)
    units = (gpu["multiprocessors"] for gpu in gpus)
    add_blocks_per_sm(events, dict(zip(_device_ids(stream.head), units, strict=True)))
    join_products(events, host, linked)
    drop_steps_without_work(host, linked)
    cut_last_step(events, host)
    without_work = launches_without_work(events)
    events.unrecorded_from_us = unrecorded_from_us(events)
    lost_us = lost_tail_us(events, linked) if len(events.work) else 0.0
    thinned, left = _what_is_left(events)
    loop, dropout = operator_loop(events, host), dropout_time(events)
    process = _process(events)
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
    accelerator = accelerator or events.accelerator or "cuda"
    amd = any(is_amd(gpu["name"]) for gpu in gpus) or any(_ROCM.search(text) for text in events.texts)
    unrecorded = not len(events.work) and events.uses_device
    kernels = {} if unrecorded else kernel_rows(events, host, linked, windows, inside, accelerator, amd)
    names = {place: gpu["name"] for place, gpu in zip(_device_ids(stream.head), gpus, strict=True)}
    if amd and not names:  # PyTorch's older ROCm builds do not list the devices
        names = dict.fromkeys(events.work.device, amd_name(None, None, None))
        gpus = [_gpu(name) for name in names.values()]
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
        ended_us=events.base_us + max(events.spans.end, default=0.0) + _origin_us(stream.head),
        process=process,
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
        lost_tail_us=lost_us,
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
        later_frees=later_frees(events, host),
        captured_calls=captured_calls(events),
        compiled_launch_frac=compiled_launch_frac(events, linked) if len(events.work) else 0.0,
        without_operators=len(events.work) > 0 and OP not in events.spans.kind,
        thinned=thinned,
        sampled=left,
        misclocked=misclocked,
        untimed=untimed_work(events) if unrecorded else None,
        metric_ranges=events.metric_ranges,
        legacy_format=LEGACY_PROCESS in events.processes,
        times_by_events=events.event_records >= MIN_RECORDS_PER_OPERATOR * len(events.spans) > 0,
        unequal_products=unequal_products(events, linked),
        slow_calls=slow_calls(events, host, linked),
        slow_steps=slow_steps(events, host, linked),
        call_cost=call_cost(events, host, linked),
        recomputation=recomputation(events, host, linked, inside),
        compilations=compilations(events),
        slow_device=slow_device(events, host, linked),
        elementwise_rate=elementwise_rate(events, amd=amd),
        growing_rows=growing_rows(events, linked),
        first_sizes=first_sizes(events, linked),
        long_view=long_view(events, host, linked),
        single_call=single_call(events, host, linked, windows),
        freeing=freeing(events),
        cold_calls=cold_calls(events, host, linked) if unrecorded else None,
        unrecorded_host=unrecorded_host(events, host) if unrecorded else None,
        few_operators=few_operators(events),
        operator_loop=loop,
        outside_ranges=outside_ranges(events, host, linked, windows),
        dropout_time=dropout,
        scripted=any(map(_SCRIPTED.match, events.texts)),
        gathers_weights=any(map(_FSDP.match, events.texts)),
        accumulates_gradients=any(ACCUMULATES in text and not text.startswith(EVALUATE) for text in events.texts),
        loader=_loader(events),
        norms_in_training=events.norms_in_training,
        on_macos=events.on_macos or (not events.on_main_thread and _OF_MAC.search(stream.path.name) is not None),
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


def _process(events: TraceEvents) -> str:
    """The process of the first span of the host; empty where there is none, or it is one of too many."""
    number = events.thread_process[events.spans.thread[0]] if len(events.spans) else -1
    return events.processes[number] if number >= 0 else ""


def _loader(events: TraceEvents) -> str:
    """Where data is loaded; empty where no mark tells it. A pipeline of transformers has a loader of its own."""
    place = next((place for place, mark in _LOADERS.items() if any(map(mark.match, events.texts))), "")
    return "pipeline" if place == "own process" and any(map(_OF_PIPELINE.search, events.texts)) else place


_OF_PIPELINE = re.compile(r"\bpipelines/pt_utils\.py\(\d+\): __next__$")
"""The function of transformers that takes batches from the loader of a pipeline, with the end of its path."""
_LOADERS = {
    "workers": WITH_WORKERS,
    "own process": re.compile(r"enumerate\(DataLoader\)#_SingleProcess"),
}
"""Where data is loaded, and the mark of the iterator that does it."""
_SCRIPTED = re.compile(r"nn\.Module: (?:Recursive)?ScriptModule_")
_FSDP = re.compile(r"FSDP::|FullyShardedDataParallel\.")
"""Ranges of both of its versions."""
_ROCM = re.compile(
    r"^hip[A-Z]|^(?:Custom_)?Cijk_|gtcx|^__amd_rocclr_|(?<![a-z])(?:rocm_)?aiter(?:_|::)|(?<![a-z])ck(?:_tile)?::|\.kd$"
)
"""Calls, kernels and operators that only AMD's GPUs have: of HIP, Tensile, MIOpen, AITER and Composable Kernel."""
_OF_MAC = re.compile(r"(?i)macbook|^mbp\b|\bimac\b|\bmac-(?:mini|studio|pro)\b|\.local_\d+\.\d+\.")
"""In the names of files that a Mac wrote: `tensorboard_trace_handler` begins them with the host's."""
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


def _gpus(head: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The GPUs in the form of a run's environment."""
    gpus: list[dict[str, Any]] = []
    for one in _listed(head):
        major, minor = _count(one.get("computeMajor")), _count(one.get("computeMinor"))
        multiprocessors = _count(one.get("numSms"))
        name = str(one.get("name") or "")[:200]
        if one.get("warpSize") == AMD_WARP and not name:  # some versions of ROCm give none
            name = amd_name(major, minor, multiprocessors)
        if one.get("warpSize") == AMD_WARP and not is_amd(name):
            major = minor = None  # a number of a vendor who is neither NVIDIA nor AMD
        capability = None if major is None or minor is None else f"{major}.{minor}"
        gpus.append(_gpu(name or "GPU", capability, _count(one.get("totalGlobalMem")), multiprocessors))
    return gpus


def _gpu(
    name: str, capability: str | None = None, memory_bytes: int | None = None, multiprocessors: int | None = None
) -> dict[str, Any]:
    """A GPU in the form of a run's environment."""
    return {
        "name": name,
        "capability": capability,
        "memory_bytes": memory_bytes,
        "multiprocessors": multiprocessors,
    }


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
