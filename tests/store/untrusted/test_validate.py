"""A run that passes `validate(full=True)` can be drawn: every row is checked against the schema."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from amp_core import RunError, load_run
from amp_core.schema import TABLES
from amp_core.store.untrusted.validate import MAX_BINS, MAX_TEXT
from amp_core.store.writer import RunWriter

GOOD = {
    "step": [0],
    "name": ["w"],
    "kind": ["weight_grad"],
    "dtype": ["float16"],
    "numel": [10],
    "zero": [1],
    "subnormal": [2],
    "normal": [3],
    "inf": [3],
    "nan": [1],
    "exp_min": [-24],
    "exp_counts": [[1, 0, 4]],
    "absmax": [float("nan")],
}


def written(folder: Path, table: str, **columns: Any) -> Callable[[bool], None]:
    with RunWriter(folder) as writer:
        writer.append(table, columns)
    return lambda full: load_run(folder).validate(full=full)


def test_valid_rows_pass(tmp_path: Path) -> None:
    written(tmp_path / "a", "tensors", **GOOD)(True)
    written(tmp_path / "b", "tensors", step=[0], name=["w"])(True)  # only required columns
    written(tmp_path / "c", "steps", step=[0, 1], loss=[float("inf"), None], grad_norm=[float("nan"), -0.0])(True)
    masks = {"kind": ["constant overflow"], "value": [-1e9], "limit": [65504.0]}  # as added by attention masks
    written(tmp_path / "e", "events", **masks)(True)
    lower = {"name": ["w"], "loss_change": [-0.01]}  # the loss in 16 bits may be lower than in FP32
    written(tmp_path / "f", "audits", step=[0], **lower)(True)
    RunWriter(tmp_path / "d").close()
    load_run(tmp_path / "d").validate(full=True)


@pytest.mark.parametrize(
    ("table", "columns", "says"),
    [
        (
            "tensors",
            GOOD | {"zero": [2]},
            r"tensors row step=0 name='w' has counts that add up to 11 instead of numel=10",
        ),
        ("tensors", GOOD | {"numel": [-1]}, "tensors has a negative 'numel'; it counts from 0"),
        ("tensors", GOOD | {"nan": [-1], "inf": [5]}, "tensors has a negative 'nan'"),
        ("tensors", GOOD | {"kind": ["gradient"]}, "tensors has kind='gradient'; it must be one of weight_grad"),
        ("tensors", GOOD | {"exp_min": [-5000]}, "tensors has exp_min=-5000; exponents run from -1100 to 1100"),
        ("tensors", GOOD | {"exp_min": [5000]}, "tensors has exp_min=5000"),
        ("tensors", GOOD | {"exp_counts": [[0] * (MAX_BINS + 1)]}, "tensors has an exponent histogram of 4097 bins"),
        ("tensors", GOOD | {"exp_counts": [[3, -1]]}, "tensors has a negative count in exp_counts"),
        ("tensors", GOOD | {"absmax": [-1.0]}, "tensors has a negative 'absmax'"),
        ("tensors", GOOD | {"name": [None]}, "tensors has rows without 'name'; every row needs it"),
        ("steps", {"step": [None]}, "steps has rows without 'step'; every row needs it"),
        ("steps", {"step": [-1]}, "steps has a negative 'step'; it counts from 0"),
        ("steps", {"step": [0], "loss_scale": [-2.0]}, "steps has a negative 'loss_scale'"),
        ("steps", {"step": [0], "step_ms": [-0.1]}, "steps has a negative 'step_ms'"),
        ("events", {"kind": [None]}, "events has rows without 'kind'"),
        (
            "events",
            {"kind": ["x"], "detail": ["y" * (MAX_TEXT + 1)]},
            "events has a text of 100001 characters in 'detail'",
        ),
        ("device", {"time_s": [0.0], "memory_used_bytes": [-5]}, "device has a negative 'memory_used_bytes'"),
    ],
)
def test_invalid_rows_raise_one_sentence(tmp_path: Path, table: str, columns: dict[str, Any], says: str) -> None:
    validate = written(tmp_path / "a", table, **columns)
    with pytest.raises(RunError, match=says) as caught:
        validate(True)
    assert "\n" not in str(caught.value)
    validate(False)  # types and columns are valid


def test_no_count_or_duration_may_be_negative(tmp_path: Path) -> None:
    may = {"loss", "lr", "exp_min", "capped_min", "temperature_c", "time_s", "cosine", "value", "loss_change"}
    for table in TABLES.values():
        for column in table.columns:
            if column.type not in (pa.int64(), pa.float64()) or column.name in may:
                continue
            required = {c.name: "weight_grad" if pa.types.is_string(c.type) else 0 for c in table.columns if c.required}
            row = {name: pa.array([value]) for name, value in required.items()}
            folder = tmp_path / table.name / column.name
            folder.mkdir(parents=True)
            (folder / "run.json").write_text('{"schema": 1}')
            pq.write_table(pa.table(row | {column.name: pa.array([-3], column.type)}), folder / f"{table.name}.parquet")
            with pytest.raises(RunError, match=rf"{table.name} has a negative '{column.name}'"):
                load_run(folder).validate(full=True)


def test_fractions_range_from_0_to_1(tmp_path: Path) -> None:
    written(tmp_path / "a", "device", time_s=[0.0, 1.0], gpu_util_frac=[0.0, 1.0], sm_active_frac=[None, 0.5])(True)
    with pytest.raises(RunError, match="device has 'gpu_util_frac' above 1; it is a fraction from 0 to 1"):
        written(tmp_path / "b", "device", time_s=[0.0], gpu_util_frac=[97.0])(True)


def test_even_without_full_every_table_is_read(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "a") as writer:
        writer.append("steps", {"step": [0]})
    (tmp_path / "a" / "kernels").mkdir()
    (tmp_path / "a" / "kernels" / "0.parquet").write_bytes(b"no")
    with pytest.raises(RunError, match=r"kernels/0\.parquet is damaged"):
        load_run(tmp_path / "a").validate()
