"""Kilobytes that say they are gigabytes are refused before they are decoded."""

import io
import zipfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from amp_core import RunError, _bounds, load_run
from tests.unbreakable.inputs import honest

FEW = 2**20
"""Bytes and values that are allowed here, so that the bombs are small ones."""


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_bounds, "MOST_BYTES", FEW)
    monkeypatch.setattr(_bounds, "MOST_VALUES", FEW)


def _packed(room: Path, data: bytes, kind: str) -> Path:
    file = room / "bomb.zip"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("run.json", honest()[0]["run.json"])
        archive.writestr(f"tensors/00000.{kind}", data)
    return file


def _parquet(table: pa.Table, **options: object) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd", **options)
    return sink.getvalue()


def _stream(table: pa.Table, compression: str | None = None) -> bytes:
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as stream:
        stream.write_table(table)
    return sink.getvalue()


def _coded(rows: int, text: str) -> pa.Array:
    """The same text so many times, each a byte that refers to it."""
    return pa.DictionaryArray.from_arrays(pa.repeat(pa.scalar(0, pa.int8()), rows), pa.array([text]))


def _one_list(values: int, kind: pa.DataType) -> pa.Array:
    return pa.ListArray.from_arrays(pa.array([0, values], pa.int32()), pa.nulls(values, kind))


LONG = {"step": pa.repeat(0, 30_000), "name": _coded(30_000, "x" * 1_000)}
WIDE = {"step": [0], "name": ["w"], "exp_counts": _one_list(FEW + 1, pa.int64())}
NOTHING = {"step": [0], "name": ["w"], "exp_counts": _one_list(FEW + 1, pa.null())}
VIEWS = {"step": [0], "name": pa.array(["x" * 99], pa.string_view())}
NESTED = {"step": pa.repeat(0, 9_000), "name": ["w"] * 9_000, "more": pa.array([["x" * 999]] * 9_000)}

BOMBS = {
    "text, coded": _parquet(pa.table(LONG)),
    "text, each the beginning of the one before": _parquet(
        pa.table({"step": pa.repeat(0, 30_000), "name": ["x" * 1_000] * 30_000}),
        use_dictionary=False,
        column_encoding={"name": "DELTA_BYTE_ARRAY"},
    ),
    "text in lists": _parquet(pa.table(NESTED)),
    "one long list": _parquet(pa.table(WIDE)),
    "many rows": _parquet(pa.table({"step": pa.repeat(0, 200_000), "name": _coded(200_000, "w")})),
    "fixed size": _parquet(pa.table({"step": [0], "name": ["w"], "more": pa.array([b"x" * 999], pa.binary(999))})),
    "stream: text, coded": _stream(pa.table(LONG)),
    "stream: one long list, compressed": _stream(pa.table(WIDE), "zstd"),
    "stream: one long list of nothing": _stream(pa.table(NOTHING)),
    "stream: many rows of nothing": _stream(pa.table({"step": pa.nulls(FEW), "name": pa.nulls(FEW)})),
    "stream: views": _stream(pa.table(VIEWS)),
}


@pytest.mark.parametrize("name", BOMBS)
def test_bomb_is_refused_before_it_is_decoded(name: str, tmp_path: Path) -> None:
    kind = "arrows" if name.startswith("stream") else "parquet"
    file = _packed(tmp_path, BOMBS[name], kind)
    assert file.stat().st_size < 60_000
    held = pa.total_allocated_bytes()
    before = pa.default_memory_pool().max_memory()
    with pytest.raises(RunError, match=r"holds .* values|(decodes|decompresses) to|of type .* no run has"):
        load_run(file).table("tensors")
    assert pa.default_memory_pool().max_memory() <= max(before, held + 8 * FEW)
