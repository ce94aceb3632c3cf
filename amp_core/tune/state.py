"""The state that all stages of a search share: settings, budget, trainings and the result so far.

>>> search = Search(config, Path("runs/tune-1"), budget, on_progress=print, trainer=partial(interleave, pool=pool))
>>> search.add(row)          # reported, and written to tune.json
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
"""`every` of timed trainings: only step 0 is sampled, so that watching costs almost nothing."""


class Ended(Exception):  # noqa: N818 - no error: it carries the exit code of trainings that reported their errors
    """A training refused its settings (2), or the search received a stop request (130)."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


Trainer = Callable[[Sequence[Member], int, Callable[[int], None], Callable[[int], Collection[int]] | None], list[int]]
"""Trains members interleaved: `interleave` with the search's pool, or a test's own. Takes the members, steps per block,
a progress callback and a callback for the indices that continue; returns exit codes."""


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
        self.result = Tuned(
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
        """Train these interleaved; returns exit codes. Raises `Ended` if they were stopped or refused their
        settings."""
        codes = self._trainer([member for _, member in named], block_steps, lambda _done: None, keep)
        stopped = len(codes) < len(named) or (keep is None and 130 in codes)  # with `keep`, 130 marks those that left
        if stopped or 2 in codes:
            raise Ended(2 if 2 in codes else codes[0])
        self.budget.has_process(name for (name, _), code in zip(named, codes, strict=True) if code == 0)
        return codes

    def add(self, row: Tried) -> None:
        """Add a row of evidence."""
        self.on_progress(in_words(row))
        self.save(tried=(*self.result.tried, row))

    def leave_out(self, what: Sequence[tuple[str, str]]) -> None:
        """Record what is not tried, and why."""
        self.save(left_out=(*self.result.left_out, *what))

    def save(self, **changes: object) -> None:
        """Change fields of the result, and write `tune.json`."""
        self.result = dataclasses.replace(self.result, seconds=self.budget.used, **changes)  # type: ignore[arg-type]
        self.result.save(self.into)
