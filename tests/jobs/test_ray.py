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

from amp_core import RunError, load_run
from amp_core.jobs import backends, find, job_file, listing, start
from amp_core.jobs.backends import polled, scheduler
from amp_core.jobs.backends.ray import Ray
from amp_core.settings.resources import Resources
from tests.jobs.job_states import CPU, submit_in_a_process, wait_for_end, wait_for_state
from tests.waiting import wait_for

Tiny = Callable[[float], list[str]]
ON = Resources(on="ray")


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


@pytest.fixture(scope="module")
def _head() -> Iterator[str]:
    with socket.socket() as one, socket.socket() as two:
        one.bind(("127.0.0.1", 0))
        two.bind(("127.0.0.1", 0))
        port, dashboard = one.getsockname()[1], two.getsockname()[1]
    ray = [sys.executable, "-c", "from ray.scripts.scripts import main; main()"]
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        head = subprocess.Popen(
            [*ray, "start", "--head", "--block", f"--port={port}", f"--dashboard-port={dashboard}", "--num-cpus=64",
             f"--temp-dir={folder}", "--disable-usage-stats"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        yield f"http://127.0.0.1:{dashboard}"
        os.killpg(head.pid, signal.SIGTERM)  # ends what it started
        head.wait()


@pytest.fixture
def ray(_head: str, runs: Path, monkeypatch: pytest.MonkeyPatch) -> Ray:
    """A Ray cluster that this process submits to."""
    monkeypatch.setenv("RAY_ADDRESS", _head)
    monkeypatch.setattr(polled, "FRESH_S", 0.2)
    monkeypatch.setattr(polled, "AFTER_ERROR_S", 0.5)
    monkeypatch.setattr(scheduler, "FILES_S", 5.0)
    backend = Ray()
    monkeypatch.setitem(backends.BACKENDS, "ray", backend)
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
def test_what_only_slurm_has_is_refused(ray: Ray, runs: Path, tiny: Tiny) -> None:
    with pytest.raises(RunError, match="partition='gpu' applies to on='slurm'"):
        dataclasses.replace(ON, partition="gpu")


@needs_ray
@pytest.mark.whole
def test_no_job_is_lost_doubled_or_left_without_an_end(
    ray: Ray, runs: Path, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four of twenty are cancelled; the app is killed while it submits."""
    names = [f"job-{i:02d}" for i in range(20)]
    cancelled, rest = names[:4], names[4:]
    for name in cancelled:
        start(CPU, runs, name, command=tiny(600), resources=ON)
    app = submit_in_a_process(runs, tiny(2), rest, "ray")
    assert app.stdout is not None
    for _ in range(len(rest) // 2):
        app.stdout.readline()
    app.send_signal(signal.SIGKILL)
    app.wait()
    app.stdout.close()
    for name in rest:
        if (runs / name / job_file.JOB_FILE).exists():
            continue
        shutil.rmtree(runs / name, ignore_errors=True)  # killed within mkdir and job.json
        start(CPU, runs, name, command=tiny(2), resources=ON)
    for name in cancelled:
        wait_for_state(runs / name, "running")
        find(runs / name).request_stop()
    monkeypatch.setattr(scheduler, "SETTLE_S", 5.0)
    for name in names:
        wait_for_end(runs / name)
    states = {job.name: job.state for job in listing(runs)}
    interrupted = [name for name in rest if job_file.read(runs / name).backend_id is None]  # killed before it was sent
    assert sorted(states) == names and len(interrupted) <= 1
    assert {n for n, s in states.items() if s == "stopped"} == set(cancelled)
    assert {n for n, s in states.items() if s == "finished"} == set(rest) - set(interrupted)
    assert {n for n in names if load_run(runs / n).head.status == "running"} == set()
    submitted = sorted(job_id.rpartition(".")[0] for job_id in ray.ask() if job_id.startswith("job-"))
    assert submitted == [name for name in names if name not in interrupted]
