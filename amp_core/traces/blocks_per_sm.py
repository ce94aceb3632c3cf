"""Blocks per multiprocessor from the grids of kernels, where a trace lacks them, as ROCm's traces do.

>>> add_blocks_per_sm(events, {0: 104})      # a grid of 64 blocks on 104 multiprocessors: 0.615
"""

import math
import re
from collections.abc import Mapping

import numpy as np

from amp_core.traces.events import TraceEvents
from amp_core.traces.gpu_work import call_of_work

MAX_UNITS = 1024
"""More multiprocessors has no GPU: some traces have another number in that place."""
_IN_THREADS = re.compile(r"^hipExtModuleLaunchKernel$|^hipHccModuleLaunchKernel$")
"""Calls that are given the threads of a grid (`globalWorkSizeX` in `hip_ext.h`); others are given its blocks."""


def add_blocks_per_sm(events: TraceEvents, units: Mapping[int, int | None]) -> None:
    """Set `blocks_per_sm` of the kernels without it whose grid and launching call are known. `units`: the
    multiprocessors of each device, by its number."""
    work = events.work
    missing = np.isnan(np.asarray(work.blocks_per_sm)) & ~np.isnan(np.asarray(work.grid))
    if not missing.any() or not len(events.calls):
        return
    call = call_of_work(events)
    chosen = np.flatnonzero(missing & (call >= 0))
    in_threads = np.array([_IN_THREADS.match(text) is not None for text in events.texts], dtype=bool)
    grid, block = (np.asarray(column, dtype=float)[chosen] for column in (work.grid, work.block))
    blocks = np.where(in_threads[np.asarray(events.calls.name)[call[chosen]]], grid / block, grid)
    known = {device: count for device, count in units.items() if count and count <= MAX_UNITS}
    per = np.array([known.get(device, math.nan) for device in np.asarray(work.device)[chosen].tolist()])
    for place, value in zip(chosen.tolist(), (blocks / per).tolist(), strict=True):
        work.blocks_per_sm[place] = value
