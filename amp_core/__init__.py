"""AMPscope: is mixed-precision training healthy, what is it losing, what is it buying, and what should change?

Record, in any PyTorch loop:

    from amp_core import watch

    with watch(model, optimizer, scaler=scaler, into="runs/a"):
        ...                                     # the loop is unchanged

Read, anywhere (no torch needed):

    from amp_core import diagnose, load_run

    run = load_run("runs/a")
    print(run.steps.tail())
    for finding in diagnose(run):
        print(finding.severity, finding.code, finding.where, finding.advice)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from amp_core._version import __version__
from amp_core.schema import RunError
from amp_core.store.run import Run, load_run

if TYPE_CHECKING:
    from amp_core.findings import Finding, diagnose
    from amp_core.record import watch

__all__ = ["Finding", "Run", "RunError", "__version__", "diagnose", "load_run", "watch"]

_LAZY = {
    "watch": "amp_core.record",  # imports torch, which the reading half does not need
    "diagnose": "amp_core.findings",  # imports pandas, which the recording half does not need
    "Finding": "amp_core.findings",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'amp_core' has no attribute {name!r}")
