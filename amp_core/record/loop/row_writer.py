"""Writes attempted steps into the run folder, in order.

    >>> rows = RowWriter(writer, phases, sampling)
    >>> rows.send(attempts)         # starts their host transfer, writes the steps whose numbers have arrived
    >>> rows.empty()                # at the end: waits for the rest

A step is written when its numbers have arrived, on a GPU some steps later. The host waits for the device only where
more than `MAX_WAITING` steps are pending.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from amp_core.record.loop.attempt import Attempt
from amp_core.record.loop.calibration import Calibration
from amp_core.record.loop.rows import event_rows, step_row, tensor_rows, vanished_gradients
from amp_core.record.loop.sampling import LEFT_OUT, Sampling
from amp_core.record.step_phases import Phases
from amp_core.store.writer import RunWriter

if TYPE_CHECKING:
    from amp_core.record.mirror import Mirror

MAX_WAITING = 64
"""Steps whose numbers may still be on the device."""


class RowWriter:
    """Writes the rows of attempted steps, and reports the cost of each to `sampling`."""

    def __init__(self, writer: RunWriter, phases: Phases, sampling: Sampling) -> None:
        self._writer = writer
        self._phases = phases
        self._sampling = sampling
        self._waiting: deque[Attempt] = deque()
        self.calibration = Calibration()
        """Estimates the hidden cost of watching from the steps that are written."""
        self.on_nonfinite_loss: Callable[[int], None] = lambda step: None
        """Called with the number of each step whose loss was not finite."""
        self.on_vanished_gradients: Callable[[int, list[str]], None] = lambda step, names: None
        """Called with each sampled step that has float16 output gradients of zeros among others, and their modules."""
        self.mirrors: list[Mirror] = []
        """Trackers that also receive every step."""

    def send(self, attempts: Iterable[Attempt]) -> None:
        """Nothing more will be added to these attempts."""
        self._take(attempts)
        self._write(MAX_WAITING)

    def empty(self, attempts: Iterable[Attempt] = ()) -> None:
        """Send these last attempts, wait for the numbers still on the device, and write them."""
        try:
            self._take(attempts)
            self._write(0)
        except RuntimeError as error:  # the device failed: its pending numbers are lost, which an event reports
            lost = len(self._waiting)
            detail = f"the last {lost} steps stayed on it: {error}"
            self._writer.event("warning", name="steps lost", detail=detail)
        for mirror in self.mirrors:
            mirror.close()

    def _take(self, attempts: Iterable[Attempt]) -> None:
        for attempt in attempts:
            self._waiting.append(attempt)
            attempt.send()

    def _write(self, max_waiting: int) -> None:
        """Write the steps whose numbers have arrived, and wait for the oldest while too many are pending."""
        while self._waiting and self._waiting[0].transfer.ready(wait=len(self._waiting) > max_waiting):
            attempt = self._waiting.popleft()
            clocked = self._phases.totals(attempt.spans)
            row = step_row(attempt, self.calibration.corrected(attempt.optimizer, attempt.sort, clocked))
            self._writer.append("steps", row)
            if (loss := row["loss"][0]) is not None and not math.isfinite(loss):
                self.on_nonfinite_loss(attempt.step)
            for mirror in self.mirrors:
                mirror.take(row)
            if attempt.measured:
                rows = tensor_rows(attempt)
                self._writer.append("tensors", rows)
                if vanished := vanished_gradients(rows):
                    self.on_vanished_gradients(attempt.step, vanished)
            events = event_rows(attempt)
            if events:
                self._writer.append("events", events)
            before, was_lean = self._sampling.interval, self._sampling.lean
            if self._sampling.learn(attempt.sampled, row["step_ms"][0], row["watch_ms"][0]) is not None:
                change = f"every {before} → every {self._sampling.interval} steps, to stay within the budget"
                self._writer.event("phase change", name="sampling interval", detail=change, step=attempt.step)
            if self._sampling.lean > was_lean:
                change = f"{LEFT_OUT[was_lean]}, to stay within the budget"
                self._writer.event("phase change", name="hooks", detail=change, step=attempt.step)
