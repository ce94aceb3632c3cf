"""CUDA graphs: while one is captured nothing may be looked at, for a single query of an event would end the capture.

    >>> capturing()
    False

Python runs while a graph is captured and not while it is replayed. So what a graph does is not seen: where only forward
and backward are captured (`torch.cuda.make_graphed_callables`, `torch.compile(mode="reduce-overhead")`), steps are
found by the optimizer and gradients are measured before it; a graph of whole steps leaves nothing to find.
"""

from collections.abc import Callable

from torch._C._functorch import peek_interpreter_stack

from amp_core.record.backends import BACKENDS
from amp_core.record.backends.base import Backend

UNSEEN = "what a CUDA graph replays; a step is seen where its optimizer is outside of the graph"


_CAPTURING = [b.capturing for b in BACKENDS.values() if b.capturing is not Backend.capturing]


def _any_captures() -> bool:
    return any(asks() for asks in _CAPTURING)


capturing: Callable[[], bool] = _CAPTURING[0] if len(_CAPTURING) == 1 else _any_captures
"""Whether what this thread launches goes into a graph just now. Asked at every hook: one backend answers directly."""


def transformed() -> bool:
    """Whether `torch.func` is at work (`vmap`, `grad`, …): what comes through the model's hooks then has no values."""
    return peek_interpreter_stack() is not None


def out_of_sight() -> bool:
    """Whether tensors cannot be looked at just now, for either reason."""
    return peek_interpreter_stack() is not None or capturing()
