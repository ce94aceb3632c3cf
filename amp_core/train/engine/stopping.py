"""Stop a training loop between two steps when SIGTERM or Ctrl-C arrives.

>>> with stop_on_signals() as stop:
...     for step in range(steps):
...         if reason := stop():
...             break
"""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
REPEAT_S = 2.0
"""Signals within this time are one request: a scheduler or a terminal sends it to all processes of a job, and torchrun
or an interleaved comparison passes it on to those it started."""


@contextmanager
def stop_on_signals() -> Iterator[Callable[[], str | None]]:
    """Within the context SIGTERM and Ctrl-C are recorded; the yielded function returns the reason to stop, or None.

    A second signal raises KeyboardInterrupt at once, for a step that does not end, but not within `REPEAT_S` of the
    first. Outside the main thread Python sets no handlers, and nothing changes.
    """
    reasons: list[str] = []
    first_s = 0.0

    def request_stop(number: int, _frame: FrameType | None) -> None:
        nonlocal first_s
        if reasons and time.monotonic() - first_s < REPEAT_S:
            return
        if reasons:
            raise KeyboardInterrupt
        first_s = time.monotonic()
        reasons.append(f"stopped by {signal.Signals(number).name}")

    in_main_thread = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, request_stop) for number in _SIGNALS} if in_main_thread else {}
    try:
        yield lambda: reasons[0] if reasons else None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
