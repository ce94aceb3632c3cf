"""Waiting for what another thread or process does, never for a time."""

import time
from collections.abc import Callable

LOOK_S = 0.01


def wait_for(happens: Callable[[], object], timeout_s: float = 30.0) -> None:
    """Come back once it has happened; fail after so many seconds without."""
    until = time.monotonic() + timeout_s
    while not happens():
        assert time.monotonic() < until, f"waited {timeout_s:g} s in vain"
        time.sleep(LOOK_S)
