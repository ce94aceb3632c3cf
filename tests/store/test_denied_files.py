"""Files of a run that this user may not read: one sentence, whatever is denied."""

import shutil
from pathlib import Path

import pytest

from amp_core import RunError, diagnose, load_run
from amp_core.store.packing import pack, unpack
from tests.file_modes import restricted
from tests.synthetic import SAMPLES


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return shutil.copytree(SAMPLES["fp32"], tmp_path / "run")


@pytest.mark.parametrize("denied", [".", "run.json", "steps", "steps/00000.parquet", "tensors/00000.parquet"])
def test_what_may_not_be_read_is_denied_and_not_damaged(run: Path, denied: str) -> None:
    place = run / denied
    mode = place.stat().st_mode
    with restricted(), pytest.raises(RunError, match="cannot be read: Permission denied"):
        place.chmod(0)
        try:
            diagnose(load_run(run))
        finally:
            place.chmod(mode)
    assert load_run(run).status == "finished"


def test_a_console_log_that_may_not_be_read_says_so_in_its_place(run: Path) -> None:
    (run / "console.log").write_text("step 1\n")
    (run / "console.log").chmod(0)
    with restricted():
        opened = load_run(run)
        assert opened.console() == ["console.log cannot be read: Permission denied"]
        diagnose(opened)


def test_a_packed_run_that_may_not_be_read_is_denied(run: Path, tmp_path: Path) -> None:
    packed = pack(run)
    packed.chmod(0)
    with restricted():
        for read in (load_run, lambda file: unpack(file, tmp_path / "out")):
            with pytest.raises(RunError, match="cannot be read: Permission denied"):
                read(packed)
    assert not (tmp_path / "out").exists()
