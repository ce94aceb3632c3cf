"""What it would change if work of a device took less time, or began sooner, while the host launches as it did.

>>> replay = Replay.of(starts, ends, launched, returned, streams, (wait_starts, wait_ends))
>>> replay.sooner_us(0.25 * own_us)          # by so much the last work ends sooner, of what is saved of all
1800.0

Work begins no sooner than it was launched, than the work before it on its stream ends, and than that of another stream
ends for which it waited. How long it took to begin after the last of these stays. Where the host waited for the device,
it launches sooner what comes then.
"""

import math
from array import array
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from amp_core.traces import intervals as times

Floats = npt.NDArray[np.float64]
Places = npt.NDArray[np.int32]
Bools = npt.NDArray[np.bool_]

_CHUNK = 100_000
"""Work that is handled at a time: Python's numbers take four times the memory."""


@dataclass(frozen=True)
class Replay:
    """Work of one device, in the order in which it starts. What each waits for, its launch and work on its stream and
    on another one, was there some microseconds before the last of these: its slack; infinite for what is not known."""

    order: npt.NDArray[np.int64]
    """Places of the work in the arrays that it is made of."""
    us: Floats
    """How long each takes; 0 for copies and collectives, which faster kernels leave as long as they are."""
    busy_us: float
    """How long any of the others ran."""
    launched: Floats
    """When the host begins to launch each."""
    slack_us: Floats
    """Of its launch."""
    own: Places
    own_slack_us: Floats
    """The work before each on its stream."""
    other: Places
    other_slack_us: Floats
    """The work of another stream that it waited for."""
    last: Places
    """The last work of each stream with much work, and how long before the end of all of these it ends."""
    last_slack_us: Floats
    wait_order: npt.NDArray[np.int64]
    """Places of the host's waits in the arrays that it is made of, in the order in which they end."""
    wait_ends: Floats
    """When they end."""
    wait_us: Floats
    waited_for: Places
    """The work that ended last before each of these; -1 is none."""
    wait_slack_us: Floats
    """How long before each of these began that work had ended; 0 if it had not."""
    in_wait: Bools
    """Which of these are calls that only wait, after the first of the work was launched, and for what the program does
    not need at once."""

    @classmethod
    def of(
        cls,
        starts: Floats,
        ends: Floats,
        launched: Floats,
        returned: Floats,
        streams: npt.NDArray[Any],
        waits: tuple[Floats, Floats],
        copies: Bools | None = None,
        collectives: Bools | None = None,
        uploads: Bools | None = None,
        only_wait: Bools | None = None,
        for_results: Bools | None = None,
    ) -> "Replay":
        """Of work with start and end, start and end of the call that launched it, and stream, and which of it is
        copies, collectives, and copies from memory of the host that is not pinned, none unless given; and of all calls,
        as start and end, that may end when the device comes so far: waits, and launches that wait for room in a
        queue; `only_wait` tells the former, and `for_results` those for what the program then works on."""
        order = np.argsort(starts, kind="stable")
        none = np.zeros(len(starts), dtype=bool)
        copies, collectives, uploads = (none if kind is None else kind for kind in (copies, collectives, uploads))
        only_wait, for_results = (
            np.zeros(len(waits[0]), dtype=bool) if kind is None else kind for kind in (only_wait, for_results)
        )
        first_us = launched[np.isfinite(launched)].min(initial=np.inf)  # of those that the trace holds
        shortens = ~(copies | collectives)[order]
        in_call = np.where(starts < returned, launched, np.nan)[order]
        # A call that returns after its work has ended waited for it.
        waited = ((returned >= ends) | copies)[order]
        # Until such a copy begins, its call moves what it copies to memory that is pinned.
        staged = (uploads & (returned > starts))[order]
        back = np.where(returned >= ends, np.minimum(launched, returned), returned)
        ready = np.where(np.isfinite(returned) & (launched < starts), np.minimum(back, starts), -np.inf)[order]
        starts, ends, streams = starts[order], ends[order], streams[order]
        by_end = np.argsort(ends, kind="stable").astype(np.int32)
        own, last = _on_streams(streams, ends - starts)
        own_end = np.where(own >= 0, ends[own], -np.inf)
        other = np.where(staged, np.int32(-1), _waited_for(starts, ends, ready, own_end, by_end))
        other_end = np.where(other >= 0, ends[other], -np.inf)
        latest = np.maximum(ready, np.maximum(own_end, np.minimum(other_end, starts)))
        latest = np.where(np.isfinite(latest), latest, 0.0)  # nothing is known to be waited for
        of_wait = np.argsort(waits[1], kind="stable")
        ended = np.searchsorted(ends[by_end], waits[1][of_wait], side="right") - 1
        waited_for = np.where(ended >= 0, by_end[ended], -1) if len(by_end) else ended.astype(np.int32)
        began, own_call = _in_calls(in_call, waits[0][of_wait])
        wait_slack_us = (waits[0][of_wait] - ends[waited_for]).clip(min=0.0) if len(ends) else np.zeros(len(of_wait))
        # What had ended before a call began made it no longer: it is long for other reasons, if it does not only wait.
        waited_for[(wait_slack_us > 0) & ~only_wait[of_wait]] = -1
        # A call in which its work began waited for that alone, and a launch not even for that.
        waited_for[own_call], wait_slack_us[own_call] = np.where(waited[began], began, -1), 0.0
        return cls(
            order=order,
            us=np.where(shortens, ends - starts, 0.0),
            busy_us=times.total(times.union(starts[shortens], ends[shortens])),
            launched=launched[order],
            slack_us=latest - ready,
            own=own,
            own_slack_us=latest - own_end,
            other=other,
            other_slack_us=(latest - other_end).clip(min=0.0),
            last=last,
            last_slack_us=ends[last].max(initial=-np.inf) - ends[last],
            wait_order=of_wait,
            wait_ends=waits[1][of_wait],
            wait_us=(waits[1] - waits[0])[of_wait],
            waited_for=waited_for,
            wait_slack_us=wait_slack_us,
            in_wait=(only_wait & ~for_results & (waits[0] >= first_us))[of_wait],
        )

    def sooner_us(self, shorter_us: Floats) -> float:
        """By how much the last work of the streams with much work ends sooner, where each work is shorter, or begins
        sooner, by so many microseconds."""
        return self._sooner_us(shorter_us, np.zeros_like(self.in_wait)) if shorter_us.any() else 0.0

    def unwaited_us(self, of: Bools | None = None) -> float:
        """By how much it ends sooner where the host waits in none of the calls that only wait; in none `of` them, as
        places in the waits that it is made of."""
        without = self.in_wait if of is None else self.in_wait & of[self.wait_order]
        return self._sooner_us(np.zeros(len(self.order)), without) if without.any() else 0.0

    def without_host_us(self, spans: times.Intervals) -> float:
        """By how much it ends sooner at most where the host, after the first launch, takes no time for what it does in
        these spans."""
        spans = times.clip(spans, float(self.launched[np.isfinite(self.launched)].min(initial=np.inf)), np.inf)
        if not len(spans[0]):
            return 0.0
        ends, us = np.concatenate([self.wait_ends, spans[0]]), np.concatenate([self.wait_us, spans[1] - spans[0]])
        order, is_span = np.argsort(ends, kind="stable"), np.arange(len(ends)) >= len(self.wait_ends)
        waited_for = np.concatenate([self.waited_for, np.full(len(spans[0]), -1, np.int32)])[order]
        slack_us = np.concatenate([self.wait_slack_us, np.zeros(len(spans[0]))])[order]
        added = replace(self, wait_ends=ends[order], wait_us=us[order], waited_for=waited_for, wait_slack_us=slack_us)
        return added._sooner_us(np.zeros(len(self.order)), is_span[order])

    def _sooner_us(self, shorter_us: Floats, without: Bools) -> float:
        """By how much it ends sooner with shorter work, and `without` some of the host's waits."""
        sooner = array("d", bytes(8 * len(self.order)))  # by work, when it ends
        host_sooner, at = 0.0, 0
        # As memory views, which make a number of Python's only when it is read.
        wait_ends, waited_for, left_out = self.wait_ends.data, self.waited_for.data, without.data
        lengths, wait_slacks = self.wait_us.data, self.wait_slack_us.data
        columns = (
            shorter_us[self.order],
            self.launched,
            self.slack_us,
            self.own,
            self.own_slack_us,
            self.other,
            self.other_slack_us,
        )
        for low in range(0, len(self.order), _CHUNK):
            of_each = zip(*(column[low : low + _CHUNK].tolist() for column in columns), strict=True)
            for place, (shorter, launch, slack, own, own_slack, other, other_slack) in enumerate(of_each, low):
                while at < len(wait_ends) and wait_ends[at] <= launch:
                    if left_out[at]:
                        host_sooner += lengths[at]
                    elif waited_for[at] >= 0:
                        gained = 0.0 if wait_slacks[at] else lengths[at]
                        host_sooner = min(sooner[waited_for[at]] + wait_slacks[at], host_sooner + gained)
                    at += 1
                # What is not known has infinite slack; at -1 stands a work that has not been reached, with 0.
                begins = min(slack + host_sooner, own_slack + sooner[own], other_slack + sooner[other])
                sooner[place] = shorter + (begins if begins < math.inf else 0.0)
        ends = self.last_slack_us + np.array([sooner[place] for place in self.last.tolist()])
        return max(0.0, float(ends.min()))


MIN_STREAM_FRAC = 0.1
"""Time over that of the busiest stream from which one tells when all work ends: one of few copies does not."""


def _in_calls(launched: Floats, calls: Floats) -> tuple[Places, Bools]:
    """The work whose launch began with each of the `calls` of which there is one, and which these are; a launch is NaN
    where its work did not begin before the call returned."""
    by_launch = np.argsort(launched, kind="stable").astype(np.int32)  # NaN comes last
    at = np.minimum(np.searchsorted(launched[by_launch], calls), max(0, len(launched) - 1))
    if not len(launched):
        return by_launch, np.zeros(len(calls), dtype=bool)
    is_launch = launched[by_launch][at] == calls
    return by_launch[at[is_launch]], is_launch


def _on_streams(streams: npt.NDArray[Any], us: Floats) -> tuple[Places, Places]:
    """The work before each on its stream, -1 for the first; and the last work of each stream with much of it."""
    own = np.full(len(streams), -1, np.int32)
    of_streams = [np.flatnonzero(streams == stream) for stream in np.unique(streams).tolist()]
    for places in of_streams:
        own[places[1:]] = places[:-1]
    least_us = MIN_STREAM_FRAC * max((us[places].sum() for places in of_streams), default=0.0)
    return own, np.array([places[-1] for places in of_streams if us[places].sum() >= least_us], dtype=np.int32)


HANDED_OVER_US = 10.0
"""Work begins within this after what it waited for: its launch, or the end of other work (`LATENCY_US` of
`idle_causes`)."""


def _waited_for(starts: Floats, ends: Floats, ready: Floats, own_end: Floats, by_end: Places) -> Places:
    """By work, in order of its starts, the work of another stream with which it may have begun, -1 for none, where it
    begins long after its launch and its own stream's work: the last to end before it, or what runs then and ends so
    soon after that it had got nearly there."""
    places = np.arange(len(starts))
    after = np.searchsorted(ends[by_end], starts, side="right")
    last, running = by_end[after - 1], by_end[np.minimum(after, len(by_end) - 1)]
    has_last = (after > 0) & (last < places)  # not work of no length that begins then
    has_running = (after < len(by_end)) & (running < places)
    is_nearer = has_running & (~has_last | (ends[running] - starts < starts - ends[last]))
    other = np.where(is_nearer, running, np.where(has_last, last, np.int32(-1)))
    soon = starts - HANDED_OVER_US
    ended_just_now = has_last & (ends[last] >= soon)
    other = np.where(ended_just_now, last, other)
    return np.where((own_end < soon) & (ready < soon), other, np.int32(-1)).astype(np.int32)


SHORTER_FRACS = (0.25, 0.5, 0.75, 1.0)
"""By how much shorter all kernels are taken to be, to see whether the end comes sooner; the last: they take no time at
all, so that the host, copies and collectives alone decide."""
REACHES = ("reach_frac", "reach_half_frac", "reach_most_frac", "reach_all_frac")
"""Columns of `windows`, one for each of these."""


def reach_fracs(replay: Replay) -> tuple[float, ...]:
    """For each of `SHORTER_FRACS` how much sooner the work ends, as a share of the time by which the device is in
    kernels for less; 1 without any."""
    if not replay.busy_us > 0:
        return (1.0,) * len(SHORTER_FRACS)
    us = np.empty_like(replay.us)
    us[replay.order] = replay.us
    return tuple(min(1.0, replay.sooner_us(frac * us) / (frac * replay.busy_us)) for frac in SHORTER_FRACS)
