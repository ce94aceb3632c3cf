"""The end of a training process is recorded, whatever ended it."""

import dataclasses
import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from amp_core import load_run
from amp_core.jobs import find, job_file, listing, start
from amp_core.jobs.backends import local
from tests.jobs.job_states import CPU, has_ended, steps_recorded, wait_for_state
from tests.waiting import wait_for


def test_an_ended_child_whose_folder_was_removed_is_reaped(runs: Path, stand_in: Callable[[str], list[str]]) -> None:
    job = start(CPU, runs, command=stand_in("short"))
    wait_for_state(job.folder, "finished")
    wait_for(lambda: has_ended(job.pid))
    shutil.rmtree(job.folder)
    assert listing(runs) == [] and job.folder not in local._children


def test_a_waiting_job_can_be_stopped(runs: Path, stand_in: Callable[[str], list[str]]) -> None:
    first = start(CPU, runs, command=stand_in("endless"))
    second = start(CPU, runs, command=stand_in("endless"))
    third = start(CPU, runs, command=stand_in("short"))
    wait_for(lambda: second.console() and third.console())  # both wait for the first
    stopped = second.stop()
    assert stopped.state == "stopped" and stopped.queue_position is None
    assert load_run(second.folder).status == "stopped" and len(load_run(second.folder).steps) == 0
    # Still waiting for the first.
    assert find(third.folder).state == "queued" and find(third.folder).queue_position == 1
    first.stop()
    wait_for_state(third.folder, "finished")


def test_a_waiting_job_stopped_by_another_process_records_it(runs: Path, stand_in: Callable[[str], list[str]]) -> None:
    first = start(CPU, runs, command=stand_in("endless"))
    wait_for_state(first.folder, "running")
    second = start(CPU, runs, command=stand_in("endless"))
    wait_for(second.console)
    assert second.pid is not None
    os.kill(second.pid, signal.SIGTERM)
    job = wait_for_state(second.folder, "stopped")
    assert job.reason == "stopped by SIGTERM before it started"


def test_a_stop_finishes_the_step_and_the_run_has_status_stopped(
    runs: Path, stand_in: Callable[[str], list[str]]
) -> None:
    job = start(CPU, runs, command=stand_in("endless"))
    wait_for_state(job.folder, "running")
    wait_for(lambda: steps_recorded(job.folder) > 3)
    job = job.stop()
    assert job.state == "stopped" and job.stop_requested and job.reason == "stopped by SIGTERM"
    assert job.pid is not None and has_ended(job.pid)
    printed = [line for line in job.console(10_000) if line.startswith("step")]
    assert steps_recorded(job.folder) in (len(printed), len(printed) + 1)
    assert job.stop() == job  # a second stop is harmless


def test_a_job_that_ignores_the_stop_is_killed_after_its_grace_period(
    runs: Path, stand_in: Callable[[str], list[str]]
) -> None:
    job = start(CPU, runs, command=stand_in("deaf"))
    wait_for_state(job.folder, "running")
    began = time.monotonic()
    job.request_stop(grace_s=3.0)
    job.request_stop(grace_s=0)  # a second request changes nothing
    requested = find(job.folder)
    assert requested.stop_requested
    assert requested.state == "running" or time.monotonic() - began >= 3.0  # no one waited for its end
    recorded = steps_recorded(job.folder)
    job = wait_for_state(job.folder, "stopped")
    assert time.monotonic() - began >= 3.0
    assert job.reason == "killed: it did not end within 3 s of the request to stop"
    assert load_run(job.folder).status == "stopped" and steps_recorded(job.folder) >= recorded


def test_processes_that_a_job_started_end_with_it(runs: Path, stand_in: Callable[[str], list[str]]) -> None:
    job = start(CPU, runs, command=stand_in("with-child"))
    wait_for_state(job.folder, "running")
    wait_for(lambda: any(line.startswith("step") for line in job.console()))
    (line,) = (line for line in job.console(100) if line.startswith("child"))
    child = int(line.split()[1])
    assert not has_ended(child)
    job.stop()
    wait_for(lambda: has_ended(child))  # the process would sleep for ten minutes


def test_a_process_that_raises_crashes_or_is_killed_has_its_end_recorded(
    runs: Path, stand_in: Callable[[str], list[str]]
) -> None:
    expected = {
        "bad-input": (r"device='cuda' is not available; choose cpu or auto", None),
        "crash-first": (
            r"ended with exit code 1 without recording an end\. Last output: .*RuntimeError: no such luck",
            None,
        ),
        "raises": (r"ValueError: loss went away", 3),
        "dies": (
            r"killed by signal 9 \(SIGKILL\), as the kernel does when memory runs out\. Last output: .*step 2",
            3,
        ),
        "aborts": (r"ended with exit code 7 without recording an end\. Last output: .*step 2", 3),
    }
    devices = (dataclasses.replace(CPU, device=f"cuda:{i}") for i in range(len(expected)))  # so that no job waits
    started = {mode: start(next(devices), runs, command=stand_in(mode)) for mode in expected}
    for mode, (reason, steps) in expected.items():
        job = wait_for_state(started[mode].folder, "finished", "stopped", "failed", "lost")
        assert job.state == "failed"
        assert job.reason is not None and re.fullmatch(reason, job.reason), (mode, job.reason)
        run = load_run(job.folder)
        assert (run.status, run.end_reason) == ("failed", job.reason)
        assert len(run.steps) == (steps or 0)


@pytest.mark.parametrize(("mode", "makes", "state"), [("aborts", "run", "failed"), ("short", "runs", "finished")])
def test_the_end_of_a_job_that_ends_while_it_is_listed_is_recorded(
    runs: Path, stand_in: Callable[[str], list[str]], monkeypatch: pytest.MonkeyPatch, mode: str, makes: str, state: str
) -> None:
    job = start(CPU, runs, command=stand_in(mode), makes=makes)
    wait_for(lambda: has_ended(job.pid))
    (job.folder / "run.json").unlink(missing_ok=True)
    really = local._alive
    checks = iter([True])  # at the first check it is still alive
    monkeypatch.setattr(local, "_alive", lambda *job: next(checks, None) or really(*job))
    result = find(job.folder)
    assert result.state == state and "not observed" not in (result.reason or "")
    assert job_file.read(job.folder).returncode == (7 if mode == "aborts" else 0)


def test_starting_a_job_does_not_wait_for_a_slow_child(
    runs: Path, stand_in: Callable[[str], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = start(CPU, runs, command=stand_in("endless"))
    wait_for_state(job.folder, "running")
    record = dataclasses.replace(job_file.read(job.folder), process=None, created_ns=1)
    monkeypatch.setattr(job_file, "read", lambda folder: record)  # it has not recorded itself for a very long time
    assert find(job.folder).state == "running"
    monkeypatch.undo()
    assert job.stop().state == "stopped"
