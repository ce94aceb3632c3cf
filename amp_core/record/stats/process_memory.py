"""Memory in use: of this process, or of a CUDA device."""

import functools
import os

import psutil
import torch


def memory_bytes(device: torch.device) -> tuple[int, int]:
    """Now and at most so far: allocated by torch on CUDA, else the resident set of this process."""
    if device.type == "cuda":
        # `memory_allocated` and `max_memory_allocated` each sort a hundred figures into a dictionary of their own.
        allocated = torch.cuda.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"]
        return allocated["current"], max(allocated["peak"], earlier_peaks.get(device, 0))
    now = resident_bytes()
    global _peak
    _peak = max(_peak, now)
    return now, _peak


_peak = 0


earlier_peaks: dict[torch.device, int] = {}
"""Highest use of a CUDA device before torch's own peak was begun anew; who begins it anew writes it here first."""


def forget_peaks() -> None:
    """Find the highest use of memory anew: for a process that trains once more. torch's own peak is left alone."""
    global _peak
    _peak = 0
    earlier_peaks.clear()


def resident_bytes() -> int:
    """The resident set of this process."""
    file = _statm(os.getpid())
    if file is None:
        return int(psutil.Process().memory_info().rss)
    return int(os.pread(file, 128, 0).split()[1]) * os.sysconf("SC_PAGE_SIZE")


@functools.cache
def _statm(pid: int) -> int | None:
    """This process's memory in pages, where there is such a file (Linux). It stays open: opening it takes longest."""
    try:
        return os.open(f"/proc/{pid}/statm", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
