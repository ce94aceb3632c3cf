"""Errors of watching itself in the middle of a training step: report them, do less, continue.

>>> budget = ErrorBudget(writer)
>>> budget.note(error, step=40)        # True once the budget is spent and watching should end
False
>>> budget.paused(41)                  # sampling pauses, for longer after each error
True
"""

import logging

from amp_core.store.writer import RunWriter
from amp_core.text.errors import in_one_line

PAUSE_STEPS = 10
"""Steps without sampling after the first error; twice as many after each further one."""
MAX_ERRORS = 10
"""Errors after which watching ends: after some ten thousand steps, if every sampled step fails."""

log = logging.getLogger("amp_core")


class ErrorBudget:
    """Counts exceptions of watching, mostly out-of-memory errors in statistics. None of them reaches the loop."""

    def __init__(self, writer: RunWriter) -> None:
        self._writer = writer
        self._reported: set[str] = set()
        self._number = 0
        self._resume = 0

    def note(self, error: Exception, step: int) -> bool:
        """Count an error; each is reported once, in the log and in `events`. True if it exhausts the budget."""
        self._number += 1
        self._resume = step + PAUSE_STEPS * 2 ** (self._number - 1)
        spent = self._number == MAX_ERRORS
        what = in_one_line(error)
        if what not in self._reported or spent:
            self._reported.add(what)
            then = "nothing is recorded" if spent else f"nothing is sampled until step {self._resume}"
            detail = f"watching failed, and {then}; training continues: {what}"
            log.warning("AMPscope: %s", detail)
            self._writer.event("warning", "not recorded", detail, step)
        return spent

    def paused(self, step: int) -> bool:
        """Whether sampling is paused at `step`: after an error, or while too many rows wait to be written."""
        return step < self._resume or self._writer.crowded
