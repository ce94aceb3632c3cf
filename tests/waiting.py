"""Waiting for what another thread or process does, never for a time.

A deadline only ends a test that hangs. It is generous: beside other work a process can take ten times as long.
"""

import time
from collections.abc import Callable

LOOK_S = 0.01
DEADLINE_S = 300.0


def wait_for(happens: Callable[[], object], timeout_s: float = DEADLINE_S) -> None:
    """Come back once it has happened; fail after so many seconds without."""
    until = time.monotonic() + timeout_s
    while not happens():
        assert time.monotonic() < until, f"waited {timeout_s:g} s in vain"
        time.sleep(LOOK_S)
