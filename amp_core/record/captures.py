"""CUDA graphs: while one is captured nothing may be looked at, for a single query of an event would end the capture.

    >>> capturing()
    False

Python runs while a graph is captured and not while it is replayed. So what a graph does is not seen: where only forward
and backward are captured (`torch.cuda.make_graphed_callables`, `torch.compile(mode="reduce-overhead")`), steps are
found by the optimizer and gradients are measured before it; a graph of whole steps leaves nothing to find.
"""

from collections.abc import Callable
from typing import Any

import torch

UNSEEN = "what a CUDA graph replays; a step is seen where its optimizer is outside of the graph"


def capturing() -> bool:
    """Whether what this thread launches goes into a CUDA graph just now."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def unless_capturing(
    hook: Callable[..., Any], met: Callable[[], None], instead: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """`hook`, but within a capture only `met` is called, and `instead` where there is one."""

    def look(*args: Any, **kwargs: Any) -> Any:
        if not capturing():
            return hook(*args, **kwargs)
        met()
        return instead(*args, **kwargs) if instead is not None else None

    return look
