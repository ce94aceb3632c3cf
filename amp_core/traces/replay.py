"""What it would change if work of a device took less time, or began sooner, while the host launches as it did.

>>> replay = Replay.of(starts, ends, launched, returned, streams, (wait_starts, wait_ends))
>>> replay.lost_us(0.25 * own_us)          # of that time, what changes nothing: later work is launched too late
1800.0

Work begins no sooner than it was launched, so what is gained before it is lost if it was launched just in time. Where
the host waited for the device, it launches sooner what comes then. Work that was launched long before, and began as
work of another stream ended, waited for that.
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
    after: npt.NDArray[Any]
    """The stream whose work each may have waited for: its own, or another one."""
    is_free: npt.NDArray[np.bool_]
    """Whether each waited for its launch alone."""
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
        # A call that returns after its work has ended waited for it.
        back = np.where(returned >= ends, np.minimum(launched, returned), returned)[order]
        slack = np.where(known[order], np.minimum(starts[order], before) - back, np.inf)
        after, is_free = _waited_for(starts[order], ends[order], before, back, streams[order])
        by_end = np.argsort(waits[1], kind="stable")
        return cls(
            order=order,
            slack_us=slack.clip(min=0.0),
            launched=launched[order],
            streams=streams[order],
            after=after,
            is_free=is_free,
            wait_ends=waits[1][by_end],
            wait_us=(waits[1] - waits[0])[by_end],
        )

    def lost_us(self, shorter_us: Floats) -> float:
        """Of the microseconds by which each work is shorter, those that change nothing in the end.

        What follows on the stream begins sooner too, by no more than its slack, and so does what the host launches
        after a wait.
        """
        return float(shorter_us.sum()) - sum(self._sooner_us(shorter_us, across=False).values())

    def lost_of_gaps_us(self, held_us: Floats) -> float:
        """The same of the microseconds by which each work begins sooner that ends a gap of the whole device. What
        waited for work of another stream begins sooner too, so that the stream that gains most tells the end."""
        return float(held_us.sum()) - max(self._sooner_us(held_us, across=True).values(), default=0.0)

    def _sooner_us(self, shorter_us: Floats, *, across: bool) -> dict[Any, float]:
        """By stream, how much sooner its last work ends. `across`: whether streams may wait for one another."""
        sooner = dict.fromkeys(np.unique(self.streams).tolist(), 0.0)
        if not shorter_us.any():
            return sooner
        latest, host_sooner, at = 0.0, 0.0, 0
        ends, lengths = self.wait_ends.tolist(), self.wait_us.tolist()
        after, is_free = (self.after, self.is_free) if across else (self.streams, np.zeros_like(self.is_free))
        columns = (shorter_us[self.order], self.slack_us, self.launched, self.streams, after, is_free)
        for low in range(0, len(self.order), _CHUNK):
            of_each = zip(*(column[low : low + _CHUNK].tolist() for column in columns), strict=True)
            for shorter, slack, launch, stream, other, free in of_each:
                while at < len(ends) and ends[at] <= launch:
                    host_sooner = min(latest, host_sooner + lengths[at])
                    at += 1
                device_sooner = host_sooner if free else max(sooner[stream], sooner[other])
                sooner[stream] = latest = min(device_sooner, slack + host_sooner) + shorter
        return sooner


HANDED_OVER_US, STARTED_US = 10.0, 100.0
"""Work begins within this after the end of what it waited for on another stream, and after its launch if it waited for
nothing else (`LATENCY_US` and `START_US` of `idle_causes`)."""


def _waited_for(
    starts: Floats, ends: Floats, before: Floats, returned: Floats, streams: npt.NDArray[Any]
) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]:
    """By work, in order of its starts, the stream whose work it may have waited for: another one whose work was the
    last to end `before` it, right before its start or that of a gap, long after its own stream's; else its own. And
    whether it waited for its launch alone."""
    own_end = np.full(len(starts), -np.inf)
    for stream in np.unique(streams).tolist():
        own = np.flatnonzero(streams == stream)
        own_end[own[1:]] = ends[own[:-1]]
    by_end = np.argsort(ends, kind="stable")
    last = by_end[np.searchsorted(ends[by_end], starts, side="right") - 1]
    soon = starts - HANDED_OVER_US
    other = (ends[last] >= soon) | (before < soon)
    other &= (ends[last] <= starts) & (last < np.arange(len(starts)))  # not work of no length that begins then
    other &= (own_end < soon) & (returned < soon)
    return np.where(other, streams[last], streams), (own_end <= returned) & (returned >= starts - STARTED_US)


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
