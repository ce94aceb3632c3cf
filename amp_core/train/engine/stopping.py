"""Stop a training loop between two steps when the process is asked to end.

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
    """Within it SIGTERM and Ctrl-C only ask; the function it gives says by what was asked, or None.

    Asking a second time raises KeyboardInterrupt at once, for a step that does not come to its end. Outside the main
    thread Python sets no handlers, and nothing is changed.
    """
    asked: list[str] = []

    def ask(number: int, _frame: FrameType | None) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(f"stopped by {signal.Signals(number).name}")

    in_main_thread = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, ask) for number in _SIGNALS} if in_main_thread else {}
    try:
        yield lambda: asked[0] if asked else None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
