"""Rows that are written beside the training, where a step is at work outside of Python for most of its time.

>>> aside = Aside(outbox.send, failed)
>>> aside.take(attempts)        # returns at once; the thread has the interpreter when the training leaves it
>>> aside.finish()              # at the end: waits for what was taken

Keras on TensorFlow runs a whole step as one graph. What Python does while the graph waits for it makes the step longer;
what it does meanwhile does not.
"""

import queue
import threading
import time
from collections.abc import Callable

from amp_core.record.loop.attempt import Attempt

MAX_WAITING = 64
"""Steps that may wait for the thread; a loop further ahead waits for it, as if it wrote them itself."""
PATIENCE_S = 10.0
"""How long the end of a run waits for the thread, where the run's folder does not answer; seconds."""


class Aside:
    """A thread that calls `send` with what it is given, in the order in which it came; what that raises goes to
    `failed`."""

    def __init__(self, send: Callable[[list[Attempt]], None], failed: Callable[[Exception], None]) -> None:
        self._send = send
        self._failed = failed
        self._waiting: queue.SimpleQueue[list[Attempt] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="ampscope-aside", daemon=True)
        self._thread.start()

    def take(self, attempts: list[Attempt]) -> None:
        """Have these sent soon."""
        self._waiting.put(attempts)
        while self._waiting.qsize() > MAX_WAITING and self._thread.is_alive():
            time.sleep(0.001)

    def finish(self) -> None:
        """Have what was taken sent now, for at most `PATIENCE_S`. Twice is harmless."""
        self._waiting.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(PATIENCE_S)

    def _work(self) -> None:
        while (attempts := self._waiting.get()) is not None:
            try:
                self._send(attempts)
            except Exception as error:
                self._failed(error)
