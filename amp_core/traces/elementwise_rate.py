"""At which rate long elementwise kernels move memory at most: by their threads, of which each handles up to 32 bytes of
a tensor, and on AMD's GPUs 64 (`vectorized_elementwise_kernel` of torch: 4 or 8 elements of 32 bits, in ROCm 16).

>>> elementwise_rate(events, amd=False)
ElementwiseRate(us=89200.0, most_bytes=684000000.0, kernel_us=247000.0)
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from amp_core.hardware.kernel_names import COPIES, classify_kernel
from amp_core.traces.events import TraceEvents

VECTORIZED = "vectorized_elementwise_kernel"
MIN_LONG_US = 100.0
"""A shorter kernel of many threads tells less of the rate than of its start."""
BYTES_OF_THREAD, BYTES_OF_THREAD_ON_AMD, MOST_TENSORS = 32, 64, 3
"""Of one tensor by a thread; and two inputs with an output."""
MAX_THREADS = 2**40


@dataclass(frozen=True)
class ElementwiseRate:
    """Long elementwise kernels whose sizes are known, together."""

    us: float
    most_bytes: float
    """They read and write no more."""
    kernel_us: float
    """The time of all kernels of the trace."""


def threads_of(name: str, duration_us: float, arguments: Mapping[str, Any]) -> int:
    """The threads of a long elementwise kernel by its launch, as a trace tells it; 0 for others."""
    if duration_us < MIN_LONG_US or VECTORIZED not in name:
        return 0
    sizes = [size for key in ("grid", "block") for size in _sizes(arguments.get(key))]
    return min(math.prod(sizes), MAX_THREADS) if len(sizes) == 6 else 0


def _sizes(value: Any) -> list[int]:
    is_known = isinstance(value, list) and all(type(one) is int and 0 < one < 2**31 for one in value)
    return value if is_known else []


def elementwise_rate(events: TraceEvents, *, amd: bool) -> ElementwiseRate | None:
    """The rate of a trace; None without such kernels."""
    if not events.kernel_threads:
        return None
    length = np.asarray(events.work.end) - np.asarray(events.work.start)
    computes = np.array([classify_kernel(text).category not in (*COPIES, "communication") for text in events.texts])
    threads = float(sum(events.kernel_threads.values()))
    return ElementwiseRate(
        us=float(length[list(events.kernel_threads)].sum()),
        most_bytes=threads * (BYTES_OF_THREAD_ON_AMD if amd else BYTES_OF_THREAD) * MOST_TENSORS,
        kernel_us=float(length[computes[np.asarray(events.work.name, dtype=np.int64)]].sum()),
    )
