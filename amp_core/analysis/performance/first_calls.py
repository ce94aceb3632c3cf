"""Places whose first calls in a trace take most of their time: they set something up.

>>> first_calls_of(run, "aten::conv2d")
FirstCalls(op='aten::conv2d', us=251000.0, count=2)
"""

from dataclasses import dataclass

import numpy as np

from amp_core.store.run import Run


@dataclass(frozen=True)
class FirstCalls:
    """The first calls of an operator, where these take nearly all of its time."""

    op: str
    us: float
    """How long they take together, microseconds."""
    count: int

    @property
    def which(self) -> str:
        """`first call`, `first 2 calls`."""
        return "first call" if self.count == 1 else f"first {self.count} calls"


def all_first_calls(run: Run) -> list[FirstCalls]:
    """The first calls that take nearly all of their operators' time and much of the trace, the longest first."""
    config = run.head.config.get("first_calls")
    found = []
    for op, value in config.items() if isinstance(config, dict) else ():
        us, count = value if isinstance(value, list | tuple) and len(value) == 2 else (value, 1)  # of older versions
        if isinstance(us, int | float) and isinstance(count, int):
            found.append(FirstCalls(str(op), float(us), count))
    return sorted(found, key=lambda calls: -calls.us)


def first_calls_of(run: Run, op: str, op_us: float = np.inf) -> FirstCalls | None:
    """The first calls of an operator, if they are most of `op_us` of its time; else None."""
    calls = next((calls for calls in all_first_calls(run) if calls.op == op), None)
    return calls if calls is not None and MOST_OF_FIRST_FRAC * calls.us <= op_us else None


MOST_OF_FIRST_FRAC = 0.5
"""Of a first call with nine tenths of an operator's time: a part of that time which is this long is mostly in it."""
