"""Export for other tools: Parquet, CSV without formulas, TensorBoard."""

import csv
import json
import math
import tracemalloc
from pathlib import Path

import pandas as pd
import pytest

from amp_core import RunError, load_run
from amp_core.__main__ import main
from amp_core.interop import export, import_tensorboard
from amp_core.store.writer import RunWriter
from tests.paths import SAMPLE_RUNS


def test_parquet_is_itself_a_run(tmp_path: Path) -> None:
    run = load_run(SAMPLE_RUNS / "fp16-overflow")
    files = export(run, "parquet", tmp_path / "out")
    assert {f.name for f in files} >= {"run.json", "steps.parquet", "tensors.parquet", "events.parquet"}
    again = load_run(tmp_path / "out")
    again.validate(full=True)
    pd.testing.assert_frame_equal(again.steps, run.steps)
    assert len(pd.read_parquet(tmp_path / "out" / "tensors.parquet")) == len(run.tensors())


def hostile(folder: Path) -> Path:
    with RunWriter(folder) as writer:
        writer.append("steps", {"step": [0, 1], "loss": [math.nan, None], "grad_norm": [-0.0, math.inf]})
        names = ['=HYPERLINK("http://x","y")', "+1+1", "-2", "@S(A1)", "\t=1", "\r=1", "\uff1d1", 'plain, "quoted"\n=2']
        rows = {"step": [0] * len(names), "name": names, "exp_min": [-3] * len(names)}
        writer.append("tensors", rows | {"exp_counts": [[1, 2]] * len(names)})
    return folder


def test_csv_holds_no_formulas_and_distinguishes_null_from_nan(tmp_path: Path) -> None:
    export(load_run(hostile(tmp_path / "run")), "csv", tmp_path / "out")
    with open(tmp_path / "out" / "tensors.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 8
    for row in rows:
        for cell in row.values():
            assert not cell.startswith(("=", "+", "-=", "@", "\t", "\r", "\uff1d")), cell
    assert rows[0]["name"] == '\'=HYPERLINK("http://x","y")' and rows[7]["name"] == 'plain, "quoted"\n=2'
    assert rows[2]["name"] == "-2" and rows[2]["exp_min"] == "-3"  # a number stays a number
    assert json.loads(rows[0]["exp_counts"]) == [1, 2]
    with open(tmp_path / "out" / "steps.csv", newline="", encoding="utf-8") as file:
        nan, null = csv.DictReader(file)
    assert (nan["loss"], null["loss"], null["grad_norm"], nan["lr"]) == ("nan", "", "inf", "")


def test_csv_reads_back_as_the_same_numbers(tmp_path: Path) -> None:
    run = load_run(SAMPLE_RUNS / "bf16")
    export(run, "csv", tmp_path / "out")
    steps = pd.read_csv(tmp_path / "out" / "steps.csv")
    pd.testing.assert_series_equal(steps.loss, run.steps.loss)


def test_the_tensorboard_log_has_the_values_of_the_run(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs TensorBoard's package")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = load_run(SAMPLE_RUNS / "fp16-overflow")
    (file,) = export(run, "tensorboard", tmp_path / "log")
    assert "tfevents" in file.name
    log = EventAccumulator(str(tmp_path / "log"), size_guidance={"scalars": 0, "histograms": 0, "tensors": 0}).Reload()
    losses = {s.step: s.value for s in log.Scalars("amp/loss")}
    assert len(losses) == len(run.steps)
    assert losses[10] == pytest.approx(run.steps.set_index("step").loss[10])
    assert sum(s.value for s in log.Scalars("amp/skipped")) == run.steps.skipped.sum() > 0
    rows = run.tensors(kind="weight_grad")
    row = rows[rows.normal > 0].iloc[0]  # all values of the first steps overflowed: nothing to draw
    drawn = next(h for h in log.Histograms(f"log2_magnitude/weight_grad/{row['name']}") if h.step == row["step"])
    assert drawn.histogram_value.num == row["normal"] + row["subnormal"]
    assert drawn.histogram_value.max == math.floor(math.log2(row["absmax"])) + 1


def test_memory_does_not_grow_with_the_run(tmp_path: Path) -> None:
    """Rows as Python objects take ten times as much memory as in a table."""
    pytest.importorskip("tensorboard", reason="needs TensorBoard's package")
    peaks = []
    for samples in (100, 500):  # even the smaller run fills a batch of `to_tensorboard`
        with RunWriter(tmp_path / f"run-{samples}") as writer:
            names = [f"w{i}" for i in range(10)]
            for step in range(samples):
                rows = {"step": [step] * 10, "name": names, "kind": ["weight_grad"] * 10, "exp_min": [-20] * 10}
                writer.append("tensors", rows | {"exp_counts": [list(range(1000, 1030))] * 10})
        run = load_run(tmp_path / f"run-{samples}")
        assert run.table("tensors").num_rows == 10 * samples
        tracemalloc.start()
        export(run, "tensorboard", tmp_path / f"log-{samples}")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.5 * peaks[0]


def test_scalars_survive_export_and_import(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs TensorBoard's package")
    run = load_run(SAMPLE_RUNS / "fp16-overflow")
    export(run, "tensorboard", tmp_path / "log")
    imported = import_tensorboard(tmp_path / "log", tmp_path / "back")
    assert set(imported.understood) == {
        "loss", "loss_scale", "skipped", "grad_norm", "lr", "step_ms", "memory_peak_bytes",
    }  # fmt: skip
    assert not imported.tensors  # its histograms count exponents: read as values, they would show gradients of size 20
    back = load_run(tmp_path / "back")
    assert back.steps.skipped.tolist() == run.steps.skipped.tolist()
    assert back.steps.loss_scale.tolist() == run.steps.loss_scale.tolist()  # powers of two are exact in float32
    assert back.steps.time_s.iloc[-1] == pytest.approx(run.steps.time_s.iloc[-1] - run.steps.time_s.iloc[0], abs=1e-3)


def test_the_command_exports_to_every_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["export", str(SAMPLE_RUNS / "fp32"), "--to", "csv", "--out", str(out)]) == 0
    assert f"{out / 'steps.csv'}" in capsys.readouterr().out
    assert main(["export", str(SAMPLE_RUNS / "fp32"), "--to", "csv", "--out", str(out)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert main(["export", str(SAMPLE_RUNS / "fp32"), "--to", "excel", "--out", str(tmp_path / "x")]) == 2
    assert main(["export", str(tmp_path / "none"), "--to", "csv", "--out", str(tmp_path / "x")]) == 2
    assert not (tmp_path / "x").exists()
    with pytest.raises(RunError, match=r"^to='excel' is unknown; choose one of tensorboard, parquet, csv"):
        export(load_run(SAMPLE_RUNS / "fp32"), "excel", tmp_path / "x")
