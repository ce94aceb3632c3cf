"""Stop a training loop between two steps when SIGTERM or Ctrl-C arrives.

>>> with stop_on_signals() as stop:
...     for step in range(steps):
...         if reason := stop():
...             break
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def stop_on_signals() -> Iterator[Callable[[], str | None]]:
    """Within the context SIGTERM and Ctrl-C are recorded; the yielded function returns the reason to stop, or None.

    A second signal raises KeyboardInterrupt at once, for a step that does not end. Outside the main thread Python sets
    no handlers, and nothing changes.
    """
    reasons: list[str] = []

    def request_stop(number: int, _frame: FrameType | None) -> None:
        if reasons:
            raise KeyboardInterrupt
        reasons.append(f"stopped by {signal.Signals(number).name}")

    in_main_thread = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, request_stop) for number in _SIGNALS} if in_main_thread else {}
    try:
        yield lambda: reasons[0] if reasons else None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
