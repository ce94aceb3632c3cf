"""A user's workload, named `FILE.py:FUNCTION`.

    # mymodel.py
    def workload():
        return model, loader, loss_fn          # loss_fn(model, batch) returns a scalar loss

The function takes no argument and returns that triple, or a `Workload` with held-out batches or an accuracy function.
torch's random numbers are seeded before it is called, so weights and shuffling depend on the run's seed.

The file is executed as the user's own program. It never comes from a run folder.
"""

import importlib.util
import sys
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType

import torch

from amp_core.schema import RunError
from amp_core.train.workloads import Workload


def load(file: Path, function: str) -> Workload:
    """Call `function` of `file`. Raises `RunError` if there is no such function, or it returns anything else."""
    named = f"workload={f'{file}:{function}'!r}"
    try:
        make = getattr(_module(file), function, None)
        if not callable(make):
            raise RunError(f"{named}: {file} has no function {function}; define it, or name an existing one")
        returned = make()
    except RunError:
        raise
    except Exception as error:  # the user's program may raise anything; the message names the line
        raise RunError(f"{named} failed at {_error_line(error, file)}: {type(error).__name__}: {error}") from error
    return _checked(returned, named)


def _module(file: Path) -> ModuleType:
    # under its own name, so that DataLoader workers can import it, unless another module has that name
    again = _executed.get(file.stem) == file.resolve()  # this process executed it before
    name = file.stem if again or file.stem not in sys.modules else f"ampscope_own_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None  # always set for a name that ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    _executed[name] = file.resolve()
    sys.path.insert(0, str(file.resolve().parent))  # as `python FILE.py` would have it
    spec.loader.exec_module(module)
    return module


_executed: dict[str, Path] = {}


def _error_line(error: Exception, file: Path) -> str:
    if isinstance(error, SyntaxError):
        return f"line {error.lineno}"
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if Path(f.filename) == file.resolve()]
    return f"line {lines[-1]}" if lines else "import"


def _checked(returned: object, named: str) -> Workload:
    right = "return (model, batches, loss_fn) or an amp_core.train.Workload"
    if isinstance(returned, tuple) and len(returned) == 3:
        model, batches, loss_fn = returned
        workload = Workload(model, batches, loss_fn, data={"name": named.removeprefix("workload=").strip("'")})
    elif isinstance(returned, Workload):
        workload = returned
    else:
        raise RunError(f"{named} returned {_kind(returned)}; {right}")
    if not isinstance(workload.model, torch.nn.Module):
        raise RunError(f"{named} returned {_kind(workload.model)} as model; {right} with a torch.nn.Module")
    # `iter` would start the workers of a DataLoader.
    if not isinstance(workload.batches, Iterable) or isinstance(workload.batches, Iterator):
        raise RunError(
            f"{named} returned {_kind(workload.batches)} as batches; give a list or a DataLoader, which can be "
            "iterated more than once"
        )
    if not callable(workload.loss_fn):
        raise RunError(f"{named} returned {_kind(workload.loss_fn)} as loss_fn; give a function loss_fn(model, batch)")
    return workload


def _kind(value: object) -> str:
    kind = f"{type(value).__name__}"
    return f"a tuple of {len(value)}" if isinstance(value, tuple) else f"a value of type {kind}"
