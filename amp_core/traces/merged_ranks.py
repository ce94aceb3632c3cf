"""Split a trace into which several ranks were merged: the events of each rank alone.

>>> ranks = split_ranks(events)
>>> [(rank, len(own.work)) for rank, own in ranks.items()]
[(0, 4095), (1, 4064), (2, 4064), (3, 4064)]

Programs that merge traces keep one process per rank on the host and one for its device. They name both after the rank
(`RANK 3 - GPU`). Without such names, the work of each device names calls of one process, and each device of another.
The profiler itself records one process alone, so several that launch work were merged.
"""

import math
import re
from array import array
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from amp_core.traces.collect import MAX_PROCESSES
from amp_core.traces.events import Allocations, Calls, Frames, Spans, TraceEvents, Work

Ints = npt.NDArray[np.int64]
_RANK = re.compile(r"rank[ _:#=-]*(\d{1,6})\b", re.IGNORECASE)
MIN_OF_ONE_FRAC = 0.99
"""Share of a device's work that one process must have launched to be that device's rank."""


def split_ranks(events: TraceEvents) -> dict[int, TraceEvents]:
    """The events of each rank, by rank; empty for a trace of one process, and where ranks cannot be told apart."""
    if len(events.processes) >= MAX_PROCESSES:
        return {}
    rank_of = _ranks_by_name(events)
    if rank_of is None:
        rank_of = _ranks_by_launch(events)
    if rank_of is None:
        return {}
    ranks = sorted(set(rank_of[rank_of >= 0].tolist()))
    return {rank: _part(events, rank_of, rank, is_first=rank == ranks[0]) for rank in ranks}


def _host_process(events: TraceEvents, thread: "array[int]") -> Ints:
    of_thread = np.asarray(events.thread_process, dtype=np.int64)
    return of_thread[np.asarray(thread, dtype=np.int64)]


def _ranks_by_name(events: TraceEvents) -> Ints | None:
    """The rank of each process by its name, -1 for others; None if work or calls belong to one without a rank, or all
    to one rank."""
    found = [_RANK.match(events.process_names.get(process, "")) for process in events.processes]
    rank_of = np.array([int(match[1]) if match else -1 for match in found], dtype=np.int64)
    if not (rank_of >= 0).any():
        return None
    works = np.unique(np.asarray(events.work.process))
    launches = np.unique(_host_process(events, events.calls.thread))
    if not len(works) or (works < 0).any() or (rank_of[works] < 0).any() or (rank_of[launches] < 0).any():
        return None
    return rank_of if len(set(rank_of[works].tolist())) > 1 else None


def _ranks_by_launch(events: TraceEvents) -> Ints | None:
    """The rank of each process by the device whose work it launches, -1 for others; None if a process launches the work
    of several devices."""
    work = np.asarray(events.work.process)
    if len(np.unique(work)) < 2 or (work < 0).any():
        return None
    launching, correlation = _host_process(events, events.calls.thread), np.asarray(events.calls.correlation)
    if len(np.unique(launching)) < 2:
        return None
    pairs = np.unique(np.stack([correlation, launching])[:, correlation >= 0], axis=1)
    numbers, first, count = np.unique(pairs[0], return_index=True, return_counts=True)
    numbers, owner = numbers[count == 1], pairs[1][first[count == 1]]  # others may name calls of several ranks
    if not len(numbers):
        return None
    at = np.minimum(np.searchsorted(numbers, np.asarray(events.work.correlation)), len(numbers) - 1)
    known = numbers[at] == np.asarray(events.work.correlation)
    rank_of = np.full(len(events.processes), -1, dtype=np.int64)
    for rank, device in enumerate(np.unique(work).tolist()):
        by = np.bincount(owner[at][known & (work == device)], minlength=len(rank_of))
        process = int(by.argmax())
        if by[process] < MIN_OF_ONE_FRAC * max(1, by.sum()) or rank_of[process] >= 0:
            return None
        rank_of[[device, process]] = rank
    return rank_of


_Of = TypeVar("_Of", int, float)
_Columns = TypeVar("_Columns", Spans, Calls, Work, Frames, Allocations)


def chosen(columns: _Columns, items: Ints) -> _Columns:
    """The entries of these numbers; columns that are empty stay so."""
    kept: dict[str, Any] = {}
    for name, column in vars(columns).items():
        kept[name] = array(column.typecode, np.asarray(column)[items].tobytes()) if len(column) else column
    return type(columns)(**kept)


def _part(events: TraceEvents, rank_of: Ints, rank: int, *, is_first: bool) -> TraceEvents:
    """The events of one rank. What was repaired in the file counts once, in the first."""
    spans, calls, frames, compiling = (
        np.flatnonzero(rank_of[_host_process(events, one.thread)] == rank)
        for one in (events.spans, events.calls, events.frames, events.compiling)
    )
    work = np.flatnonzero(rank_of[np.asarray(events.work.process, dtype=np.int64)] == rank)
    of_call = np.full(len(events.calls), -1, dtype=np.int64)
    of_call[calls] = np.arange(len(calls))
    allocating = of_call[np.asarray(events.allocations.call, dtype=np.int64)]
    allocations = chosen(events.allocations, np.flatnonzero(allocating >= 0))
    allocations.call = array("i", allocating[allocating >= 0].tolist())
    return replace(
        events,
        spans=chosen(events.spans, spans),
        calls=chosen(events.calls, calls),
        work=chosen(events.work, work),
        frames=chosen(events.frames, frames),
        compiling=chosen(events.compiling, compiling),
        loadings=Frames(),  # of no process
        profiling=Frames(),
        first_us=math.inf,
        allocations=allocations,
        device_steps={key: times for key, times in events.device_steps.items() if rank_of[key[0]] == rank},
        messages_of_span=renumbered(events.messages_of_span, spans),
        causal_spans=renumbered(events.causal_spans, spans),
        convolution_flops=renumbered(events.convolution_flops, spans),
        messages_of_work=renumbered(events.messages_of_work, work),
        moved_bytes=renumbered(events.moved_bytes, work),
        kernel_threads=renumbered(events.kernel_threads, work),
        invalid=events.invalid if is_first else 0,
        converted=events.converted if is_first else 0,
        thread_process=array("i", events.thread_process),
    )


def renumbered(of_items: dict[int, _Of], items: Ints) -> dict[int, _Of]:
    """What is kept of these items, by their new numbers."""
    return {new: of_items[old] for new, old in enumerate(items.tolist()) if old in of_items}
