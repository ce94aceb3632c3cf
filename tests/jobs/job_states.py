"""Waits for states of jobs, and reads them."""

import json
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
    """Whether the process has ended; a zombie counts as ended."""
    assert pid is not None
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def submit_in_a_process(runs: Path, command: list[str], names: list[str], on: str) -> subprocess.Popen[bytes]:
    """Another app that submits a job for each name, and prints the name once it has returned."""
    code = (
        "import json, sys; from amp_core.jobs import start; from amp_core.settings.resources import Resources\n"
        "from amp_core.settings.training import TrainConfig\n"
        "config, on = TrainConfig(workload='digits-cnn', device='cpu'), Resources(on=sys.argv[4])\n"
        "for name in json.loads(sys.argv[3]):\n"
        "    print(start(config, sys.argv[1], name, command=json.loads(sys.argv[2]), resources=on).name, flush=True)"
    )
    line = [sys.executable, "-c", code, str(runs), json.dumps(command), json.dumps(names), on]
    return subprocess.Popen(line, stdout=subprocess.PIPE)
