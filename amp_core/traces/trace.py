"""What one trace file holds, as rows of a run's tables and facts.

>>> trace = read_trace("rank0.pt.trace.json.gz")
>>> trace.write(writer)            # a RunWriter: `kernels`, `windows`, `steps` and other tables of this rank
"""

from dataclasses import dataclass, field
from typing import Any

from amp_core.store.writer import RunWriter
from amp_core.text.formatting import duration, number
from amp_core.traces.cold_calls import ColdCalls
from amp_core.traces.cpu_calls import CallCost, SlowCalls, SlowSteps
from amp_core.traces.decoding import Decoding
from amp_core.traces.device_times import (
    MIN_UNRECORDED_US,
)
from amp_core.traces.dropout import DropoutTime
from amp_core.traces.elementwise_rate import ElementwiseRate
from amp_core.traces.few_operators import FewOperators
from amp_core.traces.first_sizes import FirstSizes
from amp_core.traces.freeing import Freeing
from amp_core.traces.graphs import (
    CapturedCalls,
    Compilations,
)
from amp_core.traces.growing_rows import GrowingRows
from amp_core.traces.host_alone import HostPart
from amp_core.traces.kernel_rows import Rows
from amp_core.traces.left_out import PartLeftOut
from amp_core.traces.loader_workers import WorkerTimes
from amp_core.traces.long_views import LongView
from amp_core.traces.loops import OperatorLoop
from amp_core.traces.misclocked import Misclocked, Untimed
from amp_core.traces.own_ranges import OutsideRanges
from amp_core.traces.passes import Passes
from amp_core.traces.peer_links import PeerLinks
from amp_core.traces.recomputation import Recomputation
from amp_core.traces.single_call import SingleCall
from amp_core.traces.slow_device import SlowDevice
from amp_core.traces.thinned import Sampled
from amp_core.traces.unequal_products import UnequalProducts
from amp_core.traces.unrecorded_host import UnrecordedHost

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
    """Time of the first event of the host; microseconds since 1970 in traces with absolute times."""
    ended_us: float = 0.0
    """The same of the last one."""
    process: str = ""
    """The process of its first span of the host, as the trace numbers it."""
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
    later_frees: int = 0
    """Long calls that free memory of a device in operators, in steps after one without any."""
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
    untimed: Untimed | None = None
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
    single_call: SingleCall | None = None
    freeing: Freeing | None = None
    """Frees of large tensors of the host."""
    cold_calls: ColdCalls | None = None
    unrecorded_host: UnrecordedHost | None = None
    few_operators: FewOperators | None = None
    operator_loop: OperatorLoop | None = None
    """A loop of Python over small operators that takes long."""
    growing_rows: GrowingRows | None = None
    outside_ranges: OutsideRanges | None = None
    dropout_time: DropoutTime | None = None
    scripted: bool = False
    """Whether a module of it is scripted by torch.jit, as its modules or stacks tell."""
    gathers_weights: bool = False
    """Whether torch's FullyShardedDataParallel gathers weights before the layers that need them, as its marks tell."""
    accumulates_gradients: bool = False
    """Whether autograd adds gradients to those of leaves, as `backward()` does and `torch.autograd.grad` does not."""
    loader: str = ""
    """Where a DataLoader loads: `own process` of the loop, there in a `pipeline` of transformers, or its `workers`; ""
    where no mark tells it."""
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
            with_them = " with them" if self.untimed is not None else ""
            notes.append(
                f"{self.name}: {self.seen_of_device} but no kernel{with_them}: device activity was not recorded"
            )
        return notes

    @property
    def seen_of_device(self) -> str:
        """What shows that a device was used whose work is not in the trace."""
        if self.untimed is not None:
            return (
                f"{self.untimed.count:,} kernel{'s and copies' if self.untimed.count > 1 else ' or copy'} without times"
            )
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


def _events(count: int) -> str:
    return f"{count:,} event{'s' if count != 1 else ''}"
