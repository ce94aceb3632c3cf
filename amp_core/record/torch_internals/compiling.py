"""Code of ours within what `torch.compile` compiles: a wrapped method, or a hook on an optimizer.

    @untraced
    def before_step(self, optimizer): ...

dynamo would trace such code with the loop's own, and take its clocks, locks and modes for part of the program. Hooks on
modules do nothing where a graph is made, so that it stays as it would have been. Optimizers and scalers break their
graphs by themselves; there our code runs between two graphs, and is left alone by dynamo. A function of torch's that
calls ours from deep within, as clipping does, runs as Python while it is listened to.
"""

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch._C._dynamo import eval_frame
from torch._C._dynamo.eval_frame import set_eval_frame
from torch._compile import _disable_dynamo
from torch.utils._python_dispatch import TorchDispatchMode

_here = threading.local()
Function = TypeVar("Function", bound=Callable[..., Any])


def not_by_itself(function: Function) -> Function:
    """dynamo does not compile calls of `function` that it meets outside of a graph; what `function` calls it does."""
    code: Any = function.__code__
    if hasattr(eval_frame, "skip_code"):  # in older versions of torch
        eval_frame.skip_code(code)
    else:
        action = eval_frame._FrameAction
        eval_frame.set_code_exec_strategy(code, eval_frame._FrameExecStrategy(action.SKIP, action.DEFAULT))
    return function


def untraced(look: Callable[..., Any]) -> Callable[..., Any]:
    """`look`, not traced: a graph is broken for it, or where none may be (`fullgraph=True`), it is left out.

    Returns what `look` does, or None.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        outer = within_compiled()
        _here.compiled = True
        try:
            return look(*args, **kwargs)
        finally:
            _here.compiled = outer

    apart = _disable_dynamo(run)  # unlike `torch.compiler.disable` it does not import all of dynamo

    @not_by_itself
    @functools.wraps(look)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return None if _in_one_graph() else apart(*args, **kwargs)
        # What dynamo gave up on runs as Python, but what that calls would be compiled again.
        compiler = set_eval_frame(None)
        if compiler is None:
            return look(*args, **kwargs)
        try:
            return run(*args, **kwargs)
        finally:
            set_eval_frame(compiler)

    return call


def within_compiled() -> bool:
    """Asked by what is `untraced`: whether the loop came to it from within what `torch.compile` runs.

    What is put on or taken off torch's dispatcher there does not last: compiled code puts back what it found.
    """
    return getattr(_here, "compiled", False)


def _in_one_graph() -> bool:
    """Whether the graph that is being made may not be broken. dynamo calls this and takes its answer for a constant."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        making = InstructionTranslator.current_tx()
    except AttributeError:  # no dynamo is at work: `torch.export` without it
        return True
    return bool(making.one_graph or getattr(making, "error_on_graph_break", False))


_in_one_graph._dynamo_marked_constant = True  # type: ignore[attr-defined]  # `torch.compiler.assume_constant_result`


def mode_would_uncompile() -> bool:
    """Whether a `TorchDispatchMode` would have what the program compiled, a loss for one, run uncompiled from then on.

    Under a mode that says it ignores what is compiled that goes on as before. Older versions of torch do not ask.
    """
    if hasattr(TorchDispatchMode, "ignore_compile_internals"):
        return False
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    return compiler is not None and any(callable(backend) for backend in compiler.cached_backends.values())
