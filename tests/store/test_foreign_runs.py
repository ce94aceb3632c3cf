"""Runs that other programs wrote can be opened, with their own types, names and columns."""

import dataclasses
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from amp_core import RunError, diagnose, load_run
from amp_core.analysis import overview
from amp_core.schema import TABLES
from amp_core.store.run import Run
from amp_core.store.writer import RunWriter

FOREIGN_STEPS = pa.table(
    {
        "loss": pa.array([2.5, None, float("nan")], pa.float32()),
        "step": pa.array([0, 1, 2], pa.int32()),
        "skipped": pa.array([0, 1, 0], pa.uint8()),
        "samples": pa.array([32, 32, 32], pa.uint64()),
        "perplexity": pa.array([1.0, 2.0, 3.0]),
    }
)
FOREIGN_TENSORS = pa.table(
    {
        "step": pa.array([0, 0], pa.int16()),
        "name": pa.array(["a", "b"]).dictionary_encode(),
        "kind": pa.array(["weight_grad", "output_grad"], pa.large_string()),
        "exp_counts": pa.array([[1, 2], None], pa.large_list(pa.int32())),
        "rms": pa.array([1.0, 2.0], pa.float16()),
    }
)


def write_stream(table: pa.Table, file: Path) -> None:
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        for batch in table.to_batches(max_chunksize=1):
            writer.write_batch(batch)


@pytest.mark.parametrize("place", ["in a folder", "beside the head"])
@pytest.mark.parametrize("form", ["parquet", "arrows"])
def test_a_run_written_by_plain_arrow_is_read(foreign_run: Path, place: str, form: str) -> None:
    for name, table in (("steps", FOREIGN_STEPS), ("tensors", FOREIGN_TENSORS)):
        file = foreign_run / f"{name}.{form}"
        if place == "in a folder":
            (foreign_run / name).mkdir()
            file = foreign_run / name / f"anything-Else_1.{form}"
        if form == "parquet":
            pq.write_table(table, file)
        else:
            write_stream(table, file)
    run = load_run(foreign_run)
    for _ in range(2):
        steps = run.table("steps")
        assert steps.schema.names == [*(c.name for c in TABLES["steps"].columns), "perplexity"]
        assert steps.schema.field("step").type == pa.int64() and steps.schema.field("loss").type == pa.float64()
        assert steps.column("skipped").to_pylist() == [False, True, False]
        assert steps.column("loss").null_count == 1 and np.isnan(steps.column("loss")[2].as_py())
        assert steps.column("rank").to_pylist() == [0, 0, 0] and steps.column("lr").null_count == 3
        assert run.steps["perplexity"].tolist() == [1.0, 2.0, 3.0]
        assert run.tensors(name="b")["kind"].tolist() == ["output_grad"]
        assert run.tensors(name="a")["exp_counts"][0].tolist() == [1, 2]
        run.validate(full=False)
        assert run.refresh() is False
    assert len(run.fingerprint()) == 3


def test_a_stream_with_dictionaries_may_grow(foreign_run: Path) -> None:
    table = pa.concat_tables([FOREIGN_TENSORS] * 3).combine_chunks()
    write_stream(table, foreign_run / "whole")
    data = (foreign_run / "whole").read_bytes()
    run = load_run(foreign_run)
    rows = []
    for length in (*range(0, len(data), 97), len(data)):
        (foreign_run / "tensors.arrows").write_bytes(data[:length])
        run.refresh()
        rows.append(len(run.tensors()))
    assert rows == sorted(rows) and rows[-1] == 6 and len(set(rows)) > 4


def test_rows_of_another_program_are_sorted(foreign_run: Path) -> None:
    (foreign_run / "steps").mkdir()
    pq.write_table(pa.table({"step": [5, 3]}), foreign_run / "steps" / "a.parquet")
    pq.write_table(pa.table({"step": [4, 1], "rank": [1, None]}), foreign_run / "steps" / "b.parquet")
    assert load_run(foreign_run).steps["step"].tolist() == [1, 3, 4, 5]


@pytest.mark.parametrize(
    ("table", "says"),
    [
        (pa.table({"loss": [1.0]}), "has no column 'step'; each row of 'steps' needs it"),
        (pa.table({"step": ["one"]}), "has column 'step' of type string, which is no int64"),
        (pa.table({"step": [2.5]}), "has column 'step' of type double, which is no int64"),
        (pa.table({"step": pa.array([2**63], pa.uint64())}), "has column 'step' of type uint64, which is no int64"),
        (pa.table({"step": [1], "loss": [[1.0]]}), "has column 'loss' of type list<.*>, which is no double"),
    ],
)
def test_columns_of_a_wrong_type_raise_one_sentence(foreign_run: Path, table: pa.Table, says: str) -> None:
    pq.write_table(table, foreign_run / "steps.parquet")
    with pytest.raises(RunError, match=says) as caught:
        _ = load_run(foreign_run).steps
    assert "damaged" not in str(caught.value)


def test_links_are_not_followed(foreign_run: Path, tmp_path: Path) -> None:
    pq.write_table(pa.table({"step": [1]}), tmp_path / "elsewhere.parquet")
    (foreign_run / "steps").mkdir()
    (foreign_run / "steps" / "x.parquet").symlink_to(tmp_path / "elsewhere.parquet")
    assert len(load_run(foreign_run).steps) == 0


def test_frames_are_pandas_with_their_types(foreign_run: Path) -> None:
    pq.write_table(FOREIGN_STEPS, foreign_run / "steps.parquet")
    frame = load_run(foreign_run).steps
    assert isinstance(frame, pd.DataFrame)
    assert frame.dtypes[["step", "loss", "skipped"]].astype(str).tolist() == ["int64", "float64", "bool"]


def test_repr_names_the_run(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "a", name="my run"):
        pass
    run: Run = load_run(tmp_path / "a")
    assert repr(run) == f"Run('my run', finished, {str(tmp_path / 'a')!r})"
    assert dataclasses.replace(run.head, name="").name == "" and run.name == "my run"


@pytest.mark.parametrize("form", ["parquet", "arrows"])
@pytest.mark.parametrize("values", [["many", None, ""], [7, 7, 7]])
def test_an_additional_column_changes_no_count(foreign_run: Path, values: list[object], form: str) -> None:
    steps = FOREIGN_STEPS.append_column("stands_for", pa.array(values))
    file = foreign_run / f"steps.{form}"
    pq.write_table(steps, file) if form == "parquet" else write_stream(steps, file)
    run = load_run(foreign_run)
    assert "stands_for" in run.steps and "perplexity" in run.steps
    assert overview(run).steps_done == 3 and isinstance(diagnose(run), list)
