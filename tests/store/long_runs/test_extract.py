"""Runs of any length in bounded memory: the steps of an extract, which keep every spike."""

import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from amp_core import RunError, load_run
from amp_core.analysis import class_shares, sampled_steps
from amp_core.analysis.numerics.layers import layer_exponents, layer_health, layer_trace
from amp_core.store.long_runs.extract import Extract, open_extract
from amp_core.store.writer import RunWriter
from tests import synthetic
from tests.serve.big_runs import SPIKE, big_run, write_steps, write_tensors

TENSORS, SAMPLED = 5, 400
ROWS = SAMPLED * TENSORS * 2
SPIKED = f"blocks.{SPIKE:03d}.linear.weight"


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """400 sampled steps in segments of a few tens, with a spike in the middle."""
    folder = tmp_path_factory.mktemp("long") / "run"
    with big_run(folder, SAMPLED, ROWS, TENSORS, seal_bytes=60_000):
        pass
    assert len(list((folder / "tensors").glob("*.parquet"))) > 10
    return folder


def test_short_runs_are_read_whole(tmp_path: Path) -> None:
    path = synthetic.write(tmp_path / "a", "healthy")
    whole, part = load_run(path), open_extract(path)
    assert part.table("tensors").equals(whole.table("tensors")) and part.steps.equals(whole.steps)
    assert isinstance(part, Extract) and part.sampled_steps is None


def test_an_extract_is_bounded_and_of_whole_steps(long: Path) -> None:
    run, whole = Extract(long, most_rows=300), load_run(long)
    table = run.table("tensors")
    assert 100 <= table.num_rows <= 460 and run.sampled_steps == SAMPLED
    steps = sampled_steps(run, "weight_grad")
    assert steps[0] == 0 and steps[-1] == SAMPLED - 1
    assert table.equals(whole.thinned(steps).table("tensors"))
    assert max(np.diff(steps)) <= 3 * SAMPLED / len(steps)  # spread over the run
    assert run.steps.equals(whole.steps)  # all rows of each step


def test_an_extract_is_thinned_like_a_run(long: Path) -> None:
    part, whole = Extract(long, most_rows=300), load_run(long)
    steps = sampled_steps(part, "weight_grad")[1:4]
    few = part.thinned(steps)
    assert sampled_steps(few, "weight_grad") == steps and few.table("tensors").equals(
        whole.thinned(steps).table("tensors")
    )
    assert len(sampled_steps(part, "weight_grad")) > 4


@pytest.mark.parametrize("most", [20, 100, 300, 1000])
def test_no_spike_disappears(long: Path, most: int) -> None:
    run = Extract(long, most_rows=most)
    shares = class_shares(run, "weight_grad").set_index("name")
    assert list(shares.index[shares["inf_frac"] > 0]) == [SPIKED]
    health = layer_health(layer_trace(run, "weight_grad", SPIKED))
    assert health.first_nonfinite == SAMPLED // 2 and health.nonfinite_samples == 1
    assert health.samples == SAMPLED
    assert SAMPLED // 2 in set(layer_exponents(run, "weight_grad", SPIKED)["step"])


def test_counts_beyond_the_precision_of_a_float_are_accepted(long: Path, tmp_path: Path) -> None:
    """As in a damaged or hostile run; they are rounded, since they are only compared."""
    shutil.copytree(long, tmp_path / "run")
    segment = sorted((tmp_path / "run" / "tensors").glob("*.parquet"))[0]
    rows = pq.read_table(segment)
    place = rows.column_names.index("zero")
    pq.write_table(
        rows.set_column(place, "zero", pa.array([2**53 + 1] * rows.num_rows, rows.schema.field(place).type)), segment
    )
    assert class_shares(Extract(tmp_path / "run", most_rows=300), "weight_grad").shape[0] == TENSORS


def test_one_tensor_is_read_at_every_sampled_step(long: Path) -> None:
    columns = ["step", "absmax", "inf", "dtype"]
    result = Extract(long, most_rows=100).of_tensor("output_grad", SPIKED, columns)
    whole = load_run(long).tensors(kind="output_grad", name=SPIKED)[columns]
    assert result.to_pandas().equals(whole.reset_index(drop=True))
    assert Extract(long, most_rows=100).of_tensor("activation", SPIKED, columns).num_rows == 0


def test_null_and_nan_of_one_tensor_stay_distinct(tmp_path: Path) -> None:
    steps = list(range(40))
    rows = {"step": steps, "name": ["a"] * 40, "kind": ["weight_grad"] * 40, "dtype": ["float16"] * 40, "inf": [0] * 40}
    rows |= {"zero": [7, None] * 20, "rms": [1.0, float("nan")] * 20}
    with RunWriter(tmp_path / "run") as writer:
        writer.append("tensors", rows)
    whole = load_run(tmp_path / "run").table("tensors")
    columns = ["step", "name", "dtype", "inf", "zero", "rms", "nan"]
    run = Extract(tmp_path / "run", most_rows=10)
    assert run.of_tensor("weight_grad", "a", columns).to_pandas().equals(whole.select(columns).to_pandas())
    assert run.of_tensor("weight_grad", "a", columns).column("zero").null_count == 20


def test_rows_of_a_file_without_kinds_have_the_default_kind(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "run") as writer:
        writer.append("steps", {"step": [0]})
    rows = pa.table({"step": range(40), "name": ["a", "b"] * 20, "absmax": [0.5] * 40})
    pq.write_table(rows, tmp_path / "run" / "tensors.parquet")
    run = Extract(tmp_path / "run", most_rows=10)
    assert run.of_tensor("weight_grad", "a", ["step", "kind"]).to_pylist()[1] == {"step": 2, "kind": "weight_grad"}
    assert run.of_tensor("output_grad", "a", ["step"]).num_rows == 0


def test_rows_without_a_name_and_groups_without_rows_are_passed_over(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "run") as writer:
        writer.append("steps", {"step": [0]})
    rows = pa.table({"step": range(40), "name": ["a", None] * 20, "inf": [3] * 40})
    with pq.ParquetWriter(tmp_path / "run" / "tensors.parquet", rows.schema) as file:
        for part in (rows, rows.slice(0, 0), rows.slice(20)):
            file.write_table(part)
    run = Extract(tmp_path / "run", most_rows=10)
    columns = run.of_tensor("weight_grad", "a", ["step", "inf", "zero"]).to_pydict()
    assert columns["step"] == sorted([*range(0, 40, 2), *range(20, 40, 2)])
    assert columns["inf"] == [3] * 30 and columns["zero"] == [None] * 30


@pytest.mark.parametrize("most", [60, 10_000])
def test_an_extract_follows_a_growing_run(tmp_path: Path, most: int) -> None:
    with big_run(tmp_path / "run", 40, 400, TENSORS, seal_bytes=20_000) as writer:
        run = Extract(tmp_path / "run", most_rows=most)
        assert sampled_steps(run, "weight_grad")[-1] == 39 and len(run.steps) == 40
        before = run.snapshot()
        for step in range(40, 90):
            write_steps(writer, step, step + 1)
            write_tensors(writer, step, TENSORS, spike=step == 60)
            assert run.refresh()
            assert sampled_steps(run, "weight_grad")[-1] == step and len(run.steps) == step + 1
            assert run.table("tensors").num_rows <= 400 or most == 10_000
        assert sampled_steps(before, "weight_grad")[-1] == 39 and len(before.steps) == 40
    run.refresh()
    assert 60 in sampled_steps(run, "weight_grad") and run.status == "finished"
    assert Extract(tmp_path / "run", most).table("tensors").num_rows == run.table("tensors").num_rows


def test_snapshots_share_the_rows_of_sealed_segments(tmp_path: Path) -> None:
    """Several sessions each hold a snapshot of the run; rows that they have in common are in memory once."""
    with big_run(tmp_path / "run", 900, 9_000, TENSORS, seal_bytes=400_000) as writer:
        run = Extract(tmp_path / "run", most_rows=500)
        places, shared = [], []
        for step in range(900, 920):
            write_tensors(writer, step, TENSORS)
            run.refresh()
            chunks = run.table("tensors").column("absmax").chunks
            places.append({chunk.buffers()[1].address + 8 * chunk.offset: len(chunk) for chunk in chunks if len(chunk)})
            shared.append(run.snapshot())  # as a session does
            assert sampled_steps(run, "weight_grad")[-1] == step
        assert len(list((tmp_path / "run" / "tensors").glob("*.parquet"))) >= 3
        same = set.intersection(*(set(p) for p in places))
        assert sum(rows for place, rows in places[-1].items() if place in same) > 0.5 * sum(places[-1].values())


def test_rows_of_steps_that_are_dropped_later_are_freed(tmp_path: Path) -> None:
    with big_run(tmp_path / "run", 40, 400, TENSORS, seal_bytes=200_000) as writer:
        run = Extract(tmp_path / "run", most_rows=400)
        for first in range(40, 1240, 20):
            for step in range(first, first + 20):
                write_steps(writer, step, step + 1)
                write_tensors(writer, step, TENSORS)
            run.refresh()
            run.table("tensors")
        held = sum(table.num_rows for _, table in run._kept.values())
        assert held <= 1.5 * run.table("tensors").num_rows


def test_a_damaged_segment_raises_one_sentence(long: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(long, tmp_path / "run")
    victim = sorted((folder / "tensors").glob("*.parquet"))[3]
    data = victim.read_bytes()
    for damaged in (data[: len(data) // 2], b"", data[:-8] + b"\x00" * 8):
        victim.write_bytes(damaged)
        with pytest.raises(RunError, match="is damaged"):
            Extract(folder, most_rows=100).table("tensors")
