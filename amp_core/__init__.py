"""AMPscope: is mixed-precision training healthy, what is it losing, what is it buying, and what should change?

Record, in any PyTorch loop:

    from amp_core import watch

    with watch(model, optimizer, scaler=scaler, into="runs/a"):
        ...                                     # the loop is unchanged

Read, anywhere (no torch needed):

    from amp_core import load_run

    run = load_run("runs/a")
    print(run.steps.tail())
"""

from typing import TYPE_CHECKING, Any

from amp_core._version import __version__
from amp_core.run import Run, load_run
from amp_core.schema import RunError

if TYPE_CHECKING:
    from amp_core.record import watch

__all__ = ["Run", "RunError", "__version__", "load_run", "watch"]


def __getattr__(name: str) -> Any:
    if name == "watch":  # imports torch, which the reading half never pays for
        from amp_core.record import watch

        return watch
    raise AttributeError(f"module 'amp_core' has no attribute {name!r}")
