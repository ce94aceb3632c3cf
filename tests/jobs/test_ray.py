"""Jobs in a real Ray cluster on this machine; skipped without the package ray."""

import dataclasses
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import pytest

from amp_core import RunError, diagnose, load_run
from amp_core.jobs import backends, find, job_file, listing, start, submit_in
from amp_core.jobs.backends import polled, scheduler
from amp_core.jobs.backends import ray as ray_backend
from amp_core.jobs.backends.job_script import last_attempt
from amp_core.jobs.backends.ray import Ray
from amp_core.settings.resources import Resources
from tests.jobs.job_states import CPU, kill_while_it_submits, wait_for_end, wait_for_state
from tests.waiting import wait_for

Tiny = Callable[[float], list[str]]
ON = Resources(on="ray")
SHORT = Resources(on="ray", time="0:05")
END_TIMEOUT_S = 60.0
"""How long a head may take to end what it started; then all of it is killed."""


def installed() -> bool:
    try:
        return bool(metadata.version("ray"))
    except metadata.PackageNotFoundError:
        return False


needs_ray = pytest.mark.skipif(not installed(), reason="needs the package ray (extra `ray`)")


def test_without_the_package_the_sentence_names_the_extra(
    runs: Path, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(RunError, match=r"pip install 'ampscope\[ray\]'"):
        start(CPU, runs, command=tiny(0), resources=ON)
    assert list(runs.iterdir()) == []


class Head:
    """A Ray head on this machine, which can be stopped and started again at the same address."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with socket.socket() as one, socket.socket() as two:
            one.bind(("127.0.0.1", 0))
            two.bind(("127.0.0.1", 0))
            self._ports = one.getsockname()[1], two.getsockname()[1]
        self.address = f"http://127.0.0.1:{self._ports[1]}"

    def start(self) -> None:
        """Start it with nothing of an earlier one."""
        folder = tempfile.mkdtemp(dir=self._folder)
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from ray.scripts.scripts import main; main()", "start", "--head", "--block",
             f"--port={self._ports[0]}", f"--dashboard-port={self._ports[1]}", "--num-cpus=64",
             f"--temp-dir={folder}", "--disable-usage-stats"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip

    def wait(self) -> None:
        """Wait until it takes jobs: it answers before its agent does ("No available agent to submit job")."""
        from ray.job_submission import JobSubmissionClient

        def takes_a_job() -> bool:
            try:
                JobSubmissionClient(self.address).submit_job(entrypoint="true")
            except (RuntimeError, ConnectionError):
                return False
            return True

        wait_for(takes_a_job)

    def stop(self) -> None:
        """End it and what it started. Its jobs have sessions of their own."""
        os.killpg(self._process.pid, signal.SIGTERM)
        try:
            self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(END_TIMEOUT_S)


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        running = Head(Path(folder))
        running.start()
        yield running
        running.stop()


@pytest.fixture
def ray(head: Head, runs: Path, monkeypatch: pytest.MonkeyPatch) -> Ray:
    """A Ray cluster that this process submits to."""
    monkeypatch.setenv("RAY_ADDRESS", head.address)
    monkeypatch.setattr(polled, "FRESH_S", 0.2)
    monkeypatch.setattr(polled, "AFTER_ERROR_S", 0.5)
    monkeypatch.setattr(scheduler, "FILES_S", 5.0)
    backend = Ray()
    monkeypatch.setitem(backends.BACKENDS, "ray", backend)
    head.wait()
    wait_for(lambda: backend.polled.latest().error is None)
    return backend


@needs_ray
def test_a_job_runs_stops_and_fails_as_elsewhere(ray: Ray, runs: Path, tiny: Tiny) -> None:
    short, long, refused = (
        start(CPU, runs, name, command=command, resources=ON)
        for name, command in (
            ("short", tiny(0)),
            ("long", tiny(600)),
            ("refused", [sys.executable, "-c", "print('ampscope: no such thing'); raise SystemExit(2)"]),
        )
    )
    assert short.backend == "ray" and short.device == "ray"
    assert wait_for_state(long.folder, "running").node
    find(long.folder).request_stop()
    assert wait_for_end(short.folder).returncode == 0 and find(short.folder).state == "finished"
    wait_for_end(long.folder)
    assert (find(long.folder).state, load_run(long.folder).head.end_reason) == ("stopped", "stopped by SIGTERM")
    wait_for_end(refused.folder)
    assert (find(refused.folder).state, find(refused.folder).reason) == ("failed", "no such thing")


@needs_ray
def test_a_time_limit_ends_the_job_and_is_named(ray: Ray, runs: Path, tiny: Tiny) -> None:
    job = start(CPU, runs, "limited", command=tiny(600), resources=dataclasses.replace(ON, time="0:02"))
    wait_for_end(job.folder)
    head = load_run(job.folder).head
    assert (head.status, head.job["cause"]) == ("stopped", "time limit")
    assert head.end_reason is not None and "stopped by SIGTERM" in head.end_reason
    assert "at its time limit of 0:02" in head.end_reason
    assert [f.severity for f in diagnose(load_run(job.folder)) if f.code == "killed-by-scheduler"] == ["warning"]


@needs_ray
def test_a_folder_whose_name_is_not_a_word_is_followed(ray: Ray, runs: Path, tiny: Tiny) -> None:
    folder = runs / "two words"
    submit_in(folder, CPU, CPU.to_dict(), tiny(0), resources=ON)
    assert wait_for_end(folder).returncode == 0 and find(folder).state == "finished"


@needs_ray
def test_what_only_slurm_has_is_refused(ray: Ray, runs: Path, tiny: Tiny) -> None:
    with pytest.raises(RunError, match="partition='gpu' applies to on='slurm'"):
        dataclasses.replace(ON, partition="gpu")


@needs_ray
@pytest.mark.whole
def test_no_job_is_lost_doubled_or_left_without_an_end(
    head: Head, ray: Ray, runs: Path, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four of twenty are cancelled, three reach their time limit, four train while the head is restarted, and the app
    is killed while it submits."""
    monkeypatch.setattr(ray_backend, "STOP_WAIT_S", 2)
    names = [f"job-{i:02d}" for i in range(20)]
    cancelled, limited, training, rest = names[:4], names[4:7], names[7:11], names[11:]
    for name in (*cancelled, *training):
        start(CPU, runs, name, command=tiny(600), resources=ON)
    for name in limited:  # the first ignores SIGTERM, so that it is killed and writes no end
        start(CPU, runs, name, command=tiny(-600 if name == limited[0] else 600), resources=SHORT)
    kill_while_it_submits(runs, tiny(2), rest, "ray")
    for name in (*cancelled, *training):
        wait_for_state(runs / name, "running")
    for name in cancelled:
        find(runs / name).request_stop()
    for name in cancelled:
        wait_for_end(runs / name)
    before = [name for name in rest if (runs / name / job_file.JOB_FILE).exists()]
    submitted = [name for name in before if was_confirmed(runs / name)]
    for name in limited:
        wait_for_end(runs / name)
    wait_for(lambda: all((a := last_attempt(runs / n)) is not None and a.returncode == 0 for n in submitted))
    head.stop()
    wait_for(lambda: ray.polled.latest().error is not None)
    head.start()
    head.wait()
    wait_for(lambda: ray.polled.latest().error is None)
    for name in rest:
        if name not in before:
            shutil.rmtree(runs / name, ignore_errors=True)  # killed within mkdir and job.json
            start(CPU, runs, name, command=tiny(2), resources=ON)
    monkeypatch.setattr(scheduler, "SETTLE_S", 5.0)
    for name in names:
        wait_for_end(runs / name)
    jobs = {job.name: job for job in listing(runs)}
    states = {name: job.state for name, job in jobs.items()}
    logs = [runs / name / job_file.LOG_FILE for name in names]
    assert all(log.read_text().count("start ") == 1 for log in logs if log.exists())
    assert sorted(states) == names
    assert {states[name] for name in cancelled} == {"stopped"}
    assert {states[name] for name in limited} == {"stopped"}
    interrupted = [name for name in before if name not in submitted]  # the app was killed while it submitted this one
    assert len(interrupted) <= 1 and all(states[name] in ("finished", "failed") for name in interrupted)
    assert {states[name] for name in rest if name not in interrupted} == {"finished"}
    assert {states[name] for name in training} == {"failed"}  # a head without a store of its own forgets its jobs
    heads = {name: load_run(runs / name).head for name in names}
    assert {name for name, head in heads.items() if head.status == "running"} == set()
    assert {name for name, head in heads.items() if head.job.get("cause") == "time limit"} == set(limited)
    assert all("no longer lists the job" in str(jobs[name].reason) for name in training)
    listed = sorted(job_id.rpartition(".")[0] for job_id in ray.ask() if job_id.startswith("job-"))
    assert listed == [name for name in rest if name not in before]


def was_confirmed(folder: Path) -> bool:
    """Whether the job's submission was confirmed before the app that submitted it was killed."""
    return job_file.read(folder).backend_id is not None
