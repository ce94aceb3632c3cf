"""Jobs in a real Slurm cluster on this machine: submitted once, followed, stopped, and ended for every reason."""

import dataclasses
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from amp_core import RunError, load_run
from amp_core.jobs import backends, find, job_file, listing, start
from amp_core.jobs.backends import scheduler
from amp_core.jobs.backends import slurm as slurm_backend
from amp_core.jobs.backends.job_script import last_attempt
from amp_core.jobs.backends.slurm import Slurm
from amp_core.settings.resources import Resources
from amp_core.settings.training import TrainConfig
from tests.jobs.job_states import CPU, kill_while_it_submits, wait_for_end, wait_for_state
from tests.slurm_cluster import Cluster
from tests.waiting import wait_for

Tiny = Callable[[float], list[str]]
ON = Resources(on="slurm", time="10")


def ended_by_itself(folder: Path) -> bool:
    """Whether the job has recorded its end."""
    attempt = last_attempt(folder)
    return attempt is not None and attempt.returncode is not None


def test_a_job_runs_to_its_end_on_a_node(slurm: Cluster, runs: Path, tiny: Tiny) -> None:
    job = start(CPU, runs, command=tiny(600), resources=dataclasses.replace(ON, partition="short"))
    assert job.backend == "slurm" and job.device == "slurm:short" and job.alive
    assert wait_for_state(job.folder, "running").node == "n1"
    (job.folder / ".end").touch()
    job = wait_for_state(job.folder, "finished")
    assert wait_for_end(job.folder).returncode == 0
    attempt = last_attempt(job.folder)
    assert attempt is not None and (attempt.id, attempt.returncode) == (job.backend_id, 0)


def test_waiting_jobs_have_a_reason_and_a_position(slurm: Cluster, runs: Path, tiny: Tiny) -> None:
    down = dataclasses.replace(ON, partition="down")
    first, second = (start(CPU, runs, command=tiny(1), resources=down) for _ in range(2))
    wait_for(lambda: find(second.folder).queue_position == 1)
    job = find(first.folder)
    assert (job.state, job.queue_position) == ("queued", 0)
    assert job.reason is not None and "PartitionDown" in job.reason
    for waiting in (first, second):
        waiting.request_stop()
    for waiting in (first, second):
        assert wait_for_state(waiting.folder, "stopped").reason == "stopped on request"


def test_a_stop_ends_the_training_by_sigterm(slurm: Cluster, runs: Path, tiny: Tiny) -> None:
    job = start(CPU, runs, command=tiny(600), resources=ON)
    wait_for_state(job.folder, "running")
    find(job.folder).request_stop()
    wait_for_end(job.folder)
    head = load_run(job.folder).head
    assert (head.status, head.end_reason, head.job["cause"]) == ("stopped", "stopped by SIGTERM", None)
    assert find(job.folder).stop_requested


def test_a_job_that_was_cancelled_in_slurm_says_so(slurm: Cluster, runs: Path, tiny: Tiny) -> None:
    running, waiting = (
        start(CPU, runs, command=tiny(600), resources=dataclasses.replace(ON, partition=name))
        for name in ("debug", "down")
    )
    wait_for_state(running.folder, "running")
    slurm.do("scancel", str(running.backend_id), str(waiting.backend_id))
    for job in (running, waiting):
        wait_for_end(job.folder)
        head = load_run(job.folder).head
        assert (head.status, head.job["state"], head.job["cause"]) == ("stopped", "CANCELLED", "cancelled")


def test_an_ended_job_that_slurm_has_forgotten_is_known_by_its_own_files(
    slurm: Cluster, runs: Path, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    cancelled, short = (start(CPU, runs, command=tiny(seconds), resources=ON) for seconds in (600, 0))
    wait_for_state(cancelled.folder, "running")
    slurm.do("scancel", str(cancelled.backend_id))
    wait_for(lambda: ended_by_itself(cancelled.folder) and ended_by_itself(short.folder))
    for job in (cancelled, short):
        record = dataclasses.replace(job_file.read(job.folder), ended_s=None, returncode=None, scheduler={})
        job_file.write(job.folder, record)  # as if no app had run meanwhile
    monkeypatch.setattr(backends.BACKENDS["slurm"], "polled", scheduler.Polled(dict, "Slurm"))  # lists nothing
    assert find(short.folder).state == "finished"
    assert wait_for_end(cancelled.folder).scheduler["cause"] == "cancelled"  # slurmstepd printed it
    assert wait_for_end(short.folder).returncode == 0


@pytest.mark.parametrize(
    ("printed", "state"),
    [
        ("slurmstepd-n1: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-23T16:46:53 DUE TO TIME LIMIT ***", "TIMEOUT"),
        ("slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-23T16:46:53 DUE TO PREEMPTION ***", "PREEMPTED"),
        ("slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-23T16:46:53 ***", "CANCELLED"),
        ("slurmstepd: error: Detected 1 oom_kill event in StepId=7.batch. Some of the step tasks", "OUT_OF_MEMORY"),
        (
            "slurmstepd: error: Exceeded job memory limit\nslurmstepd: error: *** JOB 7 CANCELLED AT 16 ***",
            "OUT_OF_MEMORY",
        ),
        ("step 7 DUE TO TIME LIMIT", None),
    ],
)
def test_what_slurmstepd_printed_tells_why_a_job_ended(tmp_path: Path, printed: str, state: str | None) -> None:
    (tmp_path / "console.log").write_text(f"step 1\n{printed}\nlast words\n")
    job = Slurm().forgotten(tmp_path, job_file.Record((), "slurm", 0, backend_id="7", token="t"))
    assert (job.state if job is not None else None) == state


@pytest.mark.parametrize(
    ("resources", "argument"),
    [({"partition": "nope"}, "partition='nope'"), ({"gpus": 4}, "gpus=4")],
)
def test_a_refusal_names_the_argument_and_leaves_nothing(
    slurm: Cluster, runs: Path, tiny: Tiny, resources: dict[str, object], argument: str
) -> None:
    before = slurm.names()
    with pytest.raises(RunError, match=argument):
        start(CPU, runs, command=tiny(0), resources=dataclasses.replace(ON, **resources))
    assert list(runs.iterdir()) == [] and slurm.names() == before


@pytest.mark.parametrize(
    ("resources", "argument"),
    [
        ({"account": "nope"}, "account='nope'"),
        ({"partition": "gpu"}, "partition='gpu'"),
        ({"partition": "gpu", "account": "nope"}, "account='nope'"),
        ({}, "account=None"),
    ],
)
def test_a_refusal_of_account_and_partition_names_what_was_given(resources: dict[str, str], argument: str) -> None:
    said = "Invalid account or account/partition combination specified"
    assert str(slurm_backend._about_argument(said, dataclasses.replace(ON, **resources))).startswith(f"{argument} was")


def test_a_job_whose_id_was_not_recorded_is_found_by_its_token(
    slurm: Cluster, runs: Path, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Crash(BaseException):
        pass

    backend = backends.BACKENDS["slurm"]
    send = backend.send

    def send_and_crash(*arguments: object) -> str:
        send(*arguments)
        raise Crash

    monkeypatch.setattr(backend, "send", send_and_crash)
    with pytest.raises(Crash):
        start(CPU, runs, "crashed", command=tiny(1), resources=ON)
    assert job_file.read(runs / "crashed").backend_id is None
    wait_for_state(runs / "crashed", "finished")
    token = job_file.read(runs / "crashed").token
    assert [name for name in slurm.names() if name.startswith("crashed.")] == [f"crashed.{token}"]


def test_a_submission_that_slurm_never_got_ends_as_failed(
    slurm: Cluster, runs: Path, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hang(*_: object) -> str:
        raise scheduler.UnconfirmedError("on='slurm': sbatch did not answer")

    monkeypatch.setattr(backends.BACKENDS["slurm"], "send", hang)
    with pytest.raises(RunError, match="did not answer"):
        start(CPU, runs, "lost", command=tiny(0), resources=ON)
    assert find(runs / "lost").state == "queued"
    monkeypatch.setattr(scheduler, "SETTLE_S", 0.0)
    assert "did not take the job" in str(wait_for_state(runs / "lost", "failed").reason)


def test_a_folder_that_the_nodes_do_not_share_is_named(
    slurm: Cluster, runs: Path, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "FILES_S", 0.5)
    send = backends.BACKENDS["slurm"].send
    aside = runs.parent / "elsewhere"

    def send_held(*arguments: object) -> str:  # so that the folder is gone before the node looks for it
        monkeypatch.setenv("SBATCH_HOLD", "1")
        return send(*arguments)

    monkeypatch.setattr(backends.BACKENDS["slurm"], "send", send_held)
    job = start(CPU, runs, "private", command=tiny(0), resources=dataclasses.replace(ON, partition="down"))
    job.folder.rename(aside)
    slurm.do("scontrol", "update", f"jobid={job.backend_id}", "partition=debug")
    slurm.do("scontrol", "release", str(job.backend_id))
    wait_for(lambda: slurm.ask("squeue", "-h", "-t", "all", "-j", str(job.backend_id), "-o", "%T").strip() == "FAILED")
    aside.rename(job.folder)
    job = wait_for_state(job.folder, "failed")
    assert "share" in str(job.reason) and load_run(job.folder).head.job["cause"] == "not shared"


def test_a_controller_that_is_down_leaves_states_as_they_were(slurm: Cluster, runs: Path, tiny: Tiny) -> None:
    job = start(CPU, runs, command=tiny(600), resources=ON)
    wait_for_state(job.folder, "running")
    slurm.stop_controller(kill=True)
    try:
        with pytest.raises(RunError, match="on='slurm' is not possible now"):
            start_when_noticed(runs, tiny)
        assert [path.name for path in runs.iterdir()] == [job.name]
        wait_for(lambda: find(job.folder).reason is not None)
        assert find(job.folder).state == "running"
    finally:
        slurm.start_controller()
    (job.folder / ".end").touch()
    wait_for_state(job.folder, "finished")
    wait_for_end(job.folder)


def start_when_noticed(runs: Path, tiny: Tiny) -> None:
    """Start a job once the backend has noticed that the controller is gone."""
    wait_for(lambda: backends.BACKENDS["slurm"].polled.latest().error is not None)
    start(CPU, runs, command=tiny(0), resources=ON)


def test_the_scheduler_is_asked_once_for_all_who_ask(
    slurm: Cluster, runs: Path, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, asked = backends.BACKENDS["slurm"], []
    with monkeypatch.context() as patch:
        patch.setattr("amp_core.jobs.backends.polled.FRESH_S", 600.0)
        patch.setattr(backend, "polled", scheduler.Polled(lambda: asked.append(1) or backend.ask(), "Slurm"))
        started = [start(CPU, runs, command=tiny(0), resources=ON) for _ in range(3)]
        for _ in range(20):
            assert len(listing(runs)) == 3
        assert len(asked) == 1
    for job in started:
        wait_for_end(job.folder)
        assert find(job.folder).state == "finished"


def test_a_hanging_scheduler_costs_a_page_no_more_than_a_moment(
    slurm: Cluster, runs: Path, tiny: Tiny, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    job = start(CPU, runs, command=tiny(0), resources=ON)
    stand_ins = tmp_path / "bin"
    stand_ins.mkdir()
    for name in ("squeue", "sbatch"):
        (stand_ins / name).write_text("#!/bin/sh\nexec sleep 600\n")
        (stand_ins / name).chmod(0o755)
    backend = backends.BACKENDS["slurm"]
    with monkeypatch.context() as patch:
        patch.setenv("PATH", f"{stand_ins}{os.pathsep}{os.environ['PATH']}")
        patch.setattr("amp_core.jobs.backends.slurm.ASK_TIMEOUT_S", 2.0)
        patch.setattr("amp_core.jobs.backends.polled.WAIT_S", 0.1)
        patch.setattr(backend, "polled", scheduler.Polled(backend.ask, "Slurm"))
        assert "has not answered" in str(backend.polled.latest().error)  # while squeue still hangs
        assert find(job.folder).state in ("queued", "starting", "running", "finished")
        with pytest.raises(RunError, match=r"did not answer within 2 s \(squeue\)"):
            start(CPU, runs, command=tiny(0), resources=ON)
    assert [path.name for path in runs.iterdir()] == [job.name]
    wait_for_end(job.folder)


@pytest.mark.whole
def test_a_training_on_two_nodes_meets_through_torchrun(slurm: Cluster, runs: Path, tmp_path: Path) -> None:
    script = tmp_path / "ranks.py"
    script.write_text("import os; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'], flush=True)")
    command = [sys.executable, str(script)]
    job = start(CPU, runs, command=command, resources=dataclasses.replace(ON, nodes=2))
    wait_for(lambda: ended_by_itself(job.folder))
    lines = {line for line in job.console(50) if line.startswith("rank")}
    assert lines == {"rank 0 of 2", "rank 1 of 2"}, job.console(50)


REPEATED = """
import pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
print("resumed" if "--resume" in sys.argv else "new", flush=True)
def stop(*_):
    (folder / "checkpoint.pt").write_text("")
    sys.exit(130)
signal.signal(signal.SIGTERM, stop)
(folder / "run.json").write_text("{}")
time.sleep(0 if "--resume" in sys.argv else 600)
"""


def test_near_its_time_limit_a_job_saves_queues_itself_again_and_resumes(
    slurm: Cluster, runs: Path, tmp_path: Path
) -> None:
    script = tmp_path / "repeated.py"
    script.write_text(REPEATED)
    job = start(CPU, runs, command=[sys.executable, str(script)], resources=dataclasses.replace(ON, requeue=True))
    wait_for(lambda: "new" in find(job.folder).console())
    wait_for((job.folder / "run.json").exists)
    slurm.do("scancel", "--batch", "--signal=USR1", str(job.backend_id))  # what Slurm sends before the limit
    wait_for(lambda: find(job.folder).state == "queued")
    slurm.start_now(str(job.backend_id))
    wait_for(lambda: (a := last_attempt(job.folder)) is not None and (a.restarts, a.returncode) == (1, 0))
    assert [line for line in job.console(50) if line in ("new", "resumed")] == ["new", "resumed"]
    wait_for_end(job.folder)


@pytest.mark.whole
def test_a_requeued_training_resumes_from_its_checkpoint(slurm: Cluster, runs: Path) -> None:
    config = TrainConfig(workload="digits-cnn", precision="fp32", device="cpu", steps=10**6, checkpoint_every=5)
    job = start(config, runs, resources=dataclasses.replace(ON, requeue=True))
    wait_for((job.folder / "checkpoint.pt").exists)
    slurm.do("scontrol", "requeue", str(job.backend_id))
    slurm.start_now(str(job.backend_id))
    wait_for(lambda: (a := last_attempt(job.folder)) is not None and a.restarts == 1)
    before = len(load_run(job.folder).steps)
    wait_for(lambda: len(load_run(job.folder).steps) > before)
    assert find(job.folder).state == "running"
    find(job.folder).request_stop()
    wait_for_end(job.folder)
    run = load_run(job.folder)
    assert run.status == "stopped" and run.steps["step"].is_monotonic_increasing and run.steps["step"].is_unique
    assert slurm.names().count(f"{job.name}.{job_file.read(job.folder).token}") == 1


def test_a_reused_id_is_neither_trusted_nor_cancelled(slurm: Cluster, runs: Path, tiny: Tiny) -> None:
    """A controller that was killed forgets its latest jobs, and gives their ids again."""
    job = start(CPU, runs, command=tiny(600), resources=dataclasses.replace(ON, partition="down"))
    other = start(CPU, runs, command=tiny(600), resources=dataclasses.replace(ON, partition="down"))
    job_file.write(job.folder, dataclasses.replace(job_file.read(job.folder), backend_id=other.backend_id, token="f00"))
    wait_for(lambda: find(other.folder).queue_position == 1)
    assert find(job.folder).queue_position is None
    with pytest.raises(RunError, match="is another one"):
        find(job.folder).request_stop()
    assert slurm.ask("squeue", "-h", "-j", str(other.backend_id), "-o", "%T").strip() == "PENDING"
    job_file.write(job.folder, dataclasses.replace(job_file.read(job.folder), ended_s=1.0))
    find(other.folder).request_stop()
    wait_for_end(other.folder)


@pytest.mark.parametrize("jobs", [10, pytest.param(50, marks=pytest.mark.whole)])
def test_no_job_is_lost_doubled_or_left_without_an_end(
    slurm: Cluster, runs: Path, tiny: Tiny, jobs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fifth are cancelled, a tenth reach their time limit; in between the controller restarts and the app is
    killed."""
    monkeypatch.setattr(scheduler, "FILES_S", 2.0)
    names = [f"{jobs}-jobs-{i:02d}" for i in range(jobs)]  # the cluster still lists those of other cases
    cancelled, limited = names[: jobs // 5], names[jobs // 5 : jobs // 5 + max(2, jobs // 10)]
    ended = {name: tiny(600) for name in cancelled} | {name: tiny(600) for name in limited}
    ended[limited[0]] = tiny(-600)  # ignores SIGTERM, so that Slurm kills it and it writes no end
    for name in ended:
        start(CPU, runs, name, command=ended[name], resources=ON)
    for name in ended:  # a controller that ends while it sends a job to its node may forget that job
        wait_for_state(runs / name, "running")
    rest = [name for name in names if name not in ended]
    kill_while_it_submits(runs, tiny(2), rest, "slurm")
    slurm.stop_controller()
    slurm.start_controller()
    for name in rest:
        if (runs / name / job_file.JOB_FILE).exists():
            continue
        shutil.rmtree(runs / name, ignore_errors=True)  # killed within mkdir and job.json
        start(CPU, runs, name, command=tiny(2), resources=ON)
    for name in cancelled:
        find(runs / name).request_stop()
    for name in limited:
        slurm.reach_time_limit(str(find(runs / name).backend_id))
    monkeypatch.setattr(scheduler, "SETTLE_S", 5.0)
    for name in names:
        wait_for_end(runs / name)
    found = {job.name: (job.state, job.reason) for job in listing(runs)}
    assert sorted(found) == names
    interrupted = [name for name in rest if job_file.read(runs / name).backend_id is None]  # killed before its sbatch
    assert len(interrupted) <= 1
    expected = dict.fromkeys((*cancelled, *limited), "stopped") | dict.fromkeys(rest, "finished")
    expected |= dict.fromkeys(interrupted, "failed")
    assert {name: found[name] for name in names if found[name][0] != expected[name]} == {}
    heads = {name: load_run(runs / name).head for name in names}
    assert {name for name, head in heads.items() if head.status == "running"} == set()
    assert {name for name, head in heads.items() if head.job.get("cause") == "time limit"} == set(limited)
    ours = sorted(name.rpartition(".")[0] for name in slurm.names() if name.startswith(f"{jobs}-jobs-"))
    assert ours == [name for name in names if name not in interrupted]
