"""Faults of the place where a training runs: a scheduler ended its job."""

import dataclasses
from pathlib import Path

from amp_core import load_run
from amp_core.store.atomic import replace_file
from tests.findings.zoo.case import case, fp16


def ended_by_a_scheduler(into: Path, cause: str | None, state: str) -> None:
    """A run that SIGTERM stopped, as `amp_core.jobs` records it."""
    fp16(into).run()
    job = {"backend": "slurm", "id": "12", "node": "n1", "state": state, "cause": cause}
    head = dataclasses.replace(load_run(into).head, status="stopped", end_reason="stopped by SIGTERM", job=job)
    replace_file(into / "run.json", head.to_json().encode())


@case("killed-by-scheduler", "slurm job 12 on n1")
def time_limit(into: Path, faulty: bool) -> None:
    ended_by_a_scheduler(into, "time limit" if faulty else None, "TIMEOUT" if faulty else "CANCELLED")


@case("killed-by-scheduler", "slurm job 12 on n1")
def memory_limit(into: Path, faulty: bool) -> None:
    ended_by_a_scheduler(into, "memory" if faulty else "cancelled", "OUT_OF_MEMORY" if faulty else "CANCELLED")
