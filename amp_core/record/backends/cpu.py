"""The CPU: numba kernels, the host's clock, and the resident set of the process."""

import functools
import os
from typing import Any

import psutil
import torch

from amp_core.record.backends.base import Allocated, Backend, Kernel


class Cpu(Backend):
    """The host itself: nothing is queued, and tensors can be read at once."""

    type = "cpu"
    has_float64 = True
    may_lack_kernels = False

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._peak = 0

    @staticmethod
    def count() -> int:
        """One: the host."""
        return 1

    @staticmethod
    def fp32_precision_owners() -> list[Any]:
        """The backends of oneDNN."""
        owners = (getattr(torch.backends.mkldnn, op, None) for op in ("matmul", "conv", "rnn"))
        return [owner for owner in owners if hasattr(owner, "fp32_precision")]

    @staticmethod
    def kernels() -> dict[str, Kernel]:
        """The numba kernels."""
        from amp_core.record.stats.numba.blocks import distances_cpu
        from amp_core.record.stats.numba.casts import losses_cpu
        from amp_core.record.stats.numba.channels import channels_cpu
        from amp_core.record.stats.numba.measure import PassingTensors, measure_cpu
        from amp_core.record.stats.numba.norm_kernel import norms_cpu

        return {
            "measure": measure_cpu,
            "channels": channels_cpu,
            "norms": norms_cpu,
            "passing": PassingTensors,
            "blocks": distances_cpu,
            "casts": losses_cpu,
        }

    def memory_bytes(self) -> tuple[int, int]:
        """The resident set of this process, and its largest reading so far."""
        now = resident_bytes()
        self._peak = max(self._peak, now)
        return now, self._peak

    def read_allocator(self) -> Allocated:
        """The resident set; allocations are not counted on a CPU."""
        return Allocated(allocated_bytes=resident_bytes())

    def forget_peaks(self) -> None:
        """Restart the tracking of the largest resident set."""
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
    """The file with this process's memory in pages; None if there is none (not Linux). It stays open, because
    opening it takes longest."""
    try:
        return os.open(f"/proc/{pid}/statm", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
