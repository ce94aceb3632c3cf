"""`ampscope compare --array`, and the comparison of an array's runs that have ended, without a Slurm."""

import json
import os
import shutil
from pathlib import Path

import pytest

from amp_core.__main__ import main
from amp_core.jobs import job_file
from amp_core.jobs.job_file import Record
from tests.paths import SAMPLE_RUNS

NAMES = ("fp32", "bf16", "fp16")


@pytest.fixture
def array(tmp_path: Path) -> Path:
    """The folder of an array with two runs that finished and one that was cancelled while it waited."""
    out = tmp_path / "cmp"
    for name in NAMES:
        if name == "fp16":
            (out / name).mkdir()
            head = {"schema": 1, "run_id": "a", "name": name, "created_at": "2026-01-01", "status": "stopped"}
            reason = "the job was cancelled in Slurm (CANCELLED)"
            (out / name / "run.json").write_text(
                json.dumps(head | {"end_reason": reason, "config": {"precision": name}})
            )
        else:
            shutil.copytree(SAMPLE_RUNS / name, out / name)
        job_file.write(out / name, Record(("x",), "slurm", 1, backend="slurm", backend_id="7_0", ended_s=2.0))
    job_file.write_array(out, NAMES)
    return out


def test_runs_that_have_ended_are_compared_in_the_order_of_the_comparison(
    array: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", "--out", os.fspath(array)]) == 1
    printed = capsys.readouterr()
    assert printed.err == "fp16 stopped: the job was cancelled in Slurm (CANCELLED)\n"
    table = printed.out.partition("\n\n")[2].splitlines()
    assert [line.split()[0] for line in table[:4]] == ["precision", *NAMES]
    assert "bf16: convergence parity" in printed.out
    assert main(["compare", "--out", os.fspath(array), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["baseline"] == "fp32" and [row["run"] for row in document["runs"]] == list(NAMES)


def test_runs_that_have_not_ended_are_named(array: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(array / "fp16")
    (array / "fp16").mkdir()
    job_file.write(array / "fp16", Record(("x",), "slurm", 10**18 * 2, backend="slurm", backend_id="7_2", token="a_2"))
    assert main(["compare", "--out", os.fspath(array)]) == 2
    assert "holds runs that have not ended: fp16 (job 7_2, queued); compare them when" in capsys.readouterr().err


def test_a_removed_run_is_named(array: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(array / "fp16")
    assert main(["compare", "--out", os.fspath(array)]) == 1
    printed = capsys.readouterr()
    assert printed.err == "fp16 was removed\n" and "bf16: convergence parity" in printed.out


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (["--precisions", "fp32"], "precisions='fp32' applies to training, and out="),
        (["--seeds", "3"], "seeds=3 applies to training, and out="),
        (["--steps", "20"], "steps=20 applies to training, and out="),
        (["--on", "slurm"], "on='slurm' applies to training, and out="),
        (["--array"], "array=True applies to training, and out="),
        (["--gpus", "1"], "gpus=1 applies to on='slurm'"),
    ],
)
def test_what_applies_to_training_is_refused_for_runs_that_are_compared(
    array: Path, capsys: pytest.CaptureFixture[str], more: list[str], expected: str
) -> None:
    assert main(["compare", "--out", os.fspath(array), *more]) == 2
    assert capsys.readouterr().err.startswith(f"ampscope: {expected}")


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ([], "array=True applies to on='slurm', not to on='local'; leave it out, or give --on slurm"),
        (["--on", "ray"], "array=True applies to on='slurm', not to on='ray'; leave it out, or give --on slurm"),
        (["--on", "slurm", "--block", "5"], "block=5 applies to interleaved runs"),
        (["--on", "slurm", "--json"], "json=True applies to runs that have ended"),
        (["--on", "slurm", "--requeue"], "requeue=True needs checkpoints to resume from; give --checkpoint-every"),
    ],
)
def test_an_array_that_is_not_possible_is_refused_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], expected: str
) -> None:
    assert main(["compare", "--out", os.fspath(tmp_path / "cmp"), "--array", *more]) == 2
    assert capsys.readouterr().err.startswith(f"ampscope: {expected}")
    assert not (tmp_path / "cmp").exists()


@pytest.mark.parametrize("given", [["a.json", "b.json"], ["--localise", "a", "b"]])
def test_recorded_runs_and_traces_are_no_array(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *given, "--array"]) == 2
    assert "array=True applies to training" in capsys.readouterr().err


def test_a_comparison_in_one_job_takes_no_requeue(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["compare", "--out", os.fspath(tmp_path / "cmp"), "--on", "slurm", "--requeue", "--checkpoint-every", "5"]
    assert main(line) == 2
    assert "requeue=True applies to single trainings and the tasks of an array" in capsys.readouterr().err
