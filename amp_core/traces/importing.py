"""Make a run folder of profiler traces, one per rank.

>>> import_traces(["rank0.pt.trace.json.gz", "rank1.pt.trace.json.gz"], "runs/profiled")
PosixPath('runs/profiled')
"""

import collections
import dataclasses
import datetime
import functools
import itertools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from amp_core.schema import RunError
from amp_core.store.atomic import check_new, new_folder
from amp_core.store.run import Run
from amp_core.store.writer import RunWriter
from amp_core.traces.read import read_ranks, read_trace
from amp_core.traces.trace import Trace


def import_traces(
    paths: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    name: str | None = None,
    progress: Callable[[str, float], None] | None = None,
) -> Path:
    """Write the run folder `out` from `paths` and return it.

    The rank of a trace is the one that it states, else its place in the list. One trace alone may be that of several
    ranks, merged: each becomes a rank. A trace that states another number of ranks than most is of another job, and
    left out. Nothing is written if a trace cannot be read. `progress` is called with the name of a trace and the share
    of it that has been read, 0–1. Raises `RunError`.
    """
    if not paths:
        raise RunError("traces=[] is empty; give one trace, or one per rank")
    check_new(out)  # before reading the traces, which may take a minute
    following = [functools.partial(progress, Path(path).name) if progress else None for path in paths]
    if len(paths) == 1:
        read = read_ranks(paths[0], following[0])
    else:
        read = [read_trace(path, progress=each) for path, each in zip(paths, following, strict=True)]
    kept = _of_one_job(read)
    traces = _by_rank(kept)
    with new_folder(out) as aside:
        _write(traces, [*_notes(traces), *_left_out_notes(read, kept)], aside, name or Path(out).name)
    return Path(out)


def import_notes(run: Run) -> list[str]:
    """What the import of `run` repaired or assumed, in words."""
    events = run.events
    return [str(detail) for detail in events[(events["kind"] == "warning") & (events["name"] == "trace")]["detail"]]


def _notes(traces: dict[int, Trace]) -> list[str]:
    notes = [note for trace in traces.values() for note in trace.notes]
    if len(traces) > 1 and any(trace.rank is None for trace in traces.values()):
        numbered = ", ".join(f"{trace.name} is rank {rank}" for rank, trace in list(traces.items())[:8])
        more = ", …" if len(traces) > 8 else ""
        notes.append(f"traces without ranks were numbered in the order given: {numbered}{more}")
    return notes


def _write(traces: dict[int, Trace], notes: list[str], folder: Path, name: str) -> None:
    first = next(iter(traces.values()))
    stated = max(t.world_size or 0 for t in traces.values())
    world_size = max(stated, max(traces) + 1, *(t.named_ranks for t in traces.values()))
    config = _config(first, [t.name for t in traces.values()])
    if stated < world_size > len(traces):
        config["world_size_is_least"] = True
    if (awaited := _awaited_rank(list(traces.values()))) is not None:
        config["awaited_rank"] = awaited
    with RunWriter(
        folder,
        name=name,
        config=config,
        environment={"gpus": first.gpus, "profiler": first.facts},
        world_size=world_size,
    ) as writer:
        began = _date(first.began_us)
        if began is not None:
            writer.update_head(created_at=began)
        writer.event("started", name=name, detail=_summary(traces))
        for note in notes:
            writer.event("warning", name="trace", detail=note)
        for rank, trace in traces.items():
            if rank == 0:
                trace.write(writer)
                continue
            with RunWriter(folder, rank=rank, world_size=world_size) as rank_writer:
                trace.write(rank_writer)


MIN_AWAITED_RATIO = 2.0
"""The rank that is late is waited for that many times as long as any other."""


def _awaited_rank(traces: list[Trace]) -> int | None:
    """The rank without a trace for which the collectives of all traces wait the longest; None if it differs, or where
    traces do not tell it. One trace tells it if it waits for each of the other ranks itself."""
    awaited = set()
    for trace in traces:
        longest = sorted(trace.waits_us, key=lambda pair: trace.waits_us[pair])[-2:]
        if len(longest) < 2 or trace.waits_us[longest[1]] < MIN_AWAITED_RATIO * trace.waits_us[longest[0]]:
            return None
        awaited.add(longest[1][1])
    here = {rank for trace in traces for rank, _ in trace.waits_us}
    is_sure = len(traces) > 1 or len(traces[0].waits_us) == traces[0].named_ranks - 1
    return awaited.pop() if is_sure and len(awaited) == 1 and not awaited & here else None


def _of_one_job(traces: list[Trace]) -> list[Trace]:
    """The traces without those that state another number of ranks than most of them, or a smaller one of two that are
    equally frequent: ranks that share collectives state the same."""
    counts = collections.Counter(trace.world_size for trace in traces if trace.world_size is not None)
    if len(counts) < 2:
        return traces
    world_size = max(counts, key=lambda size: (counts[size], size))
    return [trace for trace in traces if trace.world_size in (world_size, None)]


def _left_out_notes(traces: list[Trace], kept: list[Trace]) -> list[str]:
    """That traces of other jobs are left out, in words."""
    world_size = next((trace.world_size for trace in kept if trace.world_size is not None), None)
    return [
        f"{trace.name} is of another job, and left out: it states {trace.world_size} "
        f"rank{'s' if trace.world_size != 1 else ''}, the others {world_size}"
        for trace in traces
        if not any(trace is one for one in kept)
    ]


def _by_rank(traces: list[Trace]) -> dict[int, Trace]:
    """Traces by rank, in order."""
    by_rank: dict[int, Trace] = {}
    _check_processes(traces)
    stated = len({trace.rank for trace in traces}) == len(traces) and all(trace.rank is not None for trace in traces)
    for place, trace in enumerate(traces):
        rank = trace.rank if stated and trace.rank is not None else place
        if rank >= _MAX_RANKS:
            raise RunError(f"trace={trace.name!r} states rank {rank}, which is out of range; ranks count from 0")
        by_rank[rank] = trace
    if not stated and len({t.rank for t in traces if t.rank is not None}) < sum(t.rank is not None for t in traces):
        raise RunError(
            f"traces={[t.name for t in traces]!r:.200} hold two of one rank; give one trace of each rank, "
            "or import them into separate runs"
        )
    return dict(sorted(by_rank.items()))


def _check_processes(traces: list[Trace]) -> None:
    """Refuse traces that one process recorded one after the other, as a schedule that repeats does: they are no ranks.
    Those of several machines may have processes of one number, and clocks of their own, but hold collectives."""
    alone = [one for one in traces if one.rank is None and one.process and not any(map(len, one.collectives.values()))]
    for before, after in itertools.pairwise(sorted(alone, key=lambda one: (one.process, one.began_us))):
        if before.process == after.process and before.ended_us <= after.began_us:
            raise RunError(
                f"traces={[before.name, after.name]!r} were recorded by one process, {before.process}, one after the "
                "other; give one of them, or traces of several ranks"
            )


_MAX_RANKS = 1_000_000


def _config(trace: Trace, names: list[str]) -> dict[str, Any]:
    """The known settings: a trace holds none of the training's own."""
    config: dict[str, Any] = {"source": "import", "format": "torch.profiler", "traces": names, "device": trace.device}
    if trace.unrecorded:
        config |= {
            "launches_without_kernels": trace.launches,
            "accelerator_ops": trace.accelerator_ops,
            "device_allocations": trace.device_allocations,
        }
        if trace.overheads:
            config["device_requested"] = True
        if trace.device_thread_ops:
            config["device_thread_ops"] = trace.device_thread_ops
        if trace.times_by_events:
            config["times_by_events"] = True
        if trace.norms_in_training:
            config["norms_in_training"] = trace.norms_in_training
        if trace.legacy_format:
            config["legacy_format"] = True
        if trace.metric_ranges:
            config["metric_ranges"] = trace.metric_ranges
    if (part := trace.host_part) is not None:
        config |= {"host_part": part.kind, "host_op": part.name, "host_op_frac": part.frac, "host_op_us": part.us}
        if part.cause:
            config["host_cause"] = part.cause
        if part.call:
            config |= {"host_held_op": part.call, "host_held_us": part.call_us}
    if trace.timed_op is not None:
        config["timed_op"], config["timed_op_frac"] = trace.timed_op
    config |= {name: value for name in _TOLD if (value := getattr(trace, name))}
    for name in _FOUND:
        if (found := getattr(trace, name)) is not None:
            config[name] = dataclasses.asdict(found)
    if trace.launches_without_work[0]:
        missing, config["kernel_launches"], config["last_without_work"] = trace.launches_without_work
        config["launches_without_work"] = missing
    if trace.benchmarks:
        config["cudnn_benchmark"] = True
    if trace.passes is not None:
        config["passes"] = dataclasses.asdict(trace.passes)
    if trace.left_out:
        config["left_out"] = [dataclasses.asdict(part) for part in trace.left_out]
    return config


_TOLD = (
    *("compiled_launch_frac", "without_operators", "launch_blocking", "unused_device", "thinned", "on_macos"),
    *("first_calls", "equal_passes", "accumulates_gradients", "gathers_weights", "scripted"),
    *("loader", "optimizers", "sync_call"),
    "captures",
    "graph_launches",
    "graph_builds",
    "compiled_calls",
    "compiled_regions",
    "pass_tokens",
    "host_peak_bytes",
    "outer_frees",
    "later_frees",
    "queued_us",
    "lost_tail_us",
)
"""What is counted, measured or true of a trace as a whole, by its name in `Trace`."""
_FOUND = (
    *("captured_calls", "decoding", "peer_links", "misclocked", "untimed", "sampled", "unequal_products"),
    *(
        "slow_calls",
        "slow_steps",
        "call_cost",
        "worker_times",
        "recomputation",
        "growing_rows",
        "operator_loop",
        "outside_ranges",
        "dropout_time",
        "first_sizes",
        "long_view",
        "single_call",
        "freeing",
        "cold_calls",
        "unrecorded_host",
        "few_operators",
        "compilations",
        "slow_device",
        "elementwise_rate",
    ),
)
"""What is found in a trace as a whole, by its name in `Trace`."""


def _summary(traces: dict[int, Trace]) -> str:
    steps = max(trace.steps for trace in traces.values())
    marked = f"{steps} marked steps" if steps else "no marked steps"
    ranks = f" of {len(traces)} ranks" if len(traces) > 1 else ""
    return f"imported from a profiler trace with {marked}{ranks}"


def _date(began_us: float) -> str | None:
    """When it was recorded; None if the trace counts from the start of the machine and not from 1970."""
    if not 1e15 < began_us < 1e16:  # the years 2001 to 2286
        return None
    moment = datetime.datetime.fromtimestamp(began_us / 1e6, datetime.UTC)
    return moment.isoformat(timespec="milliseconds")
