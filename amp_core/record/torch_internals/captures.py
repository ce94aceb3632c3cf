"""CUDA graphs: while one is captured nothing may be looked at, for a single query of an event would end the capture.

    >>> capturing()
    False

Python runs while a graph is captured and not while it is replayed. So what a graph does is not seen: where only forward
and backward are captured (`torch.cuda.make_graphed_callables`, `torch.compile(mode="reduce-overhead")`), steps are
found by the optimizer and gradients are measured before it; a graph of whole steps leaves nothing to find.
"""

import torch
from torch._C._functorch import peek_interpreter_stack

UNSEEN = "what a CUDA graph replays; a step is seen where its optimizer is outside of the graph"


def capturing() -> bool:
    """Whether what this thread launches goes into a CUDA graph just now."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def transformed() -> bool:
    """Whether `torch.func` is at work (`vmap`, `grad`, …): what comes through the model's hooks then has no values."""
    return peek_interpreter_stack() is not None


def out_of_sight() -> bool:
    """Whether tensors cannot be looked at just now, for either reason."""
    return peek_interpreter_stack() is not None or capturing()
