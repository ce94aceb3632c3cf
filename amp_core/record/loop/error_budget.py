"""What to do where watching itself goes wrong in the middle of a training step: say so, do less, go on.

>>> stumbles = Stumbles(writer)
>>> stumbles.note(error, step=40)      # False; True once so much went wrong that watching should end
>>> stumbles.paused(41)                # nothing is sampled for a while, for longer each time
True
"""

import logging

from amp_core.store.writer import RunWriter

PAUSE_STEPS = 10
"""Steps without sampling after the first stumble; twice as many after each further one."""
MOST = 10
"""ErrorBudget after which nothing is watched any more: some ten thousand steps, where each is at a sampled one."""

log = logging.getLogger("amp_core")


class ErrorBudget:
    """Exceptions that watching has raised, most often for want of memory in a statistic. None reaches the loop."""

    def __init__(self, writer: RunWriter) -> None:
        self._writer = writer
        self._said: set[str] = set()
        self._number = 0
        self._resume = 0

    def note(self, error: Exception, step: int) -> bool:
        """Take in one more; each is said once, in the log and in `events`. True where it was the last to be borne."""
        self._number += 1
        self._resume = step + PAUSE_STEPS * 2 ** (self._number - 1)
        over = self._number == MOST
        lines = str(error).strip().splitlines()
        what = f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
        if what not in self._said or over:
            self._said.add(what)
            then = "nothing is recorded" if over else f"nothing is sampled until step {self._resume}"
            detail = f"watching failed, and {then}; the training goes on: {what}"
            log.warning("AMPscope: %s", detail)
            self._writer.event("warning", "not recorded", detail, step)
        return over

    def paused(self, step: int) -> bool:
        """Whether nothing is to be sampled at `step`: after a stumble, or while rows wait to be written."""
        return step < self._resume or self._writer.crowded
