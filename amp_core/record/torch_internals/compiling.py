"""Keep our code out of what `torch.compile` compiles: patched methods and hooks on optimizers.

    @untraced
    def before_step(self, optimizer): ...

dynamo would trace such code with the loop's own, and treat its clocks, locks and modes as part of the program. Hooks on
modules do nothing while a graph is made, so that it is unchanged. Optimizers and scalers break their graphs themselves;
there our code runs between two graphs, and dynamo skips it. A function of torch that calls ours from deep within, as
clipping does, runs as Python while it is patched.
"""

import functools
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch._C._dynamo import eval_frame
from torch._C._dynamo.eval_frame import set_eval_frame
from torch._compile import _disable_dynamo
from torch.utils._python_dispatch import TorchDispatchMode

_here = threading.local()
Function = TypeVar("Function", bound=Callable[..., Any])


def not_compiled(function: Function) -> Function:
    """Let dynamo not compile `function` itself when it is called outside of a graph; functions it calls are
    compiled."""
    code: Any = function.__code__
    if hasattr(eval_frame, "skip_code"):  # in older versions of torch
        eval_frame.skip_code(code)
    else:
        action = eval_frame._FrameAction
        eval_frame.set_code_exec_strategy(code, eval_frame._FrameExecStrategy(action.SKIP, action.DEFAULT))
    return function


def untraced(look: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `look` so that it is not traced: it breaks the graph, or is omitted where that is forbidden
    (`fullgraph=True`).

    Returns the result of `look`, or None.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        outer = within_compiled()
        _here.compiled = True
        try:
            return look(*args, **kwargs)
        finally:
            _here.compiled = outer

    disabled = _disable_dynamo(run)  # unlike `torch.compiler.disable` it does not import all of dynamo

    @not_compiled
    @functools.wraps(look)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return None if _in_one_graph() else disabled(*args, **kwargs)
        # After a graph break, code runs as Python, but dynamo would compile the functions it calls.
        compiler = set_eval_frame(None)
        if compiler is None:
            return look(*args, **kwargs)
        try:
            return run(*args, **kwargs)
        finally:
            set_eval_frame(compiler)

    return call


def within_compiled() -> bool:
    """Whether the loop called the current `untraced` function from within compiled code.

    Changes of dispatch modes do not last there: compiled code restores the modes that it started with.
    """
    return getattr(_here, "compiled", False)


def _in_one_graph() -> bool:
    """Whether the current graph may not be broken. dynamo calls this and treats the result as a constant."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        making = InstructionTranslator.current_tx()
    except AttributeError:  # dynamo is not active: `torch.export` without it
        return True
    return bool(making.one_graph or getattr(making, "error_on_graph_break", False))


_in_one_graph._dynamo_marked_constant = True  # type: ignore[attr-defined]  # `torch.compiler.assume_constant_result`


def mode_would_uncompile() -> bool:
    """Whether a `TorchDispatchMode` would make compiled functions of the program, such as a loss, run uncompiled.

    A mode may declare that it ignores compiled code, which then runs unchanged. Older versions of torch do not check.
    """
    if hasattr(TorchDispatchMode, "ignore_compile_internals"):
        return False
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    return compiler is not None and any(callable(backend) for backend in compiler.cached_backends.values())


def eager() -> AbstractContextManager[Any]:
    """Within it, compiled functions and modules run as the Python they were compiled from, where hooks are called."""
    return torch.compiler.set_stance("force_eager") if has_compiled() else nullcontext()


def has_compiled() -> bool:
    """Whether this process has compiled anything with dynamo."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters.get("stats"))


def emulates_casts() -> bool | None:
    """Whether Inductor, which has compiled something in this process, rounds between operators as eager does; None if
    it has compiled nothing."""
    dynamo, settings = (sys.modules.get(name) for name in ("torch._dynamo.utils", "torch._inductor.config"))
    if dynamo is None or settings is None or not dynamo.counters.get("inductor"):
        return None
    return bool(getattr(settings, "emulate_precision_casts", False))
