"""How a real Slurm ends jobs: memory, preemption, a failed node; and submissions that it does not confirm."""

import dataclasses
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from amp_core import RunError, diagnose, load_run
from amp_core.jobs import find, job_file, listing, start
from amp_core.jobs.backends import scheduler
from amp_core.jobs.backends.job_script import last_attempt
from amp_core.settings.resources import Resources
from tests.jobs.job_states import CPU, wait_for_end, wait_for_state
from tests.slurm_cluster import Cluster
from tests.waiting import wait_for

Tiny = Callable[[float], list[str]]
ON = Resources(on="slurm", time="10")


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "FILES_S", 2.0)


def check_killed(folder: Path, status: str, cause: str, state: str, severity: str) -> None:
    """The job has ended for that reason, and its run says so."""
    wait_for_end(folder)
    head = load_run(folder).head
    assert (head.status, head.job["cause"], head.job["state"]) == (status, cause, state)
    assert head.end_reason is not None and state in head.end_reason
    found = [f.severity for f in diagnose(load_run(folder)) if f.code == "killed-by-scheduler"]
    assert found == [severity]


def test_a_job_above_its_memory_limit_is_killed_and_says_so(
    slurm: Cluster, runs: Path, tmp_path: Path, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Path(tiny(600)[3])
    script.write_text("held = b'x' * 400_000_000\n" + script.read_text())
    monkeypatch.setenv("SBATCH_MEM_PER_NODE", "100")  # MB
    job = start(CPU, runs, command=tiny(600), resources=ON)
    check_killed(job.folder, "failed", "memory", "FAILED", "error")


@pytest.mark.parametrize("partition", ["cancelled", pytest.param("requeued", marks=pytest.mark.whole)])
def test_a_preempted_job_says_so(
    slurm: Cluster, runs: Path, tiny: Tiny, monkeypatch: pytest.MonkeyPatch, partition: str
) -> None:
    """Also where the partition queues preempted jobs again: without `requeue` a job is never started twice."""
    monkeypatch.setenv("SBATCH_EXCLUSIVE", "exclusive")
    job = start(CPU, runs, "low", command=tiny(600), resources=dataclasses.replace(ON, partition=partition))
    wait_for_state(job.folder, "running")
    other = start(CPU, runs, "high", command=tiny(0), resources=dataclasses.replace(ON, partition="first"))
    check_killed(job.folder, "stopped", "preemption", "PREEMPTED", "warning")
    wait_for_state(other.folder, "finished")


@pytest.mark.whole
def test_a_preempted_job_with_requeue_waits_and_resumes(
    slurm: Cluster, runs: Path, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SBATCH_EXCLUSIVE", "exclusive")
    resources = dataclasses.replace(ON, partition="requeued", requeue=True)
    job = start(CPU, runs, "low", command=tiny(600), resources=resources)
    wait_for_state(job.folder, "running")
    other = start(CPU, runs, "high", command=tiny(0), resources=dataclasses.replace(ON, partition="first"))
    assert wait_for_state(job.folder, "queued").backend_id == job.backend_id
    wait_for_state(other.folder, "finished")
    slurm.start_now(str(job.backend_id))
    wait_for(lambda: (a := last_attempt(job.folder)) is not None and a.restarts == 1)
    wait_for_state(job.folder, "running")
    find(job.folder).request_stop()
    wait_for_end(job.folder)
    assert "killed-by-scheduler" not in {f.code for f in diagnose(load_run(job.folder))}


@pytest.fixture
def node(slurm: Cluster) -> Iterator[Cluster]:
    """The cluster, whose node n2 works again after the test."""
    yield slurm
    slurm.start_node("n2")


@pytest.mark.whole
def test_a_job_whose_node_crashed_says_so(node: Cluster, runs: Path, tiny: Tiny) -> None:
    job = start(CPU, runs, command=tiny(600), resources=dataclasses.replace(ON, partition="requeued"))
    wait_for_state(job.folder, "running")
    node.crash_node("n2")
    check_killed(job.folder, "failed", "node failure", "NODE_FAIL", "error")


@pytest.mark.whole
def test_a_job_with_requeue_survives_the_crash_of_its_node(node: Cluster, runs: Path, tiny: Tiny) -> None:
    resources = dataclasses.replace(ON, partition="requeued", requeue=True)
    job = start(CPU, runs, command=tiny(600), resources=resources)
    wait_for_state(job.folder, "running")
    node.crash_node("n2")
    wait_for_state(job.folder, "queued")
    node.start_node("n2")
    node.start_now(str(job.backend_id))
    wait_for(lambda: (a := last_attempt(job.folder)) is not None and a.restarts == 1)
    wait_for_state(job.folder, "running")
    find(job.folder).request_stop()
    wait_for_end(job.folder)
    assert find(job.folder).state == "stopped" and len(listing(runs)) == 1


@pytest.mark.parametrize("submits", [True, False])
def test_an_sbatch_that_hangs_neither_loses_nor_doubles_the_job(
    slurm: Cluster, runs: Path, tiny: Tiny, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, submits: bool
) -> None:
    commands = tmp_path / "bin"
    commands.mkdir()
    real = shutil.which("sbatch")
    line = f'{real} "$@" >/dev/null; ' if submits else ""
    (commands / "sbatch").write_text(f"#!/bin/sh\n{line}exec sleep 600\n")
    (commands / "sbatch").chmod(0o755)
    with monkeypatch.context() as patch:
        patch.setenv("PATH", f"{commands}{os.pathsep}{os.environ['PATH']}")
        patch.setattr("amp_core.jobs.backends.slurm.SUBMIT_TIMEOUT_S", 2.0)
        with pytest.raises(RunError, match="do not submit again"):
            start(CPU, runs, "hung", command=tiny(0), resources=ON)
    monkeypatch.setattr(scheduler, "SETTLE_S", 2.0)
    wait_for_end(runs / "hung")
    assert find(runs / "hung").state == ("finished" if submits else "failed")
    token = f"hung.{job_file.read(runs / 'hung').token}"
    assert slurm.names().count(token) == int(submits)


@pytest.mark.whole
def test_each_task_of_an_array_counts_in_the_place_of_a_job_behind_it(slurm: Cluster, runs: Path, tiny: Tiny) -> None:
    array = slurm.ask("sbatch", "--parsable", "--array=1-300", "--partition=down", "--wrap=true").strip()
    job = start(CPU, runs, command=tiny(0), resources=dataclasses.replace(ON, partition="down"))
    wait_for(lambda: find(job.folder).queue_position is not None)
    assert find(job.folder).queue_position == 300
    slurm.do("scancel", array)
    find(job.folder).request_stop()
    wait_for_end(job.folder)
