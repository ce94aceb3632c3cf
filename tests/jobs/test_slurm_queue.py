"""What squeue and sacct print of arrays, without a Slurm."""

import dataclasses
import os
from pathlib import Path

import pytest

from amp_core import RunError, load_run
from amp_core.jobs import backends, find, job_file, listing, submit_array_in
from amp_core.jobs.backends import polled, scheduler
from amp_core.jobs.backends.slurm import Slurm
from amp_core.jobs.backends.slurm_queue import with_positions
from amp_core.settings.resources import Resources
from tests.jobs.fake_slurm import FakeSlurm
from tests.jobs.job_states import CPU


def test_tasks_are_told_apart_by_their_index_and_have_places_of_their_own() -> None:
    jobs = with_positions(
        [
            "12_10|PENDING|100|gpu||Priority|cmp.5f0c2a1b",
            "12_2|PENDING|100|gpu||Priority|cmp.5f0c2a1b",
            "13|PENDING|100|gpu||Priority|single.00c0ffee",
            "9_0|PENDING|900|gpu||Resources|another",
            "12_1|RUNNING|100|gpu|n7|None|cmp.5f0c2a1b",
        ]
    )
    places = {job.token: (job.id, job.phase, job.position, job.node) for job in jobs.values()}
    assert places == {
        "another_0": ("9_0", "waiting", 0, ""),
        "5f0c2a1b_1": ("12_1", "running", None, "n7"),
        "5f0c2a1b_2": ("12_2", "waiting", 1, ""),
        "5f0c2a1b_10": ("12_10", "waiting", 2, ""),
        "00c0ffee": ("13", "waiting", 3, ""),
    }


@pytest.fixture
def four(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """Four jobs in a fake Slurm that is asked anew each time."""
    monkeypatch.setattr(polled, "FRESH_S", 0.0)
    monkeypatch.setattr(polled, "STALE_S", 0.0)
    monkeypatch.setattr(scheduler, "FILES_S", 0.0)
    fake = FakeSlurm(tmp_path, monkeypatch, 4)
    monkeypatch.setitem(backends.BACKENDS, "slurm", Slurm())
    return fake


def test_each_task_of_an_unconfirmed_array_is_found_in_its_own_state(four: FakeSlurm) -> None:
    four.become_array(
        "RUNNING|9|gpu|n1|None", "PENDING|9|gpu||Priority", "CANCELLED|9|gpu||None", "TIMEOUT|9|gpu|n2|TimeLimit"
    )
    (four.runs / "job-0000" / "job.log").write_text("start 7_0 0 n1 1790000000\n")
    (four.runs / "job-0003" / "job.log").write_text("start 7_3 0 n2 1790000000\nend 7_3 0 143 1790003600\n")
    jobs = {job.name: job for job in listing(four.runs)}
    assert [jobs[name].backend_id for name in sorted(jobs)] == ["7_0", "7_1", "7_2", "7_3"]
    assert [jobs[name].state for name in sorted(jobs)] == ["starting", "queued", "stopped", "stopped"]
    assert (jobs["job-0000"].node, jobs["job-0001"].queue_position) == ("n1", 0)
    causes = [load_run(four.runs / name).head.job["cause"] for name in ("job-0002", "job-0003")]
    assert causes == ["cancelled", "time limit"]


def test_a_waiting_task_that_squeue_drops_was_cancelled_only_if_its_array_is_known(four: FakeSlurm) -> None:
    four.become_array("PENDING|9|gpu||Priority", "PENDING|9|gpu||Priority")  # the others are missing
    (four.runs / "job-0003" / "job.log").write_text("start 7_3 0 n2 1790000000\n")  # it ran, and may have any end
    assert [find(four.runs / f"job-{i:04d}").state for i in range(4)] == ["queued", "queued", "stopped", "starting"]
    assert load_run(four.runs / "job-0002").head.job["cause"] == "cancelled"
    four.become_array()  # nothing is listed: the answer may be older than the array
    record = dataclasses.replace(job_file.read(four.runs / "job-0001"), ended_s=None)
    job_file.write(four.runs / "job-0001", record)
    assert find(four.runs / "job-0001").state == "queued"


@pytest.mark.parametrize(("index", "state", "node"), [(0, "TIMEOUT", "n3"), (1, "PREEMPTED", "n4"), (10, None, "")])
def test_the_accounting_is_asked_for_the_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index: int, state: str | None, node: str
) -> None:
    rows = "7_0|TIMEOUT|0:0|n3|runs.5f0c2a1b\n7_1|PREEMPTED|0:15|n4|runs.5f0c2a1b\n7_10|TIMEOUT|0:0|n5|other.00c0ffee\n"
    (tmp_path / "rows").write_text(rows)
    (tmp_path / "sacct").write_text(f"#!/bin/sh\necho \"$@\" > '{tmp_path}/asked'\ncat '{tmp_path}/rows'\n")
    (tmp_path / "sacct").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    record = job_file.Record((), "slurm", 0, backend_id=f"7_{index}", token=f"5f0c2a1b_{index}")
    job = Slurm().forgotten(tmp_path, record)
    assert (job and job.state, job.node if job else "") == (state, node)
    assert f"-j 7_{index} " in (tmp_path / "asked").read_text()


def test_a_task_is_cancelled_by_its_own_id_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scancel").write_text(f"#!/bin/sh\necho \"$@\" >> '{tmp_path}/cancelled'\n")
    (tmp_path / "scancel").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    Slurm().cancel("7_10")
    for wrong in ("7_", "7_[0-3]", "7_0 8", "--user=root", "7_0_1"):
        with pytest.raises(RunError, match="is not an id of Slurm"):
            Slurm().cancel(wrong)
    assert (tmp_path / "cancelled").read_text() == "7_10\n"


@pytest.mark.parametrize("on", ["local", "ray"])
def test_an_array_applies_to_slurm_alone_and_leaves_nothing(tmp_path: Path, on: str) -> None:
    with pytest.raises(RunError, match=f"array=True applies to on='slurm', not to on='{on}'; leave it out"):
        submit_array_in(tmp_path / "cmp", {"fp32": CPU}, resources=Resources(on=on))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("there", ["fp32", "job.json", "array.json"])
def test_an_array_takes_a_folder_without_other_runs(tmp_path: Path, there: str) -> None:
    (tmp_path / "cmp" / there).mkdir(parents=True)
    with pytest.raises(RunError, match=r"out='.*cmp' holds .* already; give a folder that does not exist yet"):
        submit_array_in(tmp_path / "cmp", {"fp32": CPU}, resources=Resources(on="slurm"))
    assert [path.name for path in (tmp_path / "cmp").iterdir()] == [there]


def test_a_folder_that_another_command_made_meanwhile_is_left_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = Path.mkdir

    def mkdir(folder: Path, *arguments: object, **more: bool) -> None:
        if folder.name == "bf16":
            os.mkdir(folder)  # noqa: PTH102
            (folder / "run.json").touch()
        make(folder, *arguments, **more)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    with pytest.raises(RunError, match=r"out='.*cmp' cannot hold an array: File exists"):
        submit_array_in(tmp_path / "cmp", {"fp32": CPU, "bf16": CPU}, resources=Resources(on="slurm"))
    assert [str(path.relative_to(tmp_path / "cmp")) for path in sorted((tmp_path / "cmp").rglob("*"))] == [
        "bf16",
        "bf16/run.json",
    ]


@pytest.mark.parametrize("names", ['["../secret"]', '[".."]', '{"fp32": 1}', "[1]", "no JSON", '["a/b"]'])
def test_an_array_file_leads_nowhere_else(tmp_path: Path, names: str) -> None:
    record = job_file.Record(("x",), "slurm", 1, backend="slurm")
    for folder in (tmp_path / "secret", tmp_path / "runs" / "cmp" / "a" / "b", tmp_path / "runs" / "cmp" / "fp32"):
        folder.mkdir(parents=True)
        job_file.write(folder, record)
    (tmp_path / "runs" / "cmp" / "array.json").write_text(names)
    assert list(job_file.every(tmp_path / "runs")) == []
    job_file.write_array(tmp_path / "runs" / "cmp", ["fp32", "gone"])
    assert [folder.name for folder, _ in job_file.every(tmp_path / "runs")] == ["fp32"]
