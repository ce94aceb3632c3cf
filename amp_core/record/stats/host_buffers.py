"""Large buffers on the host that lie outside of the allocator's heap, and are used again and again.

    >>> packed = host_buffer(284_000)         # FP64, not initialised; free again once no tensor is on it

A sampled step needs some megabytes until its rows are written. In the heap they would lie between the tensors of the
training, and leave a hole there each time: of a model with many small tensors every later step was 3 % slower, even
after `close()`.
"""

import mmap
import sys
import threading

import torch

MIN_BYTES = 1 << 17
"""Smaller ones come from torch: the heap has room for them anywhere."""

_PRIVATE: dict[str, int] = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
"""A process that is forked from this one gets copies of its buffers; by default both would write to the same memory."""

_lock = threading.Lock()
_buffers: list[mmap.mmap] = []


def host_buffer(count: int) -> torch.Tensor:
    """A tensor of so many FP64 values, not initialised."""
    size = 8 * count
    if size < MIN_BYTES:
        return torch.empty(count, dtype=torch.float64, device="cpu")
    with _lock:
        free = [buffer for buffer, held in zip(_buffers, _references(_buffers), strict=True) if held == _UNUSED]
        fitting = next((buffer for buffer in free if len(buffer) >= size), None)
        if fitting is None:  # those that are too small were for a smaller model, or for fewer tensors
            _buffers[:] = [buffer for buffer in _buffers if not any(buffer is other for other in free)]
            fitting = mmap.mmap(-1, size + size // 4, **_PRIVATE)
            _buffers.append(fitting)
        return torch.frombuffer(fitting, dtype=torch.float64, count=count)


def _references(buffers: list[mmap.mmap]) -> list[int]:
    """The reference count of each; a tensor on a buffer holds one."""
    return [sys.getrefcount(buffer) for buffer in buffers]


_UNUSED = _references([mmap.mmap(-1, 1)])[0]
