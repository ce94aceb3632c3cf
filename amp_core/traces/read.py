"""Read a trace of torch.profiler as rows of a run's tables.

    >>> trace = read_trace("rank0.pt.trace.json.gz")
    >>> trace.rank, trace.steps, len(trace.kernels["name"])
    (0, 5, 143)
    >>> trace.write(writer)            # a RunWriter: `kernels`, `windows`, `steps` and `ops` of this rank

Needs neither torch nor a GPU, and less memory than the size of the trace.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from amp_core.schema import RunError
from amp_core.store.writer import RunWriter
from amp_core.traces.collect import collect
from amp_core.traces.device_times import DeviceClock, step_bounds
from amp_core.traces.gpu_work import link_work
from amp_core.traces.json_stream import TraceStream
from amp_core.traces.kernel_rows import Rows, kernel_rows, launch_windows, trace_windows
from amp_core.traces.link import link
from amp_core.traces.phases import infer_phases
from amp_core.traces.step_rows import op_rows, step_rows
from amp_core.traces.window_rows import window_rows


@dataclass(frozen=True)
class Trace:
    """One trace file: columns of rows by table, and facts about where it was recorded."""

    name: str
    """Name of the file."""
    rank: int | None
    world_size: int | None
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

    @property
    def steps(self) -> int:
        """Number of marked steps."""
        return len(self.step_rows.get("step", []))

    @property
    def device(self) -> str:
        """The device with the most work in the trace: `cuda:0`, or `cpu`."""
        us: dict[str, float] = {}
        for device, time_us in zip(self.kernels["device"], self.kernels["total_us"], strict=True):
            us[device] = us.get(device, 0.0) + time_us
        return max(us, key=lambda device: us[device], default="cpu")

    def write(self, writer: RunWriter, tables: tuple[str, ...] = ("kernels", "windows", "steps", "ops")) -> None:
        """Append its rows to `tables` of a run."""
        columns = {"kernels": self.kernels, "windows": self.windows, "steps": self.step_rows, "ops": self.ops}
        for table in tables:
            rows = columns[table]
            if rows and rows[next(iter(rows))]:
                writer.append(table, rows)


def read_trace(path: str | os.PathLike[str], accelerator: str = "cuda") -> Trace:
    """Read a Chrome trace that torch.profiler exported, `.json` or `.json.gz`. Raises `RunError` for anything else.

    A trace numbers its devices; `accelerator` is their type. AMD's GPUs are `cuda` too, as for torch.
    """
    if not Path(path).is_file():
        raise RunError(
            f"trace={os.fspath(path)!r} is no file; give a trace (.json or .json.gz) that the profiler wrote"
        )
    stream = TraceStream(path)
    try:
        events = collect(stream)
    except MemoryError:
        raise RunError(f"trace={stream.path.name!r} does not fit into memory; profile fewer steps at a time") from None
    except RunError as error:
        raise RunError(
            f"trace={stream.path.name!r}: {error}" if not str(error).startswith("trace=") else str(error)
        ) from None
    host = link(events)
    linked = link_work(events, host)
    clock = DeviceClock(linked, on_cpu=not len(events.work))
    bounds = step_bounds(events, host, clock)
    windows = trace_windows(events, host, linked, bounds)
    inside = launch_windows(windows, linked)
    gpus = _gpus(stream.head)
    kernels = kernel_rows(events, host, linked, windows, inside, accelerator)
    names = {number: gpu["name"] for number, gpu in enumerate(gpus)}
    # A launch between two operators has the phase of its time, and so does each operator in `ops`.
    of_span = infer_phases(host, host.region_of_span, np.asarray(events.spans.start))
    distributed = stream.head.get("distributedInfo")
    distributed = distributed if isinstance(distributed, dict) else {}
    return Trace(
        name=stream.path.name,
        rank=_count(distributed.get("rank")),
        world_size=_count(distributed.get("world_size")) or None,
        gpus=gpus,
        facts={key: stream.head[key] for key in _FACTS if isinstance(stream.head.get(key), int | str)},
        began_us=events.base_us + min(events.spans.start, default=0.0) + _origin_us(stream.head),
        kernels=kernels,
        windows=window_rows(events, host, linked, windows, inside, kernels, names, accelerator),
        step_rows=step_rows(host, windows, bounds, clock),
        ops=op_rows(events, host, windows, of_span),
    )


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
    listed = head.get("deviceProperties")
    for one in listed[:1024] if isinstance(listed, list) else []:
        if not isinstance(one, dict):
            continue
        major, minor = _count(one.get("computeMajor")), _count(one.get("computeMinor"))
        gpus.append(
            {
                "name": str(one.get("name", "GPU"))[:200],
                "capability": None if major is None or minor is None else f"{major}.{minor}",
                "memory_bytes": _count(one.get("totalGlobalMem")),
                "multiprocessors": _count(one.get("numSms")),
            }
        )
    return gpus


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63 else None


def _origin_us(head: Mapping[str, Any]) -> float:
    """Time zero of newer traces: `baseTimeNanoseconds`, since 1970."""
    base = _count(head.get("baseTimeNanoseconds"))
    return base / 1e3 if base is not None else 0.0
