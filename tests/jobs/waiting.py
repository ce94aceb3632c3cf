"""What tests of jobs wait for and look at."""

import time
from pathlib import Path

import psutil

from amp_core import load_run
from amp_core.jobs import Job, find
from amp_core.settings.training import TrainConfig
from tests.waiting import DEADLINE_S

CPU = TrainConfig(workload="digits-cnn", device="cpu")


def until(folder: Path, *states: str, timeout_s: float = DEADLINE_S) -> Job:
    """The job, once it is in one of these states."""
    end = time.monotonic() + timeout_s
    while (job := find(folder)).state not in states:
        assert time.monotonic() < end, f"{job.state} ({job.reason}) never became {states}: {job.console()}"
        time.sleep(0.02)
    return job


def steps_recorded(folder: Path) -> int:
    """How many steps the job's run has."""
    return len(load_run(folder).steps)


def gone(pid: int | None) -> bool:
    """Whether that process has ended; a zombie has."""
    assert pid is not None
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
