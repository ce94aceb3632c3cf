"""Every synthetic run, written once for all tests here."""

import pytest

from amp_core import Run, load_run
from tests.synthetic import write_all


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    return {name: load_run(path) for name, path in write_all(tmp_path_factory.mktemp("runs")).items()}
