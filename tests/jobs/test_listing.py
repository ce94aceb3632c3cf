"""Jobs that another program lists, and processes that differ from their records."""

import dataclasses
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from amp_core import RunError, load_run
from amp_core.hardware.child_environment import python_path
from amp_core.jobs import backends, find, job_file, listing, queue, start, under_way
from amp_core.jobs.backends import local
from amp_core.jobs.backends.slurm import Slurm
from tests.jobs.fake_slurm import FakeSlurm
from tests.jobs.job_states import CPU, has_ended, steps_recorded, wait_for_state
from tests.waiting import DEADLINE_S, wait_for

HERE = os.environ | python_path()
"""The environment of a program of its own that finds this amp_core."""


def test_a_job_is_the_same_for_every_path_to_its_folder(
    runs: Path, stand_in: Callable[[str], list[str]], tmp_path: Path
) -> None:
    job = start(CPU, runs, command=stand_in("aborts"))
    (tmp_path / "link").symlink_to(runs)
    wait_for(lambda: has_ended(job.pid))
    result = find(tmp_path / "link" / ".." / "runs" / job.name)  # the child is known under this path too
    assert result.folder == job.folder and result.reason is not None and "exit code 7" in result.reason


def test_another_program_lists_the_same_jobs(runs: Path, stand_in: Callable[[str], list[str]]) -> None:
    running = start(CPU, runs, command=stand_in("with-child"))
    wait_for_state(running.folder, "running")
    waiting = start(CPU, runs, command=stand_in("short"))
    code = (
        "import sys; from amp_core.jobs import listing\n"
        "for j in listing(sys.argv[1]): print(j.name, j.state, j.queue_position)\n"
        "print(listing(sys.argv[1])[-1].stop().state)"
    )
    line = [sys.executable, "-c", code, str(runs)]
    out = subprocess.run(line, env=HERE, capture_output=True, text=True, check=True, timeout=DEADLINE_S).stdout
    assert out.split("\n")[:3] == [f"{waiting.name} queued 1", f"{running.name} running None", "stopped"]
    wait_for_state(waiting.folder, "finished")


def test_a_job_outlives_the_program_that_started_it(runs: Path, stand_in: Callable[[str], list[str]]) -> None:
    begin = (
        "import json, sys; from amp_core.jobs import start; from amp_core.settings.training import TrainConfig\n"
        "start(TrainConfig(workload='digits-cnn', device='cpu'), sys.argv[1], command=json.loads(sys.argv[2]))"
    )
    for mode in ("endless", "dies"):
        line = [sys.executable, "-c", begin, str(runs), json.dumps(stand_in(mode))]
        subprocess.run(line, env=HERE, check=True, timeout=DEADLINE_S)
    dies, endless = listing(runs)
    wait_for_state(endless.folder, "running")
    assert find(dies.folder).state == "queued"
    assert endless.stop().state == "stopped"
    job = wait_for_state(dies.folder, "lost", "failed")
    assert job.state == "lost" and job.reason is not None and "step 2" in job.reason  # no parent observed its end
    assert steps_recorded(job.folder) == 3


def test_a_zombie_is_not_alive(runs: Path, stand_in: Callable[[str], list[str]]) -> None:
    job = start(CPU, runs, command=stand_in("short"))
    child = local._children.pop(job.folder)  # as after a restart of the app: no parent waits for it
    wait_for_state(job.folder, "finished")
    assert job.pid is not None
    wait_for(lambda: psutil.Process(job.pid).status() == psutil.STATUS_ZOMBIE)
    os.kill(job.pid, 0)  # the system still lists the process
    assert job_file.is_alive(job_file.read(job.folder)) is False
    child.wait(DEADLINE_S)


def test_a_reused_pid_is_neither_trusted_nor_signalled(runs: Path, stand_in: Callable[[str], list[str]]) -> None:
    job = start(CPU, runs, command=stand_in("endless"))
    wait_for_state(job.folder, "running")
    innocent = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    try:
        record = job_file.read(job.folder)
        assert record.process is not None
        stale = dict(record.process) | {"pid": innocent.pid, "started_ticks": record.process["started_ticks"] - 360_000}
        copy = runs / "stale"
        copy.mkdir()
        job_file.write(copy, dataclasses.replace(record, process=stale))
        head = dataclasses.replace(load_run(job.folder).head, process=stale)
        (copy / "run.json").write_text(head.to_json())
        assert find(copy).state == "lost"
        assert find(copy).stop(grace_s=0).state == "lost"
        assert innocent.poll() is None
    finally:
        innocent.kill()
        innocent.wait(DEADLINE_S)


def test_setting_the_clock_neither_ends_a_job_nor_holds_up_its_list(
    runs: Path, stand_in: Callable[[str], list[str]]
) -> None:
    job = start(CPU, runs, command=stand_in("endless"))
    wait_for_state(job.folder, "running")
    record = job_file.read(job.folder)
    assert record.process is not None
    moved = dict(record.process) | {"started_s": record.process["started_s"] - 3600}  # start times follow the clock
    job_file.write(job.folder, dataclasses.replace(record, process=moved))
    seen: list[str] = []
    threading.Thread(target=lambda: seen.append(find(job.folder).state), daemon=True).start()
    try:
        wait_for(lambda: seen, timeout_s=30)
    finally:
        local._children[job.folder].kill()
    assert seen == ["running"]
    wait_for(lambda: not find(job.folder).alive)


def test_a_job_of_another_machine_is_left_alone(runs: Path) -> None:
    folder = runs / "far"
    folder.mkdir(parents=True)
    process = {"machine": "elsewhere", "pid": os.getpid(), "started_s": psutil.Process().create_time()}
    record = job_file.Record(argv=("x",), device="cpu", created_ns=time.time_ns(), process=process)
    job_file.write(folder, record)
    assert find(folder).state == "starting"
    with pytest.raises(RunError, match="another machine"):
        find(folder).stop()
    assert not find(folder).stop_requested
    job_file.write(folder, dataclasses.replace(record, created_ns=1))
    assert find(folder).state == "lost"
    assert job_file.ahead_of(runs / "mine", job_file.Record(("x",), "cpu", time.time_ns())) == []


def test_a_job_whose_parent_died_records_itself(runs: Path, stand_in: Callable[[str], list[str]]) -> None:
    folder = runs / "orphan"
    folder.mkdir(parents=True)
    record = job_file.Record((*stand_in("short"), "--config", "-", "--out", str(folder)), "cpu", time.time_ns())
    job_file.write(folder, record)
    assert find(folder).state == "starting"  # it counts as alive for a while without a process in its record
    child = subprocess.Popen([sys.executable, "-m", "amp_core.jobs.launcher", str(folder)], env=HERE)
    assert child.wait(DEADLINE_S) == 0
    assert job_file.read(folder).pid == child.pid
    assert find(folder).state == "finished"
    job_file.write(folder, dataclasses.replace(record, created_ns=time.time_ns() - 11 * 10**9))
    (folder / "run.json").unlink()
    assert find(folder).state == "failed"


@pytest.mark.parametrize(
    "damage",
    [{"process": {"pid": 1}}, {"process": {"pid": -1}}, {"process": {}}, {"created_ns": "now"}, {"device": None}],
)
def test_a_hostile_job_file_is_refused(runs: Path, damage: dict[str, object]) -> None:
    folder = runs / "x"
    folder.mkdir(parents=True)
    (folder / "job.json").write_text(json.dumps({"argv": ["x"], "device": "cpu", "created_ns": 1} | damage))
    with pytest.raises(RunError, match="damaged"):
        find(folder)
    assert listing(runs) == []


def test_jobs_under_way_are_listed_once_for_all_sessions_until_this_process_changes_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeSlurm(tmp_path, monkeypatch, jobs=5)
    monkeypatch.setitem(backends.BACKENDS, "slurm", Slurm())
    monkeypatch.setattr(queue, "SHARED_S", 600.0)
    first = under_way(fake.runs)
    assert [(job.name, job.state, job.queue_position) for job in first] == [
        (f"job-{i:04d}", "queued", i) for i in range(4, -1, -1)
    ]
    assert under_way(fake.runs) is first
    folder = fake.runs / "job-0002"
    job_file.write(folder, dataclasses.replace(job_file.read(folder), stop_requested_s=1.0))
    assert [job.name for job in under_way(fake.runs) if job.stop_requested] == ["job-0002"]
    job_file.write(folder, dataclasses.replace(job_file.read(folder), ended_s=2.0))
    assert [job.name for job in under_way(fake.runs)] == ["job-0004", "job-0003", "job-0001", "job-0000"]
    assert len(listing(fake.runs)) == 5
    assert list(under_way(tmp_path)) == []


def test_a_job_that_is_queued_again_before_the_scheduler_has_listed_it_has_not_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeSlurm(tmp_path, monkeypatch, jobs=1)
    monkeypatch.setitem(backends.BACKENDS, "slurm", Slurm())
    folder, queue_now = fake.runs / "job-0000", (tmp_path / "answer").read_text()
    requeued = dataclasses.replace(job_file.read(folder), created_ns=time.time_ns(), resources={"requeue": True})
    job_file.write(folder, requeued)
    (folder / "job.log").write_text(f"start 1 0 n1 {time.time():.0f}\nend 1 0 130 {time.time():.0f}\n")
    (tmp_path / "answer").write_text("")  # the last answer is older than the job
    assert find(folder).alive
    (tmp_path / "answer").write_text(queue_now)
    monkeypatch.setitem(backends.BACKENDS, "slurm", Slurm())
    assert find(folder).state == "queued"


def test_a_listing_reads_a_job_again_once_another_program_has_replaced_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    reads, read = [], job_file.read
    monkeypatch.setattr(job_file, "read", lambda folder: (reads.append(folder), read(folder))[1])
    for device in ("cpu", "cuda:0"):
        job_file.write(folder, job_file.Record(("x",), device, 1, ended_s=1.0))
        for _ in range(3):
            assert [record.device for _, record in job_file.every(tmp_path)] == [device]
    assert len(reads) == 2
