"""What tests of the run folder begin with."""

import json
from pathlib import Path

import pytest

from tests.written import HEAD


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """The head of a run that another program writes."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps(HEAD))
    return folder
