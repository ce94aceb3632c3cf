"""Wait for another thread or process, never for a fixed time.

A deadline only ends a test that hangs. It is generous: on a busy machine a process can take ten times as long.
"""

import time
from collections.abc import Callable

POLL_S = 0.01
DEADLINE_S = 300.0


def wait_for(condition: Callable[[], object], timeout_s: float = DEADLINE_S) -> None:
    """Return once `condition()` is true; fail after `timeout_s` seconds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s in vain"
        time.sleep(POLL_S)
