"""Runs of a Slurm array are compared with the names of their nodes, and never as interleaved."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from amp_core import Run, load_run
from amp_core.analysis import compare
from tests.synthetic import write_rows


def task(path: Path, job: Any, **config: object) -> Run:
    """A run of 60 steps whose head says this of its Slurm job."""
    columns = {"step": range(60), "step_ms": np.full(60, 10.0), "samples": [16] * 60}
    folder = write_rows(path, steps=columns, config={"workload": "w", "steps": 60} | config, environment={"slurm": job})
    return load_run(folder)


def of_array(index: int, *nodes: str, array: str = "12") -> dict[str, object]:
    return {"id": f"{array}_{index}", "array": array, "nodes": list(nodes)}


def notes(*runs: Run) -> str:
    return " ".join(compare(runs).notes)


def test_the_nodes_of_all_tasks_are_named(tmp_path: Path) -> None:
    one, two = task(tmp_path / "fp32", of_array(0, "n2")), task(tmp_path / "bf16", of_array(1, "n1", "n3"))
    text = notes(one, two)
    assert (
        "fp32 and bf16 were tasks of Slurm array 12 on n1, n2 and n3, not interleaved, so their times compare nodes too"
        in text
    )
    assert "Runs were" not in text  # neither interleaved, nor of one machine
    assert not compare([one, two]).recipes["paired"].any()


def test_tasks_on_one_node_are_not_interleaved_either(tmp_path: Path) -> None:
    text = notes(*(task(tmp_path / str(i), of_array(i, "n1")) for i in range(2)))
    assert "array 12 on n1, not interleaved, so their times compare background load too" in text


def test_only_the_tasks_are_named(tmp_path: Path) -> None:
    tasks = [task(tmp_path / f"task{i}", of_array(i, "n1", array="7")) for i in range(2)]
    text = notes(tasks[0], task(tmp_path / "other", {"id": "8", "array": None, "nodes": ["n9"]}), tasks[1])
    assert "task0 and task1 were tasks of Slurm array 7 on n1," in text and "n9" not in text


def test_interleaved_runs_of_a_job_within_an_array_stay_interleaved(tmp_path: Path) -> None:
    turns = {"id": "a", "block_steps": 5}
    interleaved = [task(tmp_path / str(i), of_array(i, "n1"), comparison=turns, seed=0) for i in range(2)]
    assert "Runs were interleaved" in notes(*interleaved) and "Slurm" not in notes(*interleaved)
    assert "array 12 on n1 and n2, not interleaved" in notes(*interleaved, task(tmp_path / "alone", of_array(2, "n2")))


@pytest.mark.parametrize(
    "job", [None, {}, "12_0", {"array": 12}, {"array": None, "nodes": ["n1"]}, {"array": ["12"], "nodes": "n1"}]
)
def test_runs_of_no_array_are_not_named_as_tasks(tmp_path: Path, job: Any) -> None:
    others = [task(tmp_path / name, job) for name in ("a", "b")]
    assert "Runs were not interleaved" in notes(*others) and "Slurm" not in notes(*others)
    tasks = [task(tmp_path / f"task{i}", of_array(i, "n1")) for i in range(2)]
    assert "task0 and task1 were tasks of Slurm array 12 on n1, not interleaved" in notes(*others, *tasks)


def test_nodes_that_were_not_recorded_are_not_invented(tmp_path: Path) -> None:
    text = notes(*(task(tmp_path / str(i), {"array": "12", "nodes": "n1"}) for i in range(2)))
    assert "array 12 on nodes that are not recorded, not interleaved" in text
