"""Every synthetic run, written once for all tests here, and the recorded samples under the names they have there."""

import pytest

from amp_core import Run, load_run
from tests.synthetic import SAMPLES, write_all


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    paths = write_all(tmp_path_factory.mktemp("runs")) | {f"sample {name}": path for name, path in SAMPLES.items()}
    return {name: load_run(path) for name, path in paths.items()}
