"""Slurm's list of jobs: the lines of squeue as jobs, with their places in the queue.

    >>> with_positions(["12_3|PENDING|100|gpu||Resources|cmp.5f0c2a1b"])["12_3"].token
    '5f0c2a1b_3'

The tasks of an array have one name, and so one token. The index of a task tells them apart: it is added to the name
here, as it is to the token in the record of the task's run folder.
"""

import re
from collections.abc import Sequence
from dataclasses import replace

from amp_core.jobs.backends.polled import SchedulerJob

LINE = ["squeue", "--noheader", "--array", "--states=all", "-o", "%i|%T|%Q|%P|%N|%r|%j"]
"""Lists all jobs, ended ones included, and each task of an array by itself."""
ENDED = {
    "BOOT_FAIL": "node failure",
    "CANCELLED": "cancelled",
    "COMPLETED": None,
    "DEADLINE": "time limit",
    "FAILED": None,
    "NODE_FAIL": "node failure",
    "OUT_OF_MEMORY": "memory",
    "PREEMPTED": "preemption",
    "REVOKED": "cancelled",
    "TIMEOUT": "time limit",
}
"""States in which a job has ended, and the cause."""
_WAITING = ("PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT")
_REASONS = {
    "Priority": "jobs of higher priority are before it",
    "Resources": "waiting for free nodes or GPUs",
    "Dependency": "waiting for another job",
    "DependencyNeverSatisfied": "waiting for a job that has failed",
    "BeginTime": "its begin time has not come",
    "JobHeldUser": "held by its user",
    "JobHeldAdmin": "held by an administrator",
    "Licenses": "waiting for a licence",
    "PartitionConfig": "it requests more than the partition has",
    "PartitionDown": "the partition is down",
    "PartitionInactive": "the partition is inactive",
    "PartitionNodeLimit": "it requests more nodes than the partition allows",
    "PartitionTimeLimit": "its time limit is above the partition's",
    "ReqNodeNotAvail": "a requested node is not available",
    "Reservation": "waiting for its reservation",
}
"""Slurm's pending reasons in words; others are shown as they are."""


def with_positions(lines: Sequence[str]) -> dict[str, SchedulerJob]:
    """squeue's lines as jobs by id. A waiting job's position is the number of jobs of its partition before it."""
    jobs: dict[str, SchedulerJob] = {}
    priorities: dict[str, tuple[int, int, int]] = {}
    for line in lines:
        parts = line.split("|", 6)
        if len(parts) < 7:
            continue
        job_id, state, priority, partition, node, reason, name = parts
        phase = "ended" if state in ENDED else "waiting" if state in _WAITING else "running"
        plain = "" if reason in ("None", "(null)") else reason
        words = f"{plain} ({_REASONS[plain]})" if plain in _REASONS else plain
        ran = phase == "ended" and bool(node)
        jobs[job_id] = SchedulerJob(job_id, name_of(job_id, name), state, phase, words, node, partition, ran=ran)
        numbers = re.match(r"(\d+)(?:_(\d+))?", job_id)
        number, task = numbers.groups("0") if numbers else ("0", "0")
        priorities[job_id] = (-int(priority) if priority.isdecimal() else 0, int(number), int(task))
    before: dict[str, int] = {}
    for job_id in sorted((i for i, job in jobs.items() if job.phase == "waiting"), key=priorities.__getitem__):
        place = before.setdefault(jobs[job_id].partition, 0)
        jobs[job_id] = replace(jobs[job_id], position=place)
        before[jobs[job_id].partition] += 1
    return jobs


def name_of(job_id: str, name: str) -> str:
    """The name of a job; that of an array's task with its index."""
    index = job_id.partition("_")[2]
    return f"{name}_{index}" if index.isdecimal() else name
