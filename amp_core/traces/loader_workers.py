"""What the start and the end of a DataLoader's worker processes take, in traces of few batches.

>>> worker_times(events, host)
WorkerTimes(before_us=11900000.0, first_us=12600.0, after_us=560000.0, batches=16, frac=0.97)

An iterator starts its workers before its first mark, or while it waits for the first batch, in which they import the
program anew (spawn), and ends them in its last one or after it. Neither grows with the number of batches.
"""

import re
from dataclasses import dataclass

import numpy as np

from amp_core.traces import intervals as times
from amp_core.traces.events import TraceEvents
from amp_core.traces.link import Host
from amp_core.traces.loading import MAX_LATER_FRAC

WITH_WORKERS = re.compile(r"enumerate\(DataLoader\)#_MultiProcessing")
"""The mark of an iterator that has workers."""
_ENDS_WORKERS = re.compile(r"dataloader\.py\(\d+\): (?:_shutdown_workers|__del__)$")
"""Functions of torch that end them, where Python's functions are recorded."""


@dataclass(frozen=True)
class WorkerTimes:
    """Times that the start and the end of the workers take, microseconds."""

    before_us: float
    """Before the iterator's first mark, without any event after the seed of the workers is drawn."""
    first_us: float
    """The wait for the first batch, if it is far longer than the later ones."""
    after_us: float
    """The last mark, if it is as long, in which no batch is left; and the functions that end the workers."""
    batches: int
    frac: float
    """Share of all of them in the time from the first event to the last."""


def worker_times(events: TraceEvents, host: Host) -> WorkerTimes | None:
    """These times of a trace with one iterator that has workers; None for others."""
    spans = events.spans
    marked = [number for number, text in enumerate(events.texts) if WITH_WORKERS.match(text)]
    loads = np.flatnonzero(np.isin(np.asarray(spans.name), marked))
    start, end = np.asarray(spans.start), np.asarray(spans.end)
    wall_us = float(end.max(initial=-np.inf) - start.min(initial=np.inf))
    if not len(loads) or wall_us <= 0:
        return None
    loads = loads[np.argsort(start[loads], kind="stable")]
    took, begins = (end - start)[loads], float(start[loads[0]])
    before_us = _starting(events, begins)
    usual_us = float(np.median(took))
    is_first_long = len(took) == 1 or usual_us <= MAX_LATER_FRAC * took[0]
    is_last_long = len(took) > 2 and usual_us <= MAX_LATER_FRAC * took[-1]
    ending = _ending(events, host)
    last = times.union(start[loads[-1:]], end[loads[-1:]]) if is_last_long else times.NONE
    after_us = times.total(times.merged(ending, last))
    first_us = float(took[0]) if is_first_long else 0.0
    us = before_us + first_us + after_us
    batches = len(took) - int(is_last_long)
    return WorkerTimes(before_us, first_us, after_us, batches, min(us / wall_us, 1.0))


def _starting(events: TraceEvents, begins: float) -> float:
    """The longest time without an event before the iterator's first mark `begins`, after operators that draw the seed
    of the workers (`base_seed`), or else the time right before the mark; microseconds."""
    spans, calls = events.spans, events.calls
    seeds = [number for number, text in enumerate(events.texts) if text in _SEEDING]
    end, name = np.asarray(spans.end), np.asarray(spans.name)
    times_us = np.sort(np.concatenate([np.asarray(of) for one in (spans, calls) for of in (one.start, one.end)]))
    times_us = times_us[times_us <= begins]
    seeded = end[np.isin(name, seeds) & (end < begins)]
    after = np.searchsorted(times_us, seeded, side="right")
    gaps = times_us[after] - seeded if len(seeded) else times_us[-1:] - times_us[-2:-1]
    return float(gaps.max(initial=0.0))


_SEEDING = ("aten::random_", "aten::item")


def _ending(events: TraceEvents, host: Host) -> times.Intervals:
    frames = events.frames
    names = [number for number, text in enumerate(events.texts) if _ENDS_WORKERS.search(text)]
    chosen = np.isin(np.asarray(frames.name), names) & (np.asarray(frames.thread) == host.loop_thread)
    return times.union(np.asarray(frames.start)[chosen], np.asarray(frames.end)[chosen])
