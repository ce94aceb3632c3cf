"""What a search may still spend: seconds that trainings take, from what those before them took.

>>> budget = Budget(300.0, time.monotonic)
>>> budget.takes(["fp32", "bf16"], steps=60, seeds=3) < budget.left
True
"""

import math
from collections.abc import Callable, Iterable, Sequence

from amp_core.store.run import Run

STARTS_AT_ONCE = 0.7
"""A process that starts beside others takes this share of the time of one that starts alone, on few cores."""
AGAIN = 0.3
"""Share of a start that the next training of a process takes before and after its steps: it has imported torch, but
makes its model and its data anew."""
SPARE = 1.25
"""By how much a budget that is asked for is larger than what is expected."""


class Budget:
    """Seconds that are left, and what they buy. Recipes go by their names."""

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self.seconds = seconds
        self.clock = clock
        self.start_s = 0.0
        """What one training takes before its first step, in a process that has to start."""
        self.look_s = 0.0
        """What the look took, which comes before all planning."""
        self._began = clock()
        self._step_s: dict[str, float] = {}
        self._ready: set[str] = set()

    @property
    def used(self) -> float:
        """Seconds since the search began."""
        return self.clock() - self._began

    @property
    def left(self) -> float:
        """Seconds; below 0 where a training took longer than expected."""
        return self.seconds - self.used

    def took(self, name: str, run: Run) -> None:
        """Remember how long a step of this recipe takes, where it was timed."""
        times = run.steps["step_ms"].dropna()
        if len(times):
            self._step_s[name] = float(times.median()) / 1e3

    def has_process(self, names: Iterable[str]) -> None:
        """These trained to their end: their processes wait for more."""
        self._ready |= set(names)

    def step_s(self, names: Iterable[str]) -> float:
        """Seconds of one step of each. A recipe not seen yet: as fp32."""
        return sum(self._step_s.get(name, self._step_s["fp32"]) for name in names)

    def takes(self, names: Sequence[str], steps: int, seeds: int = 1) -> float:
        """Seconds that these take for so many steps, under so many seeds."""
        return self._beside_steps(names, seeds) + seeds * steps * self.step_s(names)

    def steps(self, names: Sequence[str], share: float, least: int, most: int, seeds: int = 1) -> int:
        """Steps for which all of these can train, under so many seeds, within a share of what is left."""
        seconds = share * self.left - self._beside_steps(names, seeds)
        return max(least, min(most, int(seconds / max(seeds * self.step_s(names), 1e-6))))

    def _beside_steps(self, names: Sequence[str], seeds: int) -> float:
        """Seconds before the first step and after the last: the first process starts alone, then the others at once."""
        new = sum(name not in self._ready for name in names)
        starts = 1 + STARTS_AT_ONCE * (new - 1) if new else 0.0
        return self.start_s * (starts + AGAIN * (seeds * len(names) - new))


def in_round_seconds(seconds: float) -> int:
    """A budget to ask for: with something to spare, in tens of seconds."""
    return 10 * math.ceil(SPARE * seconds / 10)
