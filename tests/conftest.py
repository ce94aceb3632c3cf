"""Shared setup: one thread per process, the selection of cases, and the runs that many tests read."""

import gc
import os
import signal
import sys

# Set before the imports of torch, numpy and Arrow, which read it; processes that tests start inherit it. The models are
# tiny: several threads would only wait for each other and for the other workers of pytest-xdist. Tests about threads
# set the number themselves.
for _library in ("OMP", "MKL", "OPENBLAS"):
    os.environ[f"{_library}_NUM_THREADS"] = "1"

# Tests start hundreds of Python processes: without cached bytecode each would compile the package again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# These options, of `.ci/run` for one, are for this session, not for a pytest that a test starts.
os.environ.pop("PYTEST_ADDOPTS", None)

# A shell starts what runs in its background with SIGINT ignored, and `nohup` ignores SIGHUP; child processes inherit
# that. Tests send both to them. A handler is not inherited: theirs is the default, and a hangup ends no tests here.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda number, frame: None)

import contextlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from amp_core import Run, load_run
from tests.processor_time import ProcessorTime
from tests.run_folders import HEAD
from tests.synthetic import SAMPLES, write_all

if TYPE_CHECKING:
    from tests.findings.zoo import Case


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--whole", action="store_true", help="also run cases marked `whole`")
    parser.addoption("--cpu", action="store_true", help="print the processor time of each folder and file")


COLLECTED_AFTER = (20_000, 20, 20)
"""Garbage is collected more rarely than by default, 700 new objects: an eighth of the processor time went there."""

_WHOLE = "AMPSCOPE_TEST_WHOLE"
"""Tells the processes over which tests are spread of `--whole`: pytest-xdist does not, where PYTEST_ADDOPTS has it."""


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # until the first test: what a collection of tests creates stays
    gc.set_threshold(*COLLECTED_AFTER)
    if config.getoption("--whole"):
        os.environ[_WHOLE] = "1"
    if config.getoption("--cpu"):
        config.pluginmanager.register(ProcessorTime())


# Where files are spread over processes, long ones come first, in this order: one of them at the end would keep one
# process busy while the others wait. Tests of browsers and schedulers mostly wait, beside one that computes.
LONG = (
    "tests/robustness/test_hostile",
    "tests/browser/",
    "tests/fake_cuda/",
    "tests/pages/test_one_diagnosis",
    "tests/findings/test_other_forms",
    "tests/tune/test_simulated",
    "tests/record/stats/test_measure_compiled",
    "tests/jobs/test_slurm",
    "tests/train/",
    "tests/serve/",
    "tests/distributed/",
    "tests/tune/",
    "tests/gpu/",
    "tests/views/",
)


def _place(item: pytest.Item) -> int:
    return next((place for place, start in enumerate(LONG) if item.nodeid.startswith(start)), len(LONG))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put long files first, and deselect cases marked `whole`, unless `--whole` is given."""
    items.sort(key=_place)
    if config.getoption("--whole") or _WHOLE in os.environ:
        return
    left_out = [item for item in items if item.get_closest_marker("whole")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("whole")]


@pytest.fixture(autouse=True, scope="module")
def _small_heap() -> None:
    """Exclude modules, collected items and objects of other test files from garbage collection.

    They are 800,000 objects and more, which took half a second of each collection. Many tests collect, and so does the
    app after each pass.
    """
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_sessionfinish() -> None:
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _torch_is_restored() -> Iterator[None]:
    """No test leaves torch patched: every recorder is closed, and restores all patched functions."""
    before = patched_in_torch()
    yield
    assert patched_in_torch() in (before, []), "torch stays patched: close every recorder, even if a loop raises"


def patched_in_torch() -> list[str]:
    """The functions of torch that AMPscope patches now, and its hooks; empty while nothing is recorded."""
    if "amp_core.record.torch_internals" not in sys.modules:
        return []
    import torch
    from torch.nn.utils import clip_grad
    from torch.optim import lr_scheduler, optimizer
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    functions = [
        (torch.autograd, "backward"),
        (torch.autograd, "grad"),
        (lr_scheduler.LRScheduler, "step"),
        (lr_scheduler.ReduceLROnPlateau, "step"),
        (torch.optim.Optimizer, "zero_grad"),
        *((torch.amp.GradScaler, name) for name in ("scale", "unscale_", "step", "update", "get_scale")),
        (clip_grad, "_clip_grads_with_norm_"),
        (clip_grad, "_group_tensors_by_device_and_dtype"),
    ]
    from amp_core.record.torch_internals.module_calls import _patched

    states = {
        "calls of modules": bool(_patched) or vars(torch.nn.Module)["_compiled_call_impl"] is not None,
        "optimizer steps": bool(optimizer._global_optimizer_pre_hooks or optimizer._global_optimizer_post_hooks),
        "operators": bool(_get_current_dispatch_mode_stack()),
    }
    patched = [f"{owner.__name__}.{name}" for owner, name in functions if _is_ours(vars(owner)[name])]
    return patched + [name for name, is_hooked in states.items() if is_hooked]


def _is_ours(function: object) -> bool:
    """Whether amp_core defines this function, or one that it wraps."""
    while function is not None:
        if function.__globals__["__name__"].startswith("amp_core."):
            return True
        function = getattr(function, "__wrapped__", None)
    return False


@pytest.fixture
def several_threads() -> Iterator[None]:
    """torch computes with three threads, as it does by default on a machine with three cores."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Every synthetic run, written once for all tests, and the sample runs, by name."""
    paths = write_all(tmp_path_factory.mktemp("runs")) | {f"sample {name}": path for name, path in SAMPLES.items()}
    return {name: load_run(path) for name, path in paths.items()}


@pytest.fixture(scope="session")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Callable[["Case", Path], None]:
    """Writes the run of a fault of the zoo into a folder. It is made once for all tests and processes, and copied."""
    root = tmp_path_factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root

    def write(case: "Case", into: Path) -> None:
        kept = root / "planted" / case.name
        if not kept.exists():
            made = Path(tempfile.mkdtemp(dir=root))
            case.write(made / case.name, True)
            kept.parent.mkdir(exist_ok=True)
            with contextlib.suppress(OSError):  # another process was faster
                (made / case.name).rename(kept)
        shutil.copytree(kept, into, symlinks=True)

    return write


@pytest.fixture
def foreign_run(tmp_path: Path) -> Path:
    """The folder of a run that another program wrote, with only its head."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps(HEAD))
    return folder
