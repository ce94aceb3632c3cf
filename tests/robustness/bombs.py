"""Segments of `tensors` that take kilobytes, but claim any number of rows, values or bytes.

>>> data = BOMBS["text, coded"](2**40)            # decodes to more than a tebibyte
"""

import io
import math
from collections.abc import Callable

import pyarrow as pa
import pyarrow.parquet as pq


def _parquet(table: pa.Table, **options: object) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd", **options)
    return sink.getvalue()


def _stream(table: pa.Table, compression: str | None = None) -> bytes:
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as stream:
        stream.write_table(table)
    return sink.getvalue()


def _coded(size: int) -> pa.Table:
    """The same text in each row, dictionary-encoded with one byte per row."""
    rows = max(2, min(200_000, math.isqrt(size)))
    codes = pa.repeat(pa.scalar(0, pa.int8()), rows)
    return pa.table(
        {
            "step": pa.repeat(0, rows),
            "name": pa.DictionaryArray.from_arrays(codes, ["x" * min(size // rows + 1, 100_000)]),
        }
    )


def _one_list(size: int, kind: pa.DataType) -> pa.Table:
    """One row with a list of nulls that decodes to `size` bytes."""
    values = min(size // 8 + 1, 2**22 if kind != pa.null() else 2**31 - 1)
    lists = pa.ListArray.from_arrays(pa.array([0, values], pa.int32()), pa.nulls(values, kind))
    return pa.table({"step": [0], "name": ["w"], "exp_counts": lists})


def _shared(size: int) -> pa.Table:
    rows = max(2, min(2_000, math.isqrt(size)))
    return pa.table({"step": pa.repeat(0, rows), "name": ["x" * min(size // rows + 1, 10_000)] * rows})


def _in_lists(size: int) -> pa.Table:
    rows = max(2, min(5_000, math.isqrt(size)))
    texts = [["x" * min(size // rows + 1, 10_000)]] * rows
    return pa.table({"step": pa.repeat(0, rows), "name": ["w"] * rows, "more": texts})


def _rows(size: int) -> pa.Table:
    rows = min(size // 8, 10**6)
    codes = pa.repeat(pa.scalar(0, pa.int8()), rows)
    return pa.table({"step": pa.repeat(0, rows), "name": pa.DictionaryArray.from_arrays(codes, ["w"])})


def _no_rows(size: int) -> pa.Table:
    rows = min(size // 8, 2**31 - 1)
    return pa.table({"step": pa.nulls(rows), "name": pa.nulls(rows)})


_DELTA = {"use_dictionary": False, "column_encoding": {"name": "DELTA_BYTE_ARRAY"}}
_FIXED = pa.table({"step": [0], "name": ["w"], "more": pa.array([b"x" * 999], pa.binary(999))})
_VIEWS = pa.table({"step": [0], "name": pa.array(["x" * 99], pa.string_view())})

BOMBS: dict[str, Callable[[int], bytes]] = {
    "text, coded": lambda size: _parquet(_coded(size)),
    "text, each the beginning of the one before": lambda size: _parquet(_shared(size), **_DELTA),
    "text in lists": lambda size: _parquet(_in_lists(size)),
    "one long list": lambda size: _parquet(_one_list(size, pa.int64())),
    "many rows": lambda size: _parquet(_rows(size)),
    "values of a fixed size": lambda _: _parquet(_FIXED),
    "stream: text, coded": lambda size: _stream(_coded(size)),
    "stream: one long list, compressed": lambda size: _stream(_one_list(size, pa.int64()), "zstd"),
    "stream: one long list of nothing": lambda size: _stream(_one_list(size, pa.null())),
    "stream: many rows of nothing": lambda size: _stream(_no_rows(size)),
    "stream: views": lambda _: _stream(_VIEWS),
}
