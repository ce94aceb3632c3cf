"""What watching costs where no clock of ours runs: the dispatch of hooks, what they keep alive, caches they displace.

    >>> calibration = Calibration()
    >>> calibration.wants_bare(step)                 # a step in which the recorder does with as few hooks as it can
    >>> calibration.corrected(0, "plain", times)     # of a step of optimizer 0

`Phases` clocks the code of the recorder. What torch does to call a hook at all, and what the loop does slower for it,
stays in `forward_ms` and the other phases. So now and then a step runs *bare*: its row has all of its columns, but no
module has a hook except where the loop enters the model. What a bare step takes without its own `watch_ms` is what the
loop takes by itself.

Steps are of three sorts: `bare`, `sampled` and `plain`. A bare step is compared with the nearest steps of each other
sort, before and after it, by the mean of the two, so that a machine that becomes slower or faster matters little. The
median of the last `REMEMBERED` differences is the hidden cost of a step of that sort, once there are `ENOUGH` and three
in four of them are above zero: on a machine whose steps vary by more than watching costs, chance alone would make half
of them so. The cost is added to `watch_ms`, and taken off the phases that were longer, so that phases still add up to
`step_ms`. Rows that were written before are left as they were.

Steps in which an observer does more than in others, such as a look at memory, are corrected as their sort is: what
those few cost beyond that is not counted.

A bare step comes every `FIRST_EVERY` steps until `REMEMBERED` differences are known, and then every `LATER_EVERY`. A
step that is due for a sample is never bare: with `every=1` there is none, and `watch_ms` is what was clocked.
"""

from collections import deque
from collections.abc import Mapping
from statistics import fmean, median

from amp_core.phases import PHASES

FIRST, FIRST_EVERY, LATER_EVERY = 8, 11, 51
"""From the first step that is not sampled to the first bare one, and from one bare step to the next. The latter are odd
numbers, so that optimizers that take turns both have some."""
REMEMBERED = 15
ENOUGH = 5

LOOP = tuple(phase for phase in PHASES if phase not in ("watch", "data"))
"""Phases in which a cost may hide. What loading data takes varies for reasons of its own, and nothing of ours runs
there."""

Times = Mapping[str, float]


class Calibration:
    """Says which steps are bare, and learns from the times of all, in the order in which they were made."""

    def __init__(self) -> None:
        self._next: int | None = None
        self._bare_steps = 0
        self._hidden: dict[int, Hidden] = {}

    def wants_bare(self, step: int) -> bool:
        """Whether the step, which is due for no sample, is to be bare. Steps are asked for once, in rising order."""
        if self._next is None:
            self._next = step + FIRST
        if step < self._next:
            return False
        self._bare_steps += 1
        self._next = step + (FIRST_EVERY if self._bare_steps < REMEMBERED else LATER_EVERY)
        return True

    def corrected(self, optimizer: int, sort: str, times: Times) -> dict[str, float]:
        """Take in the milliseconds of each phase of a step, as they were clocked; returns what they really are.

        Steps of different optimizers are not compared: those of a generator and a discriminator have little in common.
        """
        hidden = self._hidden.setdefault(optimizer, Hidden())
        hidden.learn(sort, times)
        return hidden.corrected(sort, times)


class Hidden:
    """The hidden cost of the steps of one optimizer."""

    def __init__(self) -> None:
        self._last: dict[str, Times] = {}
        self._waiting: dict[str, list[tuple[Times, Times]]] = {"plain": [], "sampled": []}
        """Bare steps for which the next step of that sort is still to come, each with the one before."""
        self._found: dict[str, deque[dict[str, float]]] = {
            sort: deque(maxlen=REMEMBERED) for sort in ("plain", "sampled")
        }

    def learn(self, sort: str, times: Times) -> None:
        """Take in a step."""
        if sort == "bare":
            for other, before in self._last.items():
                self._waiting[other].append((before, times))
            return
        for before, bare in self._waiting[sort]:
            self._found[sort].append({p: fmean((before[p], times[p])) - bare[p] for p in LOOP})
        self._waiting[sort].clear()
        self._last[sort] = times

    def corrected(self, sort: str, times: Times) -> dict[str, float]:
        """The times with the hidden cost where it belongs. Their sum is the same."""
        found = self._found.get(sort, ())
        differences = sorted(sum(f.values()) for f in found)
        if len(found) < ENOUGH or differences[len(found) // 4] <= 0:
            return dict(times)
        hidden = median(differences)
        parts = {p: max(0.0, median(f[p] for f in found)) for p in LOOP}
        whole = sum(parts.values())
        if not whole:  # no phase by itself is longer in most of them
            return dict(times)
        taken = {p: min(times[p], hidden * part / whole) for p, part in parts.items()}
        return {**times, **{p: times[p] - ms for p, ms in taken.items()}, "watch": times["watch"] + sum(taken.values())}
