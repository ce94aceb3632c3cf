"""Training processes: started, queued, found again, stopped, and their end written down whatever ended them."""

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from amp_core import RunError, _jobfile, jobs, load_run
from amp_core.jobs import Job, find, listing, start
from amp_core.train.config import TrainConfig

# Stands in for `ampscope train`: a run of a step every 20 ms, without torch. The mode says how it behaves.
STAND_IN = """
import os, signal, subprocess, sys, time
from amp_core.runlog import RunWriter
mode, folder = sys.argv[1], sys.argv[sys.argv.index("--out") + 1]
print("mode", mode, "config", sys.argv[sys.argv.index("--config") + 1])
if mode == "bad-input":
    print("ampscope: device='cuda' is not there; choose cpu or auto", file=sys.stderr)
    sys.exit(2)
if mode == "crash-first":
    raise RuntimeError("no such luck")
if mode == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
writer = RunWriter(folder, config={"precision": "fp16"})
if mode == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if mode == "with-child":
    print("child", subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid)
steps = 3 if mode in ("short", "raises", "dies", "aborts") else 10**9
for step in range(steps):
    writer.append("steps", {"step": [step], "loss": [1.0]})
    print("step", step)
    time.sleep(0.02)
if mode == "raises":
    raise ValueError("loss went away")
if mode == "dies":
    os.kill(os.getpid(), signal.SIGKILL)
if mode == "aborts":
    os._exit(7)
print("bye", end="")
"""


@pytest.fixture
def stand_in(tmp_path: Path) -> Callable[[str], list[str]]:
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN)
    return lambda mode: [sys.executable, str(script), mode]


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "runs"
    yield folder
    for job in listing(folder):
        if job.alive:
            job.stop(grace_s=0)
    end = time.monotonic() + 20
    while [f for f in jobs._children if f.parent == folder]:
        assert time.monotonic() < end, "a child was not waited for"
        assert [j.name for j in listing(folder) if j.alive] == []
        time.sleep(0.02)


CPU = TrainConfig(workload="digits-cnn", device="cpu")


def until(folder: Path, *states: str, timeout_s: float = 20.0) -> Job:
    end = time.monotonic() + timeout_s
    while (job := find(folder)).state not in states:
        assert time.monotonic() < end, f"{job.state} ({job.reason}) never became {states}: {job.console()}"
        time.sleep(0.02)
    return job


def wait_for(happens: Callable[[], bool], timeout_s: float = 10.0) -> None:
    end = time.monotonic() + timeout_s
    while not happens():
        assert time.monotonic() < end
        time.sleep(0.02)


def steps_recorded(folder: Path) -> int:
    return len(load_run(folder).steps)


def gone(pid: int | None) -> bool:
    assert pid is not None
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def forget(folder: Path) -> subprocess.Popen[bytes]:
    """What a restart of the app does to its memory of a job."""
    return jobs._children.pop(folder)


def test_job_runs_to_its_end(runs: Path, stand_in: Callable[[str], list[str]]) -> None:
    before = time.time_ns()
    job = start(CPU, runs, command=stand_in("short"))
    assert job.state in ("starting", "running") and job.queue_position is None and not job.stop_requested
    assert job.name == "digits-cnn-tiny-fp16-1" and job.device == "cpu" and before < job.created_ns < time.time_ns()
    job = until(job.folder, "finished")
    assert steps_recorded(job.folder) == 3 and job.pid is not None
    wait_for(lambda: gone(job.pid))
    assert job.console()[-1] == "bye"  # without a newline, from a process that is gone: nothing is lost
    assert TrainConfig.from_dict(job.config) == CPU
    config_file = job.console()[0].split("config ")[1]
    assert TrainConfig.from_dict(json.loads(Path(config_file).read_text())) == CPU


def test_names_are_readable_unique_and_never_paths(runs: Path, stand_in: Callable[[str], list[str]]) -> None:
    command = stand_in("short")
    names = [
        start(CPU, runs, name, command=command).name for name in (None, None, "my run", "my run", "../../x/é", "..")
    ]
    assert names == [
        "digits-cnn-tiny-fp16-1",
        "digits-cnn-tiny-fp16-2",
        "my-run",
        "my-run-2",
        "x-é",
        "digits-cnn-tiny-fp16-3",
    ]
    assert sorted(p.name for p in runs.iterdir()) == sorted(names)
    long = jobs._clean("n" * 500)
    assert len(long) == 60
    own = dataclasses.replace(CPU, workload="some where/my file.py:make", precision="bf16")
    assert jobs._clean(jobs._described(own)) == "my-file-make-bf16"


def test_listing_is_newest_first_and_empty_without_a_folder(runs: Path, stand_in: Callable[[str], list[str]]) -> None:
    assert listing(runs) == []
    made = [start(CPU, runs, command=stand_in("short")).name for _ in range(3)]
    (runs / "no-job").mkdir()
    (runs / "damaged").mkdir()
    (runs / "damaged" / "job.json").write_text('{"argv": []')
    assert [j.name for j in listing(runs)] == made[::-1]
    with pytest.raises(RunError, match=r"job\.json is missing"):
        find(runs / "no-job")
    with pytest.raises(RunError, match="does not hold JSON"):
        find(runs / "damaged")


def test_job_is_one_whatever_way_leads_to_it(runs: Path, stand_in: Callable[[str], list[str]], tmp_path: Path) -> None:
    job = start(CPU, runs, command=stand_in("aborts"))
    (tmp_path / "link").symlink_to(runs)
    wait_for(lambda: gone(job.pid))
    found = find(tmp_path / "link" / ".." / "runs" / job.name)  # the child is known by this name too
    assert found.folder == job.folder and found.reason is not None and "exit code 7" in found.reason


def test_ended_child_whose_folder_was_removed_is_waited_for(runs: Path, stand_in: Callable[[str], list[str]]) -> None:
    job = start(CPU, runs, command=stand_in("short"))
    until(job.folder, "finished")
    wait_for(lambda: gone(job.pid))
    shutil.rmtree(job.folder)
    # A process whose main thread has ended counts as gone, but is waited for only when its other threads have, too.
    wait_for(lambda: listing(runs) == [] and job.folder not in jobs._children)


def test_unwritable_runs_dir_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"runs_dir='.*file' cannot be written"):
        start(CPU, tmp_path / "file")


def test_one_job_per_device_the_rest_wait_in_order(runs: Path, stand_in: Callable[[str], list[str]]) -> None:
    first = start(CPU, runs, "a", command=stand_in("endless"))
    second = start(CPU, runs, "b", command=stand_in("endless"))
    third = start(CPU, runs, "c", command=stand_in("short"))
    other = start(dataclasses.replace(CPU, device="cuda:1"), runs, "d", command=stand_in("short"))
    until(first.folder, "running")
    until(other.folder, "finished")  # another device does not wait
    assert (find(second.folder).state, find(second.folder).queue_position) == ("queued", 1)
    job = find(third.folder)
    assert (job.state, job.queue_position, job.reason) == ("queued", 2, "waiting for cpu: behind b")

    first.stop()
    pid = find(second.folder).pid
    assert until(second.folder, "running").pid == pid  # the process that waited is the one that trains
    assert find(third.folder).queue_position == 1
    second.stop()
    assert until(third.folder, "finished").console()[0] == "waiting for cpu: behind b"
    assert steps_recorded(third.folder) == 3


def test_job_that_waits_can_be_stopped(runs: Path, stand_in: Callable[[str], list[str]]) -> None:
    first = start(CPU, runs, command=stand_in("endless"))
    second = start(CPU, runs, command=stand_in("endless"))
    third = start(CPU, runs, command=stand_in("short"))
    time.sleep(0.5)
    stopped = second.stop()
    assert stopped.state == "stopped" and stopped.queue_position is None
    assert load_run(second.folder).status == "stopped" and len(load_run(second.folder).steps) == 0
    assert find(third.folder).state == "queued" and find(third.folder).queue_position == 1  # still behind the first
    first.stop()
    until(third.folder, "finished")


def test_waiting_job_told_by_someone_else_says_so(runs: Path, stand_in: Callable[[str], list[str]]) -> None:
    first = start(CPU, runs, command=stand_in("endless"))
    until(first.folder, "running")
    second = start(CPU, runs, command=stand_in("endless"))
    while not second.console():
        time.sleep(0.02)
    assert second.pid is not None
    os.kill(second.pid, signal.SIGTERM)
    job = until(second.folder, "stopped")
    assert job.reason == "stopped by SIGTERM before it began"


def test_stop_ends_the_step_and_the_run_says_stopped(runs: Path, stand_in: Callable[[str], list[str]]) -> None:
    job = start(CPU, runs, command=stand_in("endless"))
    until(job.folder, "running")
    time.sleep(0.2)
    job = job.stop()
    assert job.state == "stopped" and job.stop_requested and job.reason == "stopped by SIGTERM"
    assert job.pid is not None and gone(job.pid)
    printed = [line for line in job.console(10_000) if line.startswith("step")]
    assert steps_recorded(job.folder) in (len(printed), len(printed) + 1)
    assert job.stop() == job  # twice is harmless


def test_deaf_job_is_killed_after_its_grace_time(runs: Path, stand_in: Callable[[str], list[str]]) -> None:
    job = start(CPU, runs, command=stand_in("deaf"))
    until(job.folder, "running")
    began = time.monotonic()
    job.request_stop(grace_s=0.5)
    assert time.monotonic() - began < 0.3  # does not wait
    job.request_stop(grace_s=0)  # a second request changes nothing
    assert find(job.folder).state == "running" and find(job.folder).stop_requested
    recorded = steps_recorded(job.folder)
    job = until(job.folder, "stopped", timeout_s=3)
    assert 0.5 <= time.monotonic() - began < 2
    assert job.reason == "killed: it did not end within 0.5 s of being asked to"
    assert load_run(job.folder).status == "stopped" and steps_recorded(job.folder) >= recorded


def test_what_a_job_started_ends_with_it(runs: Path, stand_in: Callable[[str], list[str]]) -> None:
    job = start(CPU, runs, command=stand_in("with-child"))
    until(job.folder, "running")
    while not any(line.startswith("step") for line in job.console()):
        time.sleep(0.02)
    (line,) = (line for line in job.console(100) if line.startswith("child"))
    child = int(line.split()[1])
    assert not gone(child)
    job.stop()
    assert gone(child)


def test_process_that_raises_crashes_or_is_killed_says_so(runs: Path, stand_in: Callable[[str], list[str]]) -> None:
    expected = {
        "bad-input": (r"device='cuda' is not there; choose cpu or auto", None),
        "crash-first": (r"ended with exit code 1 and wrote no end\. Last output: .*RuntimeError: no such luck", None),
        "raises": (r"ValueError: loss went away", 3),
        "dies": (
            r"killed by signal 9 \(SIGKILL\), as the kernel does where memory runs out\. Last output: .*step 2",
            3,
        ),
        "aborts": (r"ended with exit code 7 and wrote no end\. Last output: .*step 2", 3),
    }
    devices = (dataclasses.replace(CPU, device=f"cuda:{i}") for i in range(len(expected)))  # so that none waits
    started = {mode: start(next(devices), runs, command=stand_in(mode)) for mode in expected}
    for mode, (reason, steps) in expected.items():
        job = until(started[mode].folder, "finished", "stopped", "failed", "lost")
        assert job.state == "failed"
        assert job.reason is not None and re.fullmatch(reason, job.reason), (mode, job.reason)
        run = load_run(job.folder)
        assert (run.status, run.end_reason) == ("failed", job.reason)
        assert len(run.steps) == (steps or 0)


def test_jobs_are_found_again_by_another_program(runs: Path, stand_in: Callable[[str], list[str]]) -> None:
    running = start(CPU, runs, command=stand_in("with-child"))
    until(running.folder, "running")
    waiting = start(CPU, runs, command=stand_in("short"))
    look = (
        "import sys; from amp_core.jobs import listing\n"
        "for j in listing(sys.argv[1]): print(j.name, j.state, j.queue_position)\n"
        "print(listing(sys.argv[1])[-1].stop().state)"
    )
    out = subprocess.run(
        [sys.executable, "-c", look, str(runs)], env=jobs._environment(), capture_output=True, text=True, check=True
    ).stdout
    assert out.split("\n")[:3] == [f"{waiting.name} queued 1", f"{running.name} running None", "stopped"]
    until(waiting.folder, "finished")


def test_job_outlives_the_program_that_started_it(runs: Path, stand_in: Callable[[str], list[str]]) -> None:
    begin = (
        "import json, sys; from amp_core.jobs import start; from amp_core.train.config import TrainConfig\n"
        "start(TrainConfig(workload='digits-cnn', device='cpu'), sys.argv[1], command=json.loads(sys.argv[2]))"
    )
    for mode in ("endless", "dies"):
        subprocess.run(
            [sys.executable, "-c", begin, str(runs), json.dumps(stand_in(mode))], env=jobs._environment(), check=True
        )
    dies, endless = listing(runs)
    until(endless.folder, "running")
    assert find(dies.folder).state == "queued"
    assert endless.stop().state == "stopped"
    job = until(dies.folder, "lost", "failed")
    assert job.state == "lost" and job.reason is not None and "step 2" in job.reason  # nobody saw how it ended
    assert steps_recorded(job.folder) == 3


@pytest.mark.parametrize(("mode", "makes", "state"), [("aborts", "run", "failed"), ("short", "runs", "finished")])
def test_one_that_ends_while_it_is_looked_at_is_seen_to_its_end(
    runs: Path, stand_in: Callable[[str], list[str]], monkeypatch: pytest.MonkeyPatch, mode: str, makes: str, state: str
) -> None:
    job = start(CPU, runs, command=stand_in(mode), makes=makes)
    wait_for(lambda: gone(job.pid))
    (job.folder / "run.json").unlink(missing_ok=True)
    really = _jobfile.is_alive
    looks = iter([True])  # the first look was a moment before its end
    monkeypatch.setattr(_jobfile, "is_alive", lambda record: next(looks, None) or really(record))
    found = find(job.folder)
    assert found.state == state and "nobody saw" not in (found.reason or "")
    assert _jobfile.read(job.folder).returncode == (7 if mode == "aborts" else 0)


def test_child_that_is_slow_to_begin_is_waited_for_by_no_one(
    runs: Path, stand_in: Callable[[str], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = start(CPU, runs, command=stand_in("endless"))
    until(job.folder, "running")
    record = dataclasses.replace(_jobfile.read(job.folder), process=None, created_ns=1)
    monkeypatch.setattr(_jobfile, "read", lambda folder: record)  # it has not written itself down, for ever so long
    assert find(job.folder).state == "running"
    monkeypatch.undo()
    assert job.stop().state == "stopped"


def test_zombie_is_not_alive(runs: Path, stand_in: Callable[[str], list[str]]) -> None:
    job = start(CPU, runs, command=stand_in("short"))
    child = forget(job.folder)  # nobody waits for it now
    until(job.folder, "finished")
    assert job.pid is not None
    wait_for(lambda: psutil.Process(job.pid).status() == psutil.STATUS_ZOMBIE)
    os.kill(job.pid, 0)  # the system calls it alive
    assert _jobfile.is_alive(_jobfile.read(job.folder)) is False
    child.wait()


def test_recycled_pid_is_neither_believed_nor_signalled(runs: Path, stand_in: Callable[[str], list[str]]) -> None:
    job = start(CPU, runs, command=stand_in("endless"))
    until(job.folder, "running")
    innocent = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    try:
        record = _jobfile.read(job.folder)
        assert record.process is not None
        stale = dict(record.process) | {"pid": innocent.pid, "started_s": record.process["started_s"] - 3600}
        copy = runs / "stale"
        copy.mkdir()
        _jobfile.write(copy, dataclasses.replace(record, process=stale))
        head = dataclasses.replace(load_run(job.folder).head, process=stale)
        (copy / "run.json").write_text(head.to_json())
        assert find(copy).state == "lost"
        assert find(copy).stop(grace_s=0).state == "lost"
        assert innocent.poll() is None
    finally:
        innocent.kill()
        innocent.wait()


def test_job_of_another_machine_is_left_alone(runs: Path) -> None:
    folder = runs / "far"
    folder.mkdir(parents=True)
    process = {"machine": "elsewhere", "pid": os.getpid(), "started_s": psutil.Process().create_time()}
    record = _jobfile.Record(argv=("x",), device="cpu", created_ns=time.time_ns(), process=process)
    _jobfile.write(folder, record)
    assert find(folder).state == "starting"
    with pytest.raises(RunError, match="another machine"):
        find(folder).stop()
    assert not find(folder).stop_requested
    _jobfile.write(folder, dataclasses.replace(record, created_ns=1))
    assert find(folder).state == "lost"
    assert _jobfile.ahead_of(runs / "mine", _jobfile.Record(("x",), "cpu", time.time_ns())) == []


def test_job_whose_starter_died_records_itself(runs: Path, stand_in: Callable[[str], list[str]]) -> None:
    folder = runs / "orphan"
    folder.mkdir(parents=True)
    record = _jobfile.Record((*stand_in("short"), "--config", "-", "--out", str(folder)), "cpu", time.time_ns())
    _jobfile.write(folder, record)
    assert find(folder).state == "starting"  # alive for a while without a process in the record
    child = subprocess.Popen([sys.executable, "-m", "amp_core._job_child", str(folder)], env=jobs._environment())
    assert child.wait() == 0
    assert _jobfile.read(folder).pid == child.pid
    assert find(folder).state == "finished"
    _jobfile.write(folder, dataclasses.replace(record, created_ns=time.time_ns() - 11 * 10**9))
    (folder / "run.json").unlink()
    assert find(folder).state == "failed"


@pytest.mark.parametrize(
    "damage",
    [{"process": {"pid": 1}}, {"process": {"pid": -1}}, {"process": {}}, {"created_ns": "now"}, {"device": None}],
)
def test_hostile_job_file_is_refused(runs: Path, damage: dict[str, object]) -> None:
    folder = runs / "x"
    folder.mkdir(parents=True)
    (folder / "job.json").write_text(json.dumps({"argv": ["x"], "device": "cpu", "created_ns": 1} | damage))
    with pytest.raises(RunError, match="damaged"):
        find(folder)
    assert listing(runs) == []


def test_device_of_auto_is_what_the_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = {d: jobs.device_of(TrainConfig(device=d)) for d in ("cpu", "cuda", "cuda:1")}
    assert devices == {"cpu": "cpu", "cuda": "cuda:0", "cuda:1": "cuda:1"}
    for has_cuda, device in ((True, "cuda:0"), (False, "cpu")):
        monkeypatch.setattr(jobs, "_has_cuda", lambda has_cuda=has_cuda: has_cuda)
        assert jobs.device_of(TrainConfig(device="auto")) == device
    monkeypatch.undo()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert jobs._has_cuda() is False


def test_child_finds_the_package_from_a_checkout(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    script = tmp_path / "where.py"
    script.write_text("import amp_core, os, sys; print(amp_core.__file__, os.environ['PYTHONUNBUFFERED'])")
    job = until(start(CPU, runs, command=[sys.executable, str(script)]).folder, "failed")
    import amp_core

    assert job.console()[-1] == f"{amp_core.__file__} 1"


def test_real_training_runs_stops_and_is_refused_what_is_not_there(runs: Path) -> None:
    config = TrainConfig(workload="digits-cnn", precision="fp16", steps=10**6, every=2, device="cpu")
    training = start(config, runs)
    refused = start(dataclasses.replace(config, device="cuda:99"), runs)
    assert (training.state, refused.device) == ("starting", "cuda:99")
    until(training.folder, "running", timeout_s=60)
    wait_for(lambda: steps_recorded(training.folder) > 3, timeout_s=30)
    job = training.stop()
    run = load_run(training.folder)
    assert (job.state, run.status, job.reason) == ("stopped", "stopped", "stopped by SIGTERM")
    assert run.head.config["precision"] == "fp16" and len(run.tensors()) > 0
    assert len(run.steps) > 3 and run.steps["loss"].notna().all()
    job = until(refused.folder, "failed", timeout_s=60)
    assert job.reason is not None and job.reason.startswith("device='cuda:99' is not there")
    assert load_run(refused.folder).end_reason == job.reason
