"""Arrays in a real Slurm cluster: submitted once, each task followed, stopped and ended like a job of its own."""

import dataclasses
import getpass
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from amp_core import RunError, diagnose, load_run
from amp_core.__main__ import main
from amp_core.jobs import Job, backends, find, job_file, listing, start_array, submit_array_in
from amp_core.jobs.backends import scheduler
from amp_core.jobs.backends.job_script import last_attempt
from amp_core.library.permissions import Rules
from amp_core.settings.resources import Resources
from amp_core.settings.training import TrainConfig
from tests.jobs.job_states import CPU, wait_for_end, wait_for_state
from tests.jobs.test_slurm import REPEATED
from tests.slurm_cluster import Cluster
from tests.waiting import wait_for

Tiny = Callable[[float], list[str]]
ON = Resources(on="slurm", time="10")
FOUR = dict.fromkeys(("fp32", "bf16", "fp16", "fp8"), CPU)


def array_id(tasks: Sequence[Job]) -> str:
    """The id of the array, which all tasks must share, in the order of their indices."""
    number = str(tasks[0].backend_id).partition("_")[0]
    assert [job.backend_id for job in tasks] == [f"{number}_{i}" for i in range(len(tasks))]
    return number


def listed(slurm: Cluster, number: str) -> list[str]:
    """What squeue lists of an array, ended tasks included."""
    return sorted(slurm.ask("squeue", "-h", "-r", "-t", "all", "-j", number, "-o", "%i").split())


def hanging_sbatch(folder: Path, before: str = "") -> str:
    """A folder for the path with an sbatch that does `before` and never answers."""
    folder.mkdir()
    (folder / "sbatch").write_text(f"#!/bin/sh\n{before}exec sleep 600\n")
    (folder / "sbatch").chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


@pytest.mark.parametrize("answers", [True, False])
def test_four_tasks_end_for_their_own_reasons_and_none_is_lost_or_doubled(
    slurm: Cluster, runs: Path, tmp_path: Path, tiny: Tiny, monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    """One is cancelled, one stopped by a user of the app, one reaches its time limit, one finishes; also if sbatch
    submitted the array, but its answer got lost."""
    monkeypatch.setattr(scheduler, "FILES_S", 2.0)
    out = runs / f"four-{answers}"
    if answers:
        submit_array_in(out, FOUR, command=tiny(600), resources=ON)
    else:
        with monkeypatch.context() as patch:
            patch.setenv("PATH", hanging_sbatch(tmp_path / "bin", f'{shutil.which("sbatch")} "$@" >/dev/null; '))
            patch.setattr("amp_core.jobs.backends.slurm.SUBMIT_TIMEOUT_S", 2.0)
            with pytest.raises(RunError, match=r"has the array of 4 tasks; .* do not submit again"):
                submit_array_in(out, FOUR, command=tiny(600), resources=ON)
        assert {job_file.read(out / name).backend_id for name in FOUR} == {None}
    tasks = [wait_for_state(out / name, "running") for name in FOUR]
    number = array_id(tasks)
    finished, stopped, cancelled, limited = tasks
    (finished.folder / ".end").touch()
    stopped.request_stop()
    slurm.do("scancel", str(cancelled.backend_id))
    slurm.reach_time_limit(str(limited.backend_id))
    for job in tasks:
        wait_for_end(job.folder)
    assert {job.name: job.state for job in listing(runs)} == {
        "fp32": "finished",
        "bf16": "stopped",
        "fp16": "stopped",
        "fp8": "stopped",
    }
    heads = {job.name: load_run(job.folder).head for job in tasks}
    assert {name: (head.job.get("cause"), head.job.get("id")) for name, head in heads.items()} == {
        "fp32": (None, None),
        "bf16": (None, stopped.backend_id),
        "fp16": ("cancelled", cancelled.backend_id),
        "fp8": ("time limit", limited.backend_id),
    }
    assert [f.code for f in diagnose(load_run(limited.folder)) if f.code == "killed-by-scheduler"]
    attempts = [last_attempt(job.folder) for job in tasks]
    assert [attempt and attempt.id for attempt in attempts] == [job.backend_id for job in tasks]
    assert listed(slurm, number) == [job.backend_id for job in tasks]
    assert len({name for name in slurm.names() if name.startswith(f"{out.name}.")}) == 1


def test_an_array_that_slurm_never_got_ends_as_failed(
    slurm: Cluster, runs: Path, tmp_path: Path, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("PATH", hanging_sbatch(tmp_path / "bin"))
        patch.setattr("amp_core.jobs.backends.slurm.SUBMIT_TIMEOUT_S", 1.0)
        with pytest.raises(RunError, match="do not submit again"):
            start_array([CPU, CPU], runs, "lost", command=tiny(0), resources=ON)
    assert [find(runs / name).state for name in ("lost", "lost-2")] == ["queued", "queued"]
    monkeypatch.setattr(scheduler, "SETTLE_S", 0.0)
    for name in ("lost", "lost-2"):
        assert "did not take the job" in str(wait_for_state(runs / name, "failed").reason)


def one_by_one(tasks: Sequence[Job]) -> list[str]:
    """What scancel takes to cancel these tasks one by one."""
    return [str(job.backend_id) for job in tasks]


def the_array(tasks: Sequence[Job]) -> list[str]:
    """What scancel takes to cancel their array."""
    return [str(tasks[0].backend_id).partition("_")[0]]


def all_of_the_user(_: Sequence[Job]) -> list[str]:
    """What scancel takes to cancel all jobs."""
    return ["--user", getpass.getuser()]


@pytest.mark.parametrize("rest", [one_by_one, the_array, all_of_the_user])
def test_tasks_wait_one_by_one_with_place_and_reason_and_one_can_be_stopped(
    slurm: Cluster,
    runs: Path,
    tiny: Tiny,
    monkeypatch: pytest.MonkeyPatch,
    rest: Callable[[Sequence[Job]], list[str]],
) -> None:
    """Slurm lists a waiting task that is cancelled no longer, neither as ended."""
    monkeypatch.setattr(scheduler, "FILES_S", 1.0)
    tasks = start_array([CPU] * 4, runs, command=tiny(0), resources=dataclasses.replace(ON, partition="down"))
    array_id(tasks)
    wait_for(lambda: find(tasks[2].folder).queue_position == 2)
    assert [find(job.folder).queue_position for job in tasks] == [0, 1, 2, 3]
    assert {find(job.folder).state for job in tasks} == {"queued"}
    assert "PartitionDown" in str(find(tasks[1].folder).reason)
    tasks[1].request_stop()
    assert wait_for_state(tasks[1].folder, "stopped").reason == "stopped on request"
    wait_for(lambda: find(tasks[2].folder).queue_position == 1)
    assert find(tasks[0].folder).queue_position == 0
    slurm.do("scancel", str(tasks[3].backend_id))
    wait_for_end(tasks[3].folder)
    assert find(tasks[0].folder).state == find(tasks[2].folder).state == "queued"
    slurm.do("scancel", *rest([tasks[0], tasks[2]]))
    for job in (tasks[0], tasks[2], tasks[3]):
        wait_for_end(job.folder)
        assert load_run(job.folder).head.job["cause"] == "cancelled"


def test_a_task_above_its_memory_limit_is_killed_alone(
    slurm: Cluster, runs: Path, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "FILES_S", 2.0)
    script = Path(tiny(600)[3])
    held = "import sys\nheld = b'x' * 400_000_000 if sys.argv[-1].endswith('big') else b''\n"
    script.write_text(held + script.read_text())
    monkeypatch.setenv("SBATCH_MEM_PER_NODE", "100")  # MB
    small, big = submit_array_in(runs / "memory", {"small": CPU, "big": CPU}, command=tiny(600), resources=ON)
    wait_for_end(big.folder)
    head = load_run(big.folder).head
    assert (head.status, head.job["cause"], head.job["state"]) == ("failed", "memory", "FAILED")
    assert find(small.folder).state == "running"
    (small.folder / ".end").touch()
    wait_for_state(small.folder, "finished")
    wait_for_end(small.folder)


def test_near_its_time_limit_one_task_saves_queues_itself_again_and_resumes(
    slurm: Cluster, runs: Path, tmp_path: Path
) -> None:
    script = tmp_path / "repeated.py"
    script.write_text(REPEATED)
    requeued = dataclasses.replace(ON, requeue=True)
    first, other = start_array([CPU, CPU], runs, command=[sys.executable, str(script)], resources=requeued)
    for job in (first, other):
        wait_for((job.folder / "run.json").exists)
    slurm.do("scancel", "--batch", "--signal=USR1", str(first.backend_id))  # what Slurm sends before the limit
    wait_for(lambda: find(first.folder).state == "queued")
    slurm.start_now(str(first.backend_id))
    wait_for(lambda: (a := last_attempt(first.folder)) is not None and (a.restarts, a.returncode) == (1, 0))
    assert [line for line in first.console(50) if line in ("new", "resumed")] == ["new", "resumed"]
    wait_for_end(first.folder)
    attempt = last_attempt(other.folder)
    assert attempt is not None and (attempt.restarts, attempt.returncode) == (0, None)
    find(other.folder).request_stop()
    wait_for_end(other.folder)


@pytest.mark.parametrize(
    ("resources", "sentence"),
    [({"partition": "nope"}, "partition='nope' was refused by Slurm"), ({"gpus": 4}, "gpus=4 was refused by Slurm")],
)
def test_a_refused_array_leaves_nothing(
    slurm: Cluster, runs: Path, tiny: Tiny, resources: dict[str, object], sentence: str
) -> None:
    before = slurm.names()
    wrong = dataclasses.replace(ON, **resources)
    with pytest.raises(RunError, match=sentence):
        start_array([CPU, CPU], runs, command=tiny(0), resources=wrong)
    with pytest.raises(RunError, match=sentence):
        submit_array_in(runs / "cmp", FOUR, command=tiny(0), resources=wrong)
    assert list(runs.iterdir()) == [] and slurm.names() == before


def test_more_tasks_than_slurm_allows_are_refused_with_their_number(slurm: Cluster, runs: Path, tiny: Tiny) -> None:
    many = {f"fp32-seed{i}": CPU for i in range(1002)}  # MaxArraySize is 1001
    with pytest.raises(RunError, match="array='1002 tasks' was refused by Slurm"):
        submit_array_in(runs / "many", many, command=tiny(0), resources=ON)
    assert list(runs.iterdir()) == []


def test_a_task_that_slurm_has_forgotten_is_known_by_its_own_files(
    slurm: Cluster, runs: Path, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    cancelled, short = start_array([CPU, CPU], runs, command=tiny(600), resources=ON)
    for job in (cancelled, short):
        wait_for_state(job.folder, "running")
    slurm.do("scancel", str(cancelled.backend_id))
    (short.folder / ".end").touch()
    for job in (cancelled, short):
        wait_for(lambda job=job: (a := last_attempt(job.folder)) is not None and a.returncode is not None)
        record = dataclasses.replace(job_file.read(job.folder), ended_s=None, returncode=None, scheduler={})
        job_file.write(job.folder, record)  # as if no app had run meanwhile
    monkeypatch.setattr(backends.BACKENDS["slurm"], "polled", scheduler.Polled(dict, "Slurm"))  # lists nothing
    assert wait_for_end(cancelled.folder).scheduler["cause"] == "cancelled"  # slurmstepd printed it into this folder
    assert wait_for_end(short.folder).returncode == 0
    assert not any(line.startswith("slurmstepd") for line in short.console(50))


@pytest.mark.parametrize("compared", [("fp32", "fp16")])
def test_compare_submits_an_array_and_compares_its_runs_when_they_have_ended(
    slurm: Cluster, runs: Path, capsys: pytest.CaptureFixture[str], compared: tuple[str, ...]
) -> None:
    out = str(runs / "cmp")
    training = ["--workload", "digits-cnn", "--steps", "24", "--device", "cpu", "--precisions", ",".join(compared)]
    assert main(["compare", *training, "--out", out, "--on", "slurm", "--time", "10", "--array"]) == 0
    printed = capsys.readouterr().out
    tasks = [find(runs / "cmp" / name) for name in compared]
    number = array_id(tasks)
    assert f"array {number} of 2 tasks on slurm" in printed and f"fp16: job {number}_1" in printed
    assert printed.splitlines()[-1].endswith(f"ampscope compare --out {out}")
    assert {job.name for job in listing(runs)} == set(compared)  # below the runs folder, as runs
    assert main(["compare", "--out", out]) == 2
    assert "holds runs that have not ended" in capsys.readouterr().err
    for job in tasks:
        wait_for_state(job.folder, "finished")
        wait_for_end(job.folder)
    assert main(["compare", "--out", out]) == 0
    text = capsys.readouterr().out
    assert "final loss" in text and "Runs were interleaved" not in text
    nodes = {load_run(job.folder).head.environment["slurm"]["nodes"][0] for job in tasks}
    assert f"fp32 and fp16 were tasks of Slurm array {number} on {' and '.join(sorted(nodes))}, not interleaved" in text


def test_an_array_counts_every_task_for_the_limit_of_jobs(
    slurm: Cluster, runs: Path, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("amp_core.library.permissions.current", lambda: Rules(most_jobs=2))
    with pytest.raises(RunError, match="this server allows 2"):
        start_array([CPU] * 3, runs, command=tiny(0), resources=ON)
    assert not runs.exists() or list(runs.iterdir()) == []
    for job in start_array([CPU] * 2, runs, command=tiny(0), resources=ON):
        wait_for_end(job.folder)


@pytest.mark.whole
def test_a_requeued_task_resumes_from_its_own_checkpoint(slurm: Cluster, runs: Path) -> None:
    config = TrainConfig(workload="digits-cnn", precision="fp32", device="cpu", steps=10**6, checkpoint_every=5)
    other, job = start_array([config, config], runs, resources=dataclasses.replace(ON, requeue=True))
    for task in (other, job):
        wait_for((task.folder / "checkpoint.pt").exists)
    slurm.do("scontrol", "requeue", str(job.backend_id))
    slurm.start_now(str(job.backend_id))
    wait_for(lambda: (a := last_attempt(job.folder)) is not None and a.restarts == 1)
    before = len(load_run(job.folder).steps)
    wait_for(lambda: len(load_run(job.folder).steps) > before)
    assert find(job.folder).state == "running"
    recorded = load_run(job.folder).head.environment["slurm"]
    assert recorded["id"] == job.backend_id and set(recorded["nodes"]) <= {"n1", "n2"}
    for task in (other, job):
        find(task.folder).request_stop()
        wait_for_end(task.folder)
    assert [a and a.restarts for a in map(last_attempt, (other.folder, job.folder))] == [0, 1]
    steps = load_run(job.folder).steps["step"]
    assert steps.is_monotonic_increasing and steps.is_unique


@pytest.mark.whole
def test_each_task_may_train_on_several_nodes(slurm: Cluster, runs: Path, tmp_path: Path) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(
        "import os; print('rank', os.environ['RANK'], os.environ['SLURM_ARRAY_TASK_ID'], "
        "os.environ['SLURM_JOB_NODELIST'], flush=True)"
    )
    tasks = start_array(
        [CPU, CPU], runs, command=[sys.executable, str(script)], resources=dataclasses.replace(ON, nodes=2)
    )
    for index, job in enumerate(tasks):
        wait_for(lambda job=job: (a := last_attempt(job.folder)) is not None and a.returncode is not None)
        lines = {line for line in job.console(50) if line.startswith("rank")}
        assert lines == {f"rank 0 {index} n[1-2]", f"rank 1 {index} n[1-2]"}, job.console(50)
