"""What all tests begin with: one thread per process, which cases run when, and the runs that many tests read."""

import os
import signal

# Set before torch, numpy and Arrow are imported, which read it then; processes that tests start inherit it. The models
# are tiny: several threads would only wait for each other, and for the other workers of pytest-xdist. Tests about
# threads set the number themselves.
for _library in ("OMP", "MKL", "OPENBLAS"):
    os.environ[f"{_library}_NUM_THREADS"] = "1"

# A shell starts what runs in its background with SIGINT ignored, and child processes inherit that. Tests send it to
# them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from amp_core import Run, load_run
from tests.synthetic import SAMPLES, write_all
from tests.written import HEAD


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--whole", action="store_true", help="run what is marked `whole` too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is marked `whole`, unless it is asked for."""
    if config.getoption("--whole"):
        return
    left_out = [item for item in items if item.get_closest_marker("whole")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("whole")]


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
    """Every synthetic run, written once for all tests, and the recorded samples under the names they have there."""
    paths = write_all(tmp_path_factory.mktemp("runs")) | {f"sample {name}": path for name, path in SAMPLES.items()}
    return {name: load_run(path) for name, path in paths.items()}


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """The head of a run that another program writes."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps(HEAD))
    return folder
