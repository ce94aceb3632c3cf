"""What tests of runs begin with."""

import json
from pathlib import Path

import pytest

from amp_core import Run, load_run
from tests.synthetic import SAMPLES, write_all
from tests.written import HEAD


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
