"""Which steps are measured tensor by tensor: every nth, or as many as a budget allows.

>>> sampling = Sampling(every=10, budget=0.03)
>>> sampling.due(step)                      # the same answer however often it is called for a step
>>> sampling.learn(sampled=True, step_ms=52.0, watch_ms=4.0)
40                                          # the interval was stretched; None if it stays
"""

from collections import deque
from statistics import median

REMEMBERED = 9
"""Steps of each sort of which the median is taken as the cost: a single outlier has no effect."""
MIN_SAMPLED = 2
"""Sampled steps before the interval is first changed."""
MAX_STRETCH = 2**10
"""The interval is at most `every` times this."""

LEFT_OUT = (
    "the first module with a non-finite output is named one step later",
    "gradient norms and names of non-finite gradients are recorded only for sampled steps",
)
"""What steps that are not sampled do without, one after the other, where they exceed the budget by themselves."""


class Sampling:
    """Sampled steps begin with step 0. With a `budget`, the share (0–1) of a step's time that watching may take on
    average, the interval between them is `every` times a power of two, as small as the budget allows. Costs are those
    that `calibration` has corrected."""

    def __init__(self, every: int, budget: float | None = None) -> None:
        self.interval = every
        self.lean = 0
        """How much is left out of steps that are not sampled, because they exceed the budget by themselves: how many of
        `LEFT_OUT`."""
        self._every = every
        self._budget = budget
        self._next = 0
        self._last: int | None = None
        self._sampled: deque[float] = deque(maxlen=REMEMBERED)  # watch_ms of sampled steps
        self._others: deque[float] = deque(maxlen=REMEMBERED)  # and of the others
        self._alike = 0  # others since `lean` last changed
        self._wrote = False  # the step before was a sampled one
        self._bare: deque[float] = deque(maxlen=4 * REMEMBERED)  # step_ms without watching

    def due(self, step: int) -> bool:
        """Whether `step` is measured tensor by tensor. Steps are queried in ascending order."""
        if step >= self._next:
            self._last = step
            self._next = (step // self.interval + 1) * self.interval
        return step == self._last

    def learn(self, sampled: bool, step_ms: float, watch_ms: float) -> int | None:
        """Add the cost of a step. Returns the new interval if it changes, else None."""
        if self._budget is None:
            return None
        self._bare.append(step_ms - watch_ms)
        if sampled:
            self._sampled.append(watch_ms)
        elif self._wrote:  # rows are written when the next step begins, so a part of the cost comes a step later
            self._sampled[-1] += max(0.0, watch_ms - (median(self._others) if self._others else 0.0))
        else:
            self._others.append(watch_ms)
            self._alike += 1
        self._wrote = sampled
        if self._alike >= REMEMBERED and self.lean < len(LEFT_OUT) and self._spare(self._budget) <= 0:
            self.lean += 1
            self._alike = 0
        if len(self._sampled) < MIN_SAMPLED:
            return None
        wanted = self._wanted(self._budget)
        # The interval shrinks only where a quarter suffices, so that a cost near the threshold does not make it
        # oscillate.
        if wanted > self.interval or wanted * 4 <= self.interval:
            self.interval = wanted
            if self._last is not None:
                self._next = (self._last // wanted + 1) * wanted
            return wanted
        return None

    def _wanted(self, budget: float) -> int:
        extra = max(0.0, median(self._sampled) - self._always())
        spare = self._spare(budget)
        interval = self._every
        while interval < self._every * MAX_STRETCH and (spare <= 0 or extra / interval > spare):
            interval *= 2
        return interval

    def _always(self) -> float:
        """The cost of a step that is not sampled, in milliseconds."""
        return median(self._others) if self._others else 0.0

    def _spare(self, budget: float) -> float:
        """The part of the budget left for samples, in milliseconds per step."""
        # watch / (bare + watch) <= budget, so watch may take bare * budget / (1 - budget) of each step on average.
        return median(self._bare) * budget / (1 - budget) - self._always()
