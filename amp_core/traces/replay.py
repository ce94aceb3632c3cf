"""What it would change if work of a device took less time, or began sooner, while the host launches as it did.

>>> replay = Replay.of(starts, ends, launched, returned, streams, (wait_starts, wait_ends))
>>> replay.lost_us(0.25 * own_us)          # of that time, what changes nothing: later work is launched too late
1800.0

Work begins no sooner than it was launched, so what is gained before it is lost if it was launched just in time. Where
the host waited for the device, it launches sooner what comes then.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

_CHUNK = 100_000
"""Work that is handled at a time: Python's numbers take four times the memory."""


@dataclass(frozen=True)
class Replay:
    """Work of one device, in the order in which it starts."""

    order: npt.NDArray[np.int64]
    """Places of the work in the arrays that it is made of."""
    slack_us: Floats
    """How long each waited for the work before it, after it was launched; infinite where the launch is not known."""
    launched: Floats
    streams: npt.NDArray[Any]
    wait_ends: Floats
    """When the host's waits end, in order."""
    wait_us: Floats

    @classmethod
    def of(
        cls,
        starts: Floats,
        ends: Floats,
        launched: Floats,
        returned: Floats,
        streams: npt.NDArray[Any],
        waits: tuple[Floats, Floats],
    ) -> "Replay":
        """Of work with start and end, start and end of the call that launched it, and stream; and of all calls, as
        start and end, that may end when the device comes so far: waits, and launches that wait for room in a queue."""
        order = np.argsort(starts, kind="stable")
        known = np.isfinite(returned) & (launched < starts)
        before = np.concatenate([starts[order][:1], np.maximum.accumulate(ends[order])[:-1]])
        slack = np.where(known[order], np.minimum(starts[order], before) - returned[order], np.inf)
        by_end = np.argsort(waits[1], kind="stable")
        return cls(
            order=order,
            slack_us=slack.clip(min=0.0),
            launched=launched[order],
            streams=streams[order],
            wait_ends=waits[1][by_end],
            wait_us=(waits[1] - waits[0])[by_end],
        )

    def lost_us(self, shorter_us: Floats) -> float:
        """Of the microseconds by which each work is shorter, or begins sooner, those that change nothing in the end.

        What follows on the stream begins sooner too, by no more than its slack, and so does what the host launches
        after a wait.
        """
        if not shorter_us.any():
            return 0.0
        sooner = dict.fromkeys(np.unique(self.streams).tolist(), 0.0)
        latest, host_sooner, lost, at = 0.0, 0.0, 0.0, 0
        ends, lengths = self.wait_ends.tolist(), self.wait_us.tolist()
        for low in range(0, len(self.order), _CHUNK):
            part = slice(low, low + _CHUNK)
            of_each = (shorter_us[self.order[part]], self.slack_us[part], self.launched[part], self.streams[part])
            for shorter, slack, launch, stream in zip(*(column.tolist() for column in of_each), strict=True):
                while at < len(ends) and ends[at] <= launch:
                    host_sooner = min(latest, host_sooner + lengths[at])
                    at += 1
                possible = min(sooner[stream], slack + host_sooner)
                lost += sooner[stream] - possible
                sooner[stream] = latest = possible + shorter
        return lost


SHORTER_FRACS = (0.25, 0.5, 0.75, 1.0)
"""By how much shorter all work is taken to be, to see whether the end comes sooner; the last: it takes no time at all,
so that the host alone decides."""
REACHES = ("reach_frac", "reach_half_frac", "reach_most_frac", "reach_all_frac")
"""Columns of `windows`, one for each of these."""


def reach_fracs(replay: Replay, own_us: Floats) -> tuple[float, ...]:
    """For each of `SHORTER_FRACS` the share of the time by which all work is shorter that is not lost; 1 without
    work."""
    whole_us = float(own_us.sum())
    return tuple(1 - replay.lost_us(frac * own_us) / max(frac * whole_us, 1e-9) for frac in SHORTER_FRACS)
