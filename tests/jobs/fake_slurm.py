"""Stand-ins for Slurm's commands, with jobs of ours in the queue: for what depends on their number, not on Slurm."""

import dataclasses
import os
import time
from pathlib import Path

import pytest

from amp_core.jobs import job_file
from tests.jobs.job_states import CPU


class FakeSlurm:
    """A folder of runs with `jobs` jobs, all of which wait in a Slurm whose squeue counts its calls."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, jobs: int) -> None:
        self.runs = folder / "runs"
        self._asked = folder / "asked"
        lines = []
        for i in range(jobs):
            name, token = f"job-{i:04d}", f"{i:08x}"
            (self.runs / name).mkdir(parents=True)
            created_ns = time.time_ns() - 10**9 * (jobs - i)
            record = job_file.Record(("x",), "slurm:gpu", created_ns, CPU.to_dict(), backend="slurm")
            job_file.write(self.runs / name, dataclasses.replace(record, token=token, backend_id=str(i + 1)))
            lines.append(f"{i + 1}|PENDING|{jobs - i}|gpu||Priority|{name}.{token}\n")
        self._answer = folder / "answer"
        self._answer.write_text("".join(lines))
        commands = folder / "bin"
        commands.mkdir()
        for name, line in (("squeue", f"echo x >> '{self._asked}'; exec cat '{folder}/answer'"), ("sbatch", "exit 1")):
            (commands / name).write_text(f"#!/bin/sh\n{line}\n")
            (commands / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{commands}{os.pathsep}{os.environ['PATH']}")

    def list_others(self, jobs: int) -> None:
        """Put this many jobs of other people before ours in squeue's answer."""
        ours = self._answer.read_text()
        others = "".join(f"{10**6 + i}|PENDING|{10**6 - i}|gpu||Priority|someone-{i}\n" for i in range(jobs))
        self._answer.write_text(others + ours)

    def become_array(self, *states: str) -> None:
        """Make our jobs the tasks of array 7, whose submission was not confirmed. `states` are what squeue says of
        each, between its id and its name."""
        folders = sorted(self.runs.iterdir())
        for index, folder in enumerate(folders):
            record = dataclasses.replace(job_file.read(folder), token=f"5f0c2a1b_{index}", backend_id=None)
            job_file.write(folder, record)
        self._answer.write_text("".join(f"7_{i}|{state}|runs.5f0c2a1b\n" for i, state in enumerate(states)))

    def times_asked(self) -> int:
        """How often squeue was run."""
        return len(self._asked.read_text().split())
