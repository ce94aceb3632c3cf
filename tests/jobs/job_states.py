"""Waits for states of jobs, and reads them."""

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil

from amp_core import load_run
from amp_core.jobs import Job, find, job_file
from amp_core.jobs.job_file import Record
from amp_core.settings.training import TrainConfig
from tests.waiting import DEADLINE_S, wait_for

CPU = TrainConfig(workload="digits-cnn", device="cpu")


def wait_for_state(folder: Path, *states: str, timeout_s: float = DEADLINE_S) -> Job:
    """The job, as soon as it is in one of these states."""
    deadline = time.monotonic() + timeout_s
    while (job := find(folder)).state not in states:
        assert time.monotonic() < deadline, f"{job.state} ({job.reason}) never became {states}: {job.console()}"
        time.sleep(0.02)
    return job


def wait_for_end(folder: Path) -> Record:
    """The record of a job, as soon as its end is recorded."""
    wait_for(lambda: not find(folder).alive and job_file.read(folder).ended_s is not None)
    return job_file.read(folder)


def steps_recorded(folder: Path) -> int:
    """The number of steps in the job's run."""
    return len(load_run(folder).steps)


def has_ended(pid: int | None) -> bool:
    """Whether the process has ended. A zombie counts as ended; that of a child once it can be reaped, for which all of
    its threads must have ended."""
    assert pid is not None
    with contextlib.suppress(ChildProcessError):
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def kill_while_it_submits(runs: Path, command: list[str], names: list[str], on: str) -> None:
    """Let another app submit a job for each name, and kill it after half of them: between two submissions, or within
    one."""
    code = (
        "import json, sys; from amp_core.jobs import start; from amp_core.settings.resources import Resources\n"
        "from amp_core.settings.training import TrainConfig\n"
        "config, on = TrainConfig(workload='digits-cnn', device='cpu'), Resources(on=sys.argv[4])\n"
        "for name in json.loads(sys.argv[3]):\n"
        "    print(start(config, sys.argv[1], name, command=json.loads(sys.argv[2]), resources=on).name, flush=True)"
    )
    line = [sys.executable, "-c", code, str(runs), json.dumps(command), json.dumps(names), on]
    printed = runs.parent / "submitted.txt"  # a file, since reading from a pipe has no deadline
    with open(printed, "wb") as out:
        app = subprocess.Popen(line, stdout=out)
    try:
        wait_for(lambda: app.poll() is not None or printed.read_text().count("\n") >= len(names) // 2)
    finally:
        app.kill()
        app.wait(DEADLINE_S)
