"""What a resumed run keeps of the processes that wrote it before."""

from pathlib import Path
from typing import Any

import pytest

from amp_core import load_run
from amp_core.hardware.host import slurm_job
from amp_core.store.writer import RunWriter


def written_on(folder: Path, job: Any) -> Any:
    """Write the run, or resume it, in this Slurm job; returns the job that its head then has."""
    writer = RunWriter(folder, environment={"torch": "2", "slurm": job}, resume=(folder / "run.json").exists())
    writer.close("stopped", "queued again")
    return load_run(folder).head.environment["slurm"]


def test_a_resumed_run_names_the_nodes_of_all_its_starts(tmp_path: Path) -> None:
    first, again = ({"id": "12_0", "array": "12", "nodes": [node]} for node in ("n1", "n2"))
    assert written_on(tmp_path / "a", first) == first
    assert written_on(tmp_path / "a", again) == again | {"nodes": ["n1", "n2"]}
    assert written_on(tmp_path / "a", first) == first | {"nodes": ["n1", "n2"]}


@pytest.mark.parametrize("before", [None, {"nodes": "n1"}, "n1"])
def test_a_start_outside_of_slurm_adds_no_node(tmp_path: Path, before: Any) -> None:
    written_on(tmp_path / "a", before)
    assert written_on(tmp_path / "a", {"id": "12", "nodes": ["n2"]}) == {"id": "12", "nodes": ["n2"]}
    assert written_on(tmp_path / "a", None) is None


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, None),
        ({"JOB_ID": "12", "JOB_NODELIST": "n[1-2]"}, {"id": "12", "array": None, "nodes": ["n[1-2]"]}),
        (
            {"JOB_ID": "15", "ARRAY_JOB_ID": "12", "ARRAY_TASK_ID": "3", "JOB_NODELIST": "n1"},
            {"id": "12_3", "array": "12", "nodes": ["n1"]},
        ),
        ({"JOB_ID": "12"}, {"id": "12", "array": None, "nodes": []}),
    ],
)
def test_the_slurm_job_of_a_process_is_that_of_its_variables(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: dict[str, object] | None
) -> None:
    for name in ("JOB_ID", "ARRAY_JOB_ID", "ARRAY_TASK_ID", "JOB_NODELIST"):
        monkeypatch.delenv(f"SLURM_{name}", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert slurm_job() == expected
