"""Jobs of other users in a shared runs folder: listed and left alone."""

import dataclasses
from pathlib import Path

import psutil
import pytest

from amp_core import RunError
from amp_core.hardware.host import this_machine
from amp_core.jobs import find, job_file, listing
from tests.file_modes import restricted
from tests.jobs.job_states import CPU


def own_process() -> dict[str, object]:
    return {"machine": this_machine(), "pid": psutil.Process().pid, "started_s": psutil.Process().create_time()}


@pytest.fixture
def job(runs: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a job whose process another user owns. The process is this one, so no signal is ever sent."""

    def denied(self: psutil.Process) -> None:
        raise psutil.AccessDenied(self.pid)

    monkeypatch.setattr(psutil.Process, "terminate", denied)
    monkeypatch.setattr(psutil.Process, "kill", denied)
    (runs / "theirs").mkdir(parents=True)
    job_file.write(runs / "theirs", job_file.Record(("x",), "cpu", 1, CPU.to_dict(), process=own_process()))
    yield runs / "theirs"
    job_file.write(runs / "theirs", dataclasses.replace(job_file.read(runs / "theirs"), process=None, ended_s=1.0))


def test_a_stop_is_refused_and_not_recorded(job: Path) -> None:
    before = job_file.read(job)
    with pytest.raises(RunError, match="belongs to another user"):
        find(job).request_stop()
    assert job_file.read(job) == before and find(job).alive


def test_a_job_that_must_be_killed_by_its_owner_is_still_listed(job: Path, runs: Path) -> None:
    record = dataclasses.replace(job_file.read(job), stop_requested_s=1.0, stop_grace_s=0.0)
    job_file.write(job, record)
    assert [(j.name, j.alive) for j in listing(runs)] == [("theirs", True)]


@pytest.mark.parametrize("mode", [0o555, 0o000])
def test_a_job_in_a_folder_that_may_not_be_written_changes_nothing(runs: Path, mode: int) -> None:
    for name in ("mine", "theirs"):
        (runs / name).mkdir(parents=True)
        gone = own_process() | {"pid": 2**22 - 1}
        job_file.write(runs / name, job_file.Record(("x",), "cpu", 1, CPU.to_dict(), process=gone))
    before = (runs / "theirs" / "job.json").read_bytes()
    with restricted():
        (runs / "theirs").chmod(mode)
        try:
            names = {j.name for j in listing(runs)}
        finally:
            (runs / "theirs").chmod(0o755)
    assert names == ({"mine", "theirs"} if mode else {"mine"})
    assert (runs / "theirs" / "job.json").read_bytes() == before and not (runs / "theirs" / "run.json").exists()
    assert job_file.read(runs / "mine").ended_s is not None
    listing(runs)


def test_an_end_that_cannot_be_recorded_leaves_the_listing_alive(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (runs / "job").mkdir(parents=True)
    gone = own_process() | {"pid": 2**22 - 1}
    job_file.write(runs / "job", job_file.Record(("x",), "cpu", 1, CPU.to_dict(), process=gone))

    def full(folder: Path, record: job_file.Record) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(job_file, "write", full)
        assert [j.state for j in listing(runs)] == ["failed"]
    assert job_file.read(runs / "job").ended_s is None
    assert [j.state for j in listing(runs)] == ["failed"] and job_file.read(runs / "job").ended_s is not None
