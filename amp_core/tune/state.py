"""What all stages of a search share: its settings, its budget, its trainings, and what was found so far.

>>> search = Search(config, Path("runs/tune-1"), budget, on_progress=print, trainer=partial(interleave, crew=crew))
>>> search.add(row)          # told, and written to tune.json
"""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from amp_core.hardware.host import this_process
from amp_core.settings.training import TrainConfig
from amp_core.train.turns.member import Member
from amp_core.tune.budget import Budget
from amp_core.tune.evidence import in_words
from amp_core.tune.result import Tried, Tuned

FIRST_STEP_ONLY = 10**6
"""`every` of trainings that are timed: numbers are looked at in step 0 alone, so that watching costs all alike next to
nothing."""


class Ended(Exception):  # noqa: N818 - no error: it carries the exit code of trainings that said why themselves
    """A training refused its settings (2), or the search was asked to stop (130)."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


Trainer = Callable[[Sequence[Member], int, Callable[[int], None], Callable[[int], Collection[int]] | None], list[int]]
"""How members are trained in turns: `interleave` with the search's crew, or a test's own. Takes the members, steps per
block, who is told of the steps made, and who says which places go on; gives exit codes."""


class Search:
    """The state of one search."""

    def __init__(
        self, config: TrainConfig, into: Path, budget: Budget, on_progress: Callable[[str], None], trainer: Trainer
    ) -> None:
        self.config, self.into, self.budget, self.on_progress, self._trainer = (
            config,
            into,
            budget,
            on_progress,
            trainer,
        )
        resolved_config = config.resolved()
        self.found = Tuned(
            "running",
            resolved_config.workload,
            resolved_config.size,
            config.device,
            budget.seconds,
            0.0,
            process=this_process(),
        )

    def train(
        self,
        named: Sequence[tuple[str, Member]],
        block_steps: int,
        keep: Callable[[int], Collection[int]] | None = None,
    ) -> list[int]:
        """Train these in turns; exit codes. Raises `Ended` where they were stopped or refused their settings."""
        codes = self._trainer([member for _, member in named], block_steps, lambda _done: None, keep)
        asked = len(codes) < len(named) or (keep is None and 130 in codes)  # else 130 are those that left
        if asked or 2 in codes:
            raise Ended(2 if 2 in codes else codes[0])
        self.budget.has_process(name for (name, _), code in zip(named, codes, strict=True) if code == 0)
        return codes

    def add(self, row: Tried) -> None:
        """A row of evidence."""
        self.on_progress(in_words(row))
        self.save(tried=(*self.found.tried, row))

    def leave_out(self, what: Sequence[tuple[str, str]]) -> None:
        """What is not tried, and why."""
        self.save(left_out=(*self.found.left_out, *what))

    def save(self, **changes: object) -> None:
        """Keep this in what was found, and write `tune.json` anew."""
        self.found = dataclasses.replace(self.found, seconds=self.budget.used, **changes)  # type: ignore[arg-type]
        self.found.save(self.into)
