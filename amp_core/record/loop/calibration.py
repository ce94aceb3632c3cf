"""The cost of watching outside of its own code: dispatch of hooks, memory they keep alive, caches they displace.

    >>> calibration = Calibration()
    >>> calibration.wants_bare(step)                 # a step with as few hooks as possible
    >>> calibration.corrected(0, "plain", times)     # for a step of optimizer 0

`Phases` times the recorder's code. The time torch takes to call a hook, and any slowdown of the loop itself, remain in
`forward_ms` and the other phases. So an occasional step runs *bare*: its row has all columns, but no module has a hook
except where the loop enters the model. The time of a bare step without its `watch_ms` is the time of the loop alone.

Steps are of three sorts: `bare`, `sampled` and `plain`. A bare step is compared with the mean of the nearest steps of
each other sort before and after it, so that gradual changes of the machine's speed cancel. The median of the last
`REMEMBERED` differences is the hidden cost of a step of that sort, once there are `MIN_DIFFERENCES` and three in four
of them are positive: where steps vary by more than watching costs, half of them are positive by chance. The cost is
added to `watch_ms` and subtracted from the phases that were longer, so that phases still add up to `step_ms`. Rows
already written do not change.

Steps in which an observer does extra work, such as measuring memory, are corrected like others of their sort: that
extra hidden cost is not counted.

A bare step comes every `FIRST_EVERY` steps until `REMEMBERED` differences are known, and then every `LATER_EVERY`. A
sampled step is never bare: with `every=1` there are no bare steps, and `watch_ms` is the measured time alone.
"""

from collections import deque
from collections.abc import Mapping
from statistics import fmean, median

from amp_core.phases import PHASES

FIRST, FIRST_EVERY, LATER_EVERY = 8, 11, 51
"""From the first step that is not sampled to the first bare one, and from one bare step to the next. The latter are odd
numbers, so that alternating optimizers both have some."""
REMEMBERED = 15
MIN_DIFFERENCES = 5

LOOP = tuple(phase for phase in PHASES if phase not in ("watch", "data"))
"""Phases that may contain hidden cost. The time of loading data varies for other reasons, and no code of the recorder
runs there."""

Times = Mapping[str, float]


class Calibration:
    """Decides which steps are bare, and estimates hidden costs from the times of all steps, in their order."""

    def __init__(self) -> None:
        self._next: int | None = None
        self._bare_steps = 0
        self._hidden: dict[int, Hidden] = {}

    def wants_bare(self, step: int) -> bool:
        """Whether the step, which is not sampled, should be bare. To be called once per step, in rising order."""
        if self._next is None:
            self._next = step + FIRST
        if step < self._next:
            return False
        self._bare_steps += 1
        self._next = step + (FIRST_EVERY if self._bare_steps < REMEMBERED else LATER_EVERY)
        return True

    def corrected(self, optimizer: int, sort: str, times: Times) -> dict[str, float]:
        """Add the measured milliseconds of each phase of a step; returns them with the hidden cost moved to `watch`.

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
        """By sort: bare steps that wait for the next step of that sort, each with the last one before it."""
        self._differences: dict[str, deque[dict[str, float]]] = {
            sort: deque(maxlen=REMEMBERED) for sort in ("plain", "sampled")
        }
        self._shares: dict[str, dict[str, float]] = {}
        """By sort: the hidden milliseconds of each phase; empty where they are not known."""

    def learn(self, sort: str, times: Times) -> None:
        """Add a step."""
        if sort == "bare":
            for other, before in self._last.items():
                self._waiting[other].append((before, times))
            return
        self._last[sort], waiting = times, self._waiting[sort]
        if not waiting:
            return
        for before, bare in waiting:
            self._differences[sort].append({p: fmean((before[p], times[p])) - bare[p] for p in LOOP})
        waiting.clear()
        self._shares[sort] = self._hidden_by_phase(sort)

    def _hidden_by_phase(self, sort: str) -> dict[str, float]:
        by_phase = self._differences[sort]
        differences = sorted(sum(phases.values()) for phases in by_phase)
        if len(by_phase) < MIN_DIFFERENCES or differences[len(by_phase) // 4] <= 0:
            return {}
        parts = {p: max(0.0, median(phases[p] for phases in by_phase)) for p in LOOP}
        whole = sum(parts.values())
        # Without a whole, no single phase is longer in most differences.
        return {p: median(differences) * part / whole for p, part in parts.items()} if whole else {}

    def corrected(self, sort: str, times: Times) -> dict[str, float]:
        """The times with the hidden cost moved to `watch`. Their sum is the same."""
        hidden = self._shares.get(sort)
        if not hidden:
            return dict(times)
        taken = {p: min(times[p], ms) for p, ms in hidden.items()}
        return {**times, **{p: times[p] - ms for p, ms in taken.items()}, "watch": times["watch"] + sum(taken.values())}
