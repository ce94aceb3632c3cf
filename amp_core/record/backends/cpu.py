"""The CPU: numba kernels, the host's clock, and the resident set of the process."""

import functools
import os
from typing import Any

import psutil
import torch

from amp_core.record.backends.base import Allocated, Backend, Kernel


class Cpu(Backend):
    """The host itself: nothing is queued, and tensors are at hand."""

    type = "cpu"
    has_float64 = True
    may_lack_kernels = False

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._peak = 0

    @staticmethod
    def count() -> int:
        """The host is one device."""
        return 1

    @staticmethod
    def fp32_precision_owners() -> list[Any]:
        """Those of oneDNN."""
        owners = (getattr(torch.backends.mkldnn, op, None) for op in ("matmul", "conv", "rnn"))
        return [owner for owner in owners if hasattr(owner, "fp32_precision")]

    @staticmethod
    def kernels() -> dict[str, Kernel]:
        """Those of numba."""
        from amp_core.record.stats.numba.channels import channels_cpu
        from amp_core.record.stats.numba.measure import PassingTensors, measure_cpu
        from amp_core.record.stats.numba.norm_kernel import norms_cpu

        return {"measure": measure_cpu, "channels": channels_cpu, "norms": norms_cpu, "passing": PassingTensors}

    def memory_bytes(self) -> tuple[int, int]:
        """The resident set of this process, and the largest that was seen."""
        now = resident_bytes()
        self._peak = max(self._peak, now)
        return now, self._peak

    def read_allocator(self) -> Allocated:
        """The resident set: nothing counts allocations."""
        return Allocated(allocated_bytes=resident_bytes())

    def forget_peaks(self) -> None:
        """Find the largest resident set anew."""
        self._peak = 0

    def sample_source(self) -> None:
        """A CPU has no counters to sample."""


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
