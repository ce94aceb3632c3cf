"""CUDA graphs: during a capture nothing may be measured, since a single event query would abort the capture.

    >>> capturing()
    False

Python runs while a graph is captured, not while it is replayed. So hooks do not see what a graph does: if only forward
and backward are captured (`torch.cuda.make_graphed_callables`, `torch.compile(mode="reduce-overhead")`), steps are
detected at the optimizer and gradients are measured before it; of a graph of whole steps nothing is recorded.
"""

from collections.abc import Callable

from torch._C._functorch import peek_interpreter_stack

from amp_core.record.backends import BACKENDS
from amp_core.record.backends.base import Backend

UNSEEN = "what a CUDA graph replays; a step is recorded if its optimizer runs outside of the graph"


_CAPTURING = [b.capturing for b in BACKENDS.values() if b.capturing is not Backend.capturing]


def _any_captures() -> bool:
    return any(asks() for asks in _CAPTURING)


capturing: Callable[[], bool] = _CAPTURING[0] if len(_CAPTURING) == 1 else _any_captures
"""Whether this thread is capturing a graph. Called in every hook, so a single backend's function is used directly."""


def transformed() -> bool:
    """Whether `torch.func` is active (`vmap`, `grad`, …): tensors in the model's hooks then have no values."""
    return peek_interpreter_stack() is not None


def out_of_sight() -> bool:
    """Whether tensors cannot be measured now, for either reason."""
    return peek_interpreter_stack() is not None or capturing()
