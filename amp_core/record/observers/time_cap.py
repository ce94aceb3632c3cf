"""A cap on the time that measuring takes, for observers whose sampled steps are dear.

cap = TimeCap(writer, "blocks", all_sampled=False)
if cap.allows(step):          # else this sampled step is left out, and an event says so the first time
    with cap:                 # its time counts
        ...
"""

import time

from amp_core.store.writer import RunWriter
from amp_core.text.formatting import duration

MAX_TIME_FRAC = 0.01
"""Share of the time of training that measuring takes unless all steps are sampled."""
FREE_S = 0.05
"""Processor time that measuring takes at first whatever share that is: a few steps of a small model."""


class TimeCap:
    """Counts the time of measuring. The first sampled step is measured in any case, with `all_sampled` every one."""

    def __init__(self, writer: RunWriter, name: str, all_sampled: bool) -> None:
        self._writer, self._name, self._all_sampled = writer, name, all_sampled
        self._began = time.perf_counter()
        self._spent_s = self._processor_s = 0.0
        self._entered = (0.0, 0.0)
        self.sampled = self.measured = 0
        """Sampled steps so far, and those of them that were measured."""

    def allows(self, step: int) -> bool:
        """Whether this sampled step is measured: measuring took few enough of the time so far."""
        share = self._spent_s / max(time.perf_counter() - self._began, 1e-9)
        allowed = self._all_sampled or self._processor_s < FREE_S or share <= MAX_TIME_FRAC
        if not allowed and self.sampled == self.measured:
            detail = (
                f"recording a step takes {duration(self._spent_s / max(self.measured, 1))}; sampled steps are "
                f"skipped to stay within {MAX_TIME_FRAC:.0%} of the time; every=1 records all"
            )
            self._writer.event("phase change", name=self._name, detail=detail, step=step)
        self.sampled += 1
        self.measured += allowed
        return allowed

    def report(self, step: int) -> None:
        """At the end: an event with how many sampled steps were measured, if not all."""
        if self.measured < self.sampled:
            detail = f"recorded on {self.measured:,} of {self.sampled:,} sampled steps"
            self._writer.event("phase change", name=self._name, detail=detail, step=step)

    def __enter__(self) -> None:
        self._entered = time.perf_counter(), time.thread_time()

    def __exit__(self, *raised: object) -> None:
        began, processor = self._entered
        self._spent_s += time.perf_counter() - began
        self._processor_s += time.thread_time() - processor
