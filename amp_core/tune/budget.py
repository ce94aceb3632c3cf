"""The budget of a search: predicts the seconds that trainings take from earlier ones.

>>> budget = Budget(300.0, time.monotonic)
>>> budget.takes(["fp32", "bf16"], steps=60, seeds=3) < budget.left
True
"""

import math
from collections.abc import Callable, Iterable, Sequence

from amp_core.store.run import Run

PARALLEL_START_FRAC = 0.7
"""Start time of a process that starts beside others, relative to one that starts alone, on few cores."""
RESTART_FRAC = 0.3
"""Share of a start that a further training in the same process takes before and after its steps: torch is imported
already, model and data are built again."""
MARGIN_RATIO = 1.25
"""A suggested budget is this many times the expected time."""


class Budget:
    """Seconds left, and the trainings they suffice for. Recipes are given by name."""

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self.seconds = seconds
        self.clock = clock
        self.start_s = 0.0
        """What one training takes before its first step in a new process."""
        self.probe_s = 0.0
        """What the probe run took, which precedes all planning."""
        self._began = clock()
        self._step_s: dict[str, float] = {}
        self._ready: set[str] = set()

    @property
    def used(self) -> float:
        """Seconds since the search began."""
        return self.clock() - self._began

    @property
    def left(self) -> float:
        """Seconds; below 0 if a training took longer than expected."""
        return self.seconds - self.used

    def took(self, name: str, run: Run) -> None:
        """Record how long a step of this recipe takes, if it was timed."""
        times = run.steps["step_ms"].dropna()
        if len(times):
            self._step_s[name] = float(times.median()) / 1e3

    def has_process(self, names: Iterable[str]) -> None:
        """Record that these recipes have a process that waits for its next training."""
        self._ready |= set(names)

    def step_s(self, names: Iterable[str]) -> float:
        """Seconds of one step of each recipe; an untimed recipe counts as fp32."""
        return sum(self._step_s.get(name, self._step_s["fp32"]) for name in names)

    def takes(self, names: Sequence[str], steps: int, seeds: int = 1) -> float:
        """Seconds that these recipes take for `steps` steps under each of `seeds` seeds."""
        return self._beside_steps(names, seeds) + seeds * steps * self.step_s(names)

    def steps(self, names: Sequence[str], share: float, least: int, most: int, seeds: int = 1) -> int:
        """Steps that all of these can train under each of `seeds` seeds within the fraction `share` of the time
        left."""
        seconds = share * self.left - self._beside_steps(names, seeds)
        return max(least, min(most, int(seconds / max(seeds * self.step_s(names), 1e-6))))

    def _beside_steps(self, names: Sequence[str], seeds: int) -> float:
        """Seconds before the first step and after the last: the first process starts alone, then the others at once."""
        new = sum(name not in self._ready for name in names)
        starts = 1 + PARALLEL_START_FRAC * (new - 1) if new else 0.0
        return self.start_s * (starts + RESTART_FRAC * (seeds * len(names) - new))


def in_round_seconds(seconds: float) -> int:
    """A budget to suggest: with a margin, in tens of seconds."""
    return 10 * math.ceil(MARGIN_RATIO * seconds / 10)
