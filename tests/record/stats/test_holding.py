"""Tensors wait for one another as long as no new peak of memory comes of it."""

import torch

from amp_core.record.backends.base import Backend, Room
from amp_core.record.stats.holding import MIN_BYTES, HoldingLimit

GIB = 2**30


class Gpu(Backend):
    """A GPU whose allocator says what it is told to."""

    def __init__(self, allocated: int, peak: int, free: int) -> None:
        super().__init__(torch.device("cpu"))
        self.now = Room(allocated, peak, free)
        self.asked = 0

    def room(self) -> Room:
        self.asked += 1
        return self.now


def held_at_once(gpu: Gpu, each: int = MIN_BYTES // 4, most: int = 400) -> int:
    """Bytes that are held before they are measured, of tensors of `each`."""
    limit = HoldingLimit(gpu)
    for number in range(1, most + 1):
        gpu.now = gpu.now._replace(allocated_bytes=gpu.now.allocated_bytes + each)
        if limit.reached(number * each):
            return number * each
    return most * each


def test_without_room_64_mib_are_held() -> None:
    assert held_at_once(Gpu(0, 0, 0)) == MIN_BYTES
    assert held_at_once(Gpu(9 * GIB, 9 * GIB, 80 * GIB)) == MIN_BYTES
    assert HoldingLimit(Backend(torch.device("cpu"))).reached(MIN_BYTES)


def test_as_much_is_held_as_lies_below_the_peak() -> None:
    assert GIB - MIN_BYTES <= held_at_once(Gpu(8 * GIB, 9 * GIB, 80 * GIB)) <= GIB


def test_no_more_is_held_than_a_share_of_the_devices_free_memory() -> None:
    assert 2 * MIN_BYTES <= held_at_once(Gpu(1 * GIB, 9 * GIB, 2 * GIB)) <= GIB // 4


def test_the_allocator_is_asked_once_in_64_mib() -> None:
    gpu = Gpu(1 * GIB, 90 * GIB, 80 * GIB)
    held = held_at_once(gpu, each=MIN_BYTES // 64, most=640)
    assert held == 10 * MIN_BYTES and gpu.asked == 10


def test_after_a_new_peak_the_limit_rises_no_more() -> None:
    gpu = Gpu(8 * GIB, 9 * GIB, 80 * GIB)
    limit = HoldingLimit(gpu)
    assert not limit.reached(MIN_BYTES)
    limit.restart()
    assert not limit.reached(MIN_BYTES)
    gpu.now = gpu.now._replace(peak_bytes=10 * GIB)
    limit.restart()
    assert limit.reached(MIN_BYTES)
