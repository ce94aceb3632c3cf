"""How much Python a function runs, where a time would depend on what else the machine does."""

import sys
from collections.abc import Callable


def calls_of(function: Callable[[], object]) -> int:
    """Calls that are made while `function` runs, of Python's functions and of C's."""
    count = 0

    def counted(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(counted)
    try:
        function()
    finally:
        sys.setprofile(before)
    return count
