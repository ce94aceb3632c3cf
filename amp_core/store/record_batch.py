"""Rows of a table as an Arrow record batch, at the cost of a few microseconds a column.

    >>> record_batch("steps", {"step": [0], "loss": [2.5]}, rank=0).num_rows
    1
    >>> message("steps", {"step": [0], "loss": [2.5]}, rank=0)      # the same, as bytes of a stream

`pa.array` would do, but it imports pandas the first time it sees a list. A training process should not pay for that,
and a signal handler that writes the end of the run during that import would wait for the import lock. So this module
lays out the buffers of the Arrow columnar format itself: values, offsets, and a validity bit per row.

A single row of numbers, which every step writes, would cost the most this way: thirty arrays of one value. In a stream,
such a row is a head that depends only on which values are null, followed by eight bytes per value. So the head is
cached, and each further row is the same head with other values.
"""

import contextlib
import functools
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from amp_core.schema import TABLES, Column, RunError

_MAX_READY_ROWS = 4096
"""Default columns are cached up to this number of rows: the next append mostly has as many."""


def record_batch(table: str, columns: Mapping[str, Any], rank: int) -> pa.RecordBatch:
    """The batch that `RunWriter.append` writes. Raises `RunError` for what does not fit the table."""
    schema, spec = _spec(table)
    if not columns.keys() <= spec.keys():
        unknown = sorted(columns.keys() - spec.keys())[0]
        raise RunError(f"table {table!r} has no column {unknown!r}; it has {', '.join(spec)}")
    if not columns:
        raise RunError(f"table {table!r} was given no columns; give a sequence for each column that the rows have")
    rows = _rows(*next(iter(columns.items())))
    arrays = []
    for name, (column, make) in spec.items():
        values = columns.get(name)
        if values is None:
            value = rank if name == "rank" else column.default
            arrays.append(
                _ready(column.type, value, rows) if rows <= _MAX_READY_ROWS else _repeat(column.type, value, rows)
            )
            continue
        try:
            array = make(values)
        except (TypeError, ValueError, struct.error, OverflowError, pa.ArrowException) as error:
            raise RunError(f"column {name!r} of table {table!r} takes {column.type}: {error}") from error
        if len(array) != rows:
            raise RunError(f"column {name!r} of table {table!r} has {len(array)} rows where others have {rows}")
        arrays.append(array)
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def message(table: str, columns: Mapping[str, Any], rank: int) -> bytes:
    """The record batch of these rows as an Arrow IPC stream holds it. Raises `RunError` as `record_batch` does."""
    row = _single_row(table, columns, rank)
    if row is not None:
        layout = _row_layout(table, tuple(v is None for v in row))
        if all(type(row[i]) is bool for i in layout.flags):  # `struct` accepts any object as a bool
            with contextlib.suppress(struct.error, TypeError):  # `record_batch` names the value that does not fit
                return layout.head + layout.body.pack(*(v for v in row if v is not None))
    return bytes(record_batch(table, columns, rank).serialize())


def _single_row(table: str, columns: Mapping[str, Any], rank: int) -> list[Any] | None:
    """The values of a single row, in the order of the table's columns; None if there are several rows or a value is not
    a number."""
    defaults = _numeric_defaults(table)
    if defaults is None or not columns or not columns.keys() <= defaults.keys():
        return None
    row: dict[str, Any] = {**defaults, **columns, "rank": [rank]}
    if any(type(values) is not list or len(values) != 1 for values in row.values()):
        return None
    return [values[0] for values in row.values()]


@functools.cache
def _numeric_defaults(table: str) -> dict[str, list[Any]] | None:
    """The default of each column, if the table has only columns of numbers, else None."""
    if table not in TABLES or not all(c.type in _WORDS for c in TABLES[table].columns):
        return None
    return {c.name: [c.default] for c in TABLES[table].columns}


class _RowLayout(NamedTuple):
    """The layout of a single row in which certain values are null."""

    head: bytes
    body: struct.Struct
    flags: tuple[int, ...]
    """Indices of the bool columns that are not null."""


@functools.cache
def _row_layout(table: str, null: tuple[bool, ...]) -> _RowLayout:
    columns = TABLES[table].columns
    # A column is a validity bitmap, if its value is null, then the value; each is padded to eight bytes.
    words = "".join("16x" if absent else _WORDS[c.type] for c, absent in zip(columns, null, strict=True))
    body = struct.Struct(f"<{words}")
    blank = {c.name: [None if n else c.type == pa.bool_()] for c, n in zip(columns, null, strict=True)}
    message_bytes = bytes(record_batch(table, blank, 0).serialize())
    flags = tuple(i for i, c in enumerate(columns) if c.type == pa.bool_() and not null[i])
    return _RowLayout(message_bytes[: len(message_bytes) - body.size], body, flags)


@functools.cache
def _spec(table: str) -> tuple[pa.Schema, dict[str, tuple[Column, Callable[[Any], pa.Array]]]]:
    if table not in TABLES:
        raise RunError(f"table={table!r} is unknown; choose one of {', '.join(TABLES)}")
    return TABLES[table].schema, {c.name: (c, _MAKERS[c.type]) for c in TABLES[table].columns}


def _rows(name: str, values: Any) -> int:
    try:
        return len(values)
    except TypeError:
        raise RunError(f"column {name!r} is a {type(values).__name__}; give a sequence with one item per row") from None


def _repeat(kind: pa.DataType, value: Any, rows: int) -> pa.Array:
    return _MAKERS[kind]([value] * rows)


_ready = functools.lru_cache(maxsize=256)(_repeat)


def _maker(
    kind: pa.DataType,
    blank: Any,
    buffers: Callable[[Sequence[Any]], list[pa.Buffer]],
    children: Callable[[Sequence[Any]], list[pa.Array]] | None = None,
) -> Callable[[Any], pa.Array]:
    """A function that makes an array of type `kind` from a sequence: None becomes null, NaN stays NaN, no number
    changes."""

    def make(values: Any) -> pa.Array:
        if not isinstance(values, list | tuple):
            if isinstance(values, pa.Array):
                return values if values.type == kind else values.cast(kind)
            values = _numbers(values) if isinstance(values, np.ndarray) else _listed(values)
            if isinstance(values, pa.Array):
                return values if values.type == kind else values.cast(kind)
        validity = None
        if any(v is None for v in values):  # not `None in values`: an array in a list compares item by item
            validity = _bits([v is not None for v in values])
            values = [blank if v is None else v for v in values]
        below = None if children is None else children(values)
        return pa.Array.from_buffers(kind, len(values), [validity, *buffers(values)], children=below)

    return make


def _numbers(values: np.ndarray[Any, Any]) -> Any:
    """An Arrow array that shares the memory of a numeric NumPy array; a list for any other."""
    if values.ndim != 1:
        raise TypeError(f"a column has one dimension, not {values.ndim}")
    if values.dtype.kind == "b":
        return pa.Array.from_buffers(pa.bool_(), len(values), [None, _bits(values)])
    if values.dtype.kind in "iuf":
        values = np.ascontiguousarray(values)
        return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, pa.py_buffer(values)])
    return values.tolist()


def _listed(values: Any) -> list[Any]:
    if isinstance(values, str | bytes) or not isinstance(values, Sequence):
        raise TypeError(f"a column is a sequence or an array, not {type(values).__name__}")
    return list(values)


def _bits(values: Any) -> pa.Buffer:
    return pa.py_buffer(np.packbits(np.asarray(values, dtype=bool), bitorder="little").tobytes())


def _offsets(lengths: Sequence[int]) -> pa.Buffer:
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return pa.py_buffer(offsets)


def _integers(values: Sequence[Any]) -> list[pa.Buffer]:
    return [pa.py_buffer(struct.pack(f"<{len(values)}q", *values))]


def _floats(values: Sequence[Any]) -> list[pa.Buffer]:
    return [pa.py_buffer(struct.pack(f"<{len(values)}d", *values))]


def _flags(values: Sequence[Any]) -> list[pa.Buffer]:
    for value in values:
        if not isinstance(value, bool | np.bool_):
            raise TypeError(f"{value!r:.40} is neither True nor False")
    return [_bits(values)]


def _texts(values: Sequence[Any]) -> list[pa.Buffer]:
    for value in values:
        if not isinstance(value, str):
            raise TypeError(f"{value!r:.40} is not text")
    # "replace": an error message may hold a file name that is not UTF-8, and the end of the run must be written.
    encoded = [v.encode("utf-8", "replace") for v in values]
    return [_offsets([len(e) for e in encoded]), pa.py_buffer(b"".join(encoded))]


def _lists(values: Sequence[Any]) -> list[pa.Buffer]:
    return [_offsets([len(v) for v in values])]


def _items(kind: pa.DataType) -> Callable[[Sequence[Any]], list[pa.Array]]:
    def items(values: Sequence[Any]) -> list[pa.Array]:
        if values and all(isinstance(v, np.ndarray) for v in values):
            return [_MAKERS[kind](np.concatenate(values))]
        return [_MAKERS[kind]([one for v in values for one in v])]

    return items


_MAKERS: dict[pa.DataType, Callable[[Any], pa.Array]] = {
    pa.int64(): _maker(pa.int64(), 0, _integers),
    pa.float64(): _maker(pa.float64(), 0.0, _floats),
    pa.bool_(): _maker(pa.bool_(), False, _flags),
    pa.string(): _maker(pa.string(), "", _texts),
    pa.list_(pa.int64()): _maker(pa.list_(pa.int64()), (), _lists, _items(pa.int64())),
    pa.list_(pa.float64()): _maker(pa.list_(pa.float64()), (), _lists, _items(pa.float64())),
}

_WORDS = {pa.int64(): "q", pa.float64(): "d", pa.bool_(): "?7x"}
"""How `struct` writes the value of a column in eight bytes, for the types of fixed width."""
