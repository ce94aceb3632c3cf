"""Counts calls where a measured time would depend on the load of the machine."""

import sys
from collections.abc import Callable


def count_calls(function: Callable[[], object]) -> int:
    """The number of calls of Python and C functions while `function` runs."""
    count = 0

    def profiler(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    previous = sys.getprofile()
    sys.setprofile(profiler)
    try:
        function()
    finally:
        sys.setprofile(previous)
    return count
