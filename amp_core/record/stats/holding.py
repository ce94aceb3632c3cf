"""How much memory may be held until it is measured together: launches for each tensor cost the host more.

    >>> limit = HoldingLimit(backend_of(device))
    >>> limit.reached(held_bytes)       # whether it is to be measured now
    False
    >>> limit.restart()                 # it was

A GPU has a step's worth of room only below the peak of its memory, which mostly lies at the start of backward: as
activations are freed, as much may be held in their place.
"""

from amp_core.record.backends.base import Backend

MIN_BYTES = 1 << 26
"""64 MiB, which may always be held: a GPU reads so much in some 20 µs, several times as long as a launch takes the
host."""
MAX_FREE_FRAC = 1 / 8
"""The share of the device's free memory that may be held, in case nothing that torch has cached fits elsewhere."""


class HoldingLimit:
    """The limit of one device. It is asked as each tensor is held, and asks the allocator once in `MIN_BYTES`."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._at = MIN_BYTES
        self._peak = 0  # when the limit was raised first since the last measurement
        self._may_rise = True

    def reached(self, held: int) -> bool:
        """Whether what is held, of that many bytes, is to be measured now."""
        if held < self._at:
            return False
        if not self._may_rise:
            return True
        room = self._backend.room()
        if room.peak_bytes - room.allocated_bytes < MIN_BYTES or room.free_bytes * MAX_FREE_FRAC < held + MIN_BYTES:
            return True
        if self._at == MIN_BYTES:
            self._peak = room.peak_bytes
        self._at = held + MIN_BYTES
        return False

    def restart(self) -> None:
        """Nothing is held any more. Where memory had a new peak meanwhile, the limit rises no more: what was held may
        be the cause."""
        if self._at > MIN_BYTES:
            self._may_rise = self._backend.room().peak_bytes <= self._peak
            self._at = MIN_BYTES
