"""Writes rows in a background thread, for steps that run outside of Python most of the time.

>>> rows = BackgroundRows(row_writer.send, failed)
>>> rows.take(attempts)        # returns at once; the thread runs when the training releases the interpreter
>>> rows.finish()              # at the end: waits for the rows

Keras on TensorFlow runs a whole step as one graph. Python code that the graph waits for makes the step longer; code
that runs meanwhile does not.
"""

import queue
import threading
import time
from collections.abc import Callable

from amp_core.record.loop.attempt import Attempt

MAX_WAITING = 64
"""Steps that may wait for the thread; a loop further ahead waits for it."""
JOIN_TIMEOUT_S = 10.0
"""Time that the end of a run waits for the thread, if the run folder does not respond."""


class BackgroundRows:
    """A thread that calls `send` with attempts, in order. Exceptions are reported to `failed`."""

    def __init__(self, send: Callable[[list[Attempt]], None], failed: Callable[[Exception], None]) -> None:
        self._send = send
        self._failed = failed
        self._waiting: queue.SimpleQueue[list[Attempt] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="ampscope-rows", daemon=True)
        self._thread.start()

    def take(self, attempts: list[Attempt]) -> None:
        """Send these attempts in the background."""
        self._waiting.put(attempts)
        while self._waiting.qsize() > MAX_WAITING and self._thread.is_alive():
            time.sleep(0.001)

    def finish(self) -> None:
        """Wait until all attempts are sent, for at most `JOIN_TIMEOUT_S`. A second call does nothing."""
        self._waiting.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(JOIN_TIMEOUT_S)

    def _work(self) -> None:
        while (attempts := self._waiting.get()) is not None:
            try:
                self._send(attempts)
            except Exception as error:
                self._failed(error)
