"""Segments of a table: Parquet files, and Arrow streams that may still grow, as tables with the promised columns.

>>> segment = read_stream(File("steps/00000.arrows", size, mtime_ns), data, TABLES["steps"], None)
>>> segment.rows, segment.offset          # whole batches only; read on from `offset` next time
(120, 74016)
"""

import itertools
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from amp_core.schema import DamageError, RunError, Table
from amp_core.store.untrusted.limits import read_bounded, refuse_compressed, refuse_large

BATCHES_AT_ONCE = 256
"""Record batches of a stream that are collected before they are merged into one."""


@dataclass(frozen=True)
class File:
    """A segment file as listed: path inside the run, size in bytes, modification time in ns."""

    name: str
    size: int
    mtime_ns: int


@dataclass(frozen=True)
class Segment:
    """The rows read from a segment: whole batches up to `offset` bytes of an open stream, or a whole file."""

    file: File
    table: pa.Table | None
    offset: int = 0
    schema: pa.Schema | None = None

    @property
    def rows(self) -> int:
        return self.table.num_rows if self.table is not None else 0


def read_parquet(
    file: File,
    source: object,
    table: Table,
    before: Segment | None,
    bounded: bool = False,
    where: pc.Expression | None = None,
) -> Segment:
    """Read a whole Parquet file, or keep the rows of `before` if that is the stream that the file was sealed from.

    With `where`, rows that do not match may be left out: row groups whose statistics rule out a match are not decoded.

    With `bounded`, for untrusted files, a file that would take too much memory is refused before it is decoded: a tiny
    file may hold billions of equal values.
    """
    with DamageAsRunError(file.name):
        reader = pq.ParquetFile(source)
        if before is not None and before.rows == reader.metadata.num_rows:
            return replace(before, file=file)  # sealed from the stream that was already read
        if bounded:
            rows = read_bounded(reader, source)
        elif where is not None and _filterable(reader.schema_arrow, table):
            rows = pq.read_table(source, filters=where, partitioning=None)
        else:
            rows = reader.read()
        rows.validate(full=True)  # text that is not UTF-8 would fail later, where it is shown
        if bounded:
            refuse_large(rows, len(table.columns))
    return Segment(file, conform(rows, table, file.name))


def _filterable(schema: pa.Schema, table: Table) -> bool:
    """Whether a file has all promised columns of plain values in their types, so that `conform` would leave them as
    they are."""
    plain = (c for c in table.columns if not pa.types.is_nested(c.type))
    return all(c.name in schema.names and schema.field(c.name).type == c.type for c in plain)


def read_stream(file: File, data: bytes, table: Table, before: Segment | None, bounded: bool = False) -> Segment:
    """Read the whole batches in `data`, the bytes after `before.offset`; the next call reads an incomplete last batch.

    With `bounded`, batches that would take too much memory are refused before they are decoded.
    """
    schema = before.schema if before is not None else None
    start = before.offset if before is not None else 0
    parts: list[pa.Table] = []
    batches: list[pa.RecordBatch] = []
    end = 0
    with DamageAsRunError(file.name):
        for message, stop in _messages(data):
            if schema is None:
                if message.type != "schema":  # read_schema (pyarrow 26) crashes on any other message
                    raise ValueError(f"it begins with a message of type {message.type!r}, not with a schema")
                schema = pa.ipc.read_schema(message)
            elif bounded and message.type in ("record batch", "dictionary"):
                refuse_compressed(message)
            if message.type == "record batch" and not _has_dictionaries(schema):
                batches.append(pa.ipc.read_record_batch(message, schema))
            end = stop
            if len(batches) == BATCHES_AT_ONCE:
                parts.append(_together(batches, table, bounded))
                batches = []
        if schema is not None and _has_dictionaries(schema):  # not written by us: values come in separate messages
            with pa.ipc.open_stream(data[:end]) as reader:
                batches, before, start, end = list(reader), None, 0, 0  # which later reads need: start over
            schema = None
        if batches:
            parts.append(_together(batches, table, bounded))
        fresh = pa.concat_tables(parts) if parts else None
        if bounded and fresh is not None:
            refuse_large(fresh, len(table.columns))
    rows = conform(fresh.combine_chunks(), table, file.name) if fresh is not None else None
    return Segment(file, appended(before.table if before is not None else None, rows), start + end, schema)


def _together(batches: list[pa.RecordBatch], table: Table, bounded: bool) -> pa.Table:
    """The batches merged into one: each holds only a few rows, and has an overhead of ten kilobytes."""
    for batch in batches:
        batch.validate(full=True)  # offsets outside of their buffer would crash later reads
    part = pa.Table.from_batches(batches)
    if bounded:
        refuse_large(part, len(table.columns))
    return part.combine_chunks()


def appended(whole: pa.Table | None, fresh: pa.Table | None) -> pa.Table | None:
    """Both tables as one. Each chunk is more than twice as large as the next, so there are few, and a row is copied
    once per doubling."""
    if whole is None or fresh is None:
        return fresh if whole is None else whole
    ends = [0, *itertools.accumulate(len(piece) for piece in whole.column(0).chunks)]
    while len(ends) > 1 and ends[-1] - ends[-2] <= 2 * fresh.num_rows:
        fresh = pa.concat_tables([whole.slice(ends[-2]), fresh], promote_options="default").combine_chunks()
        whole = whole.slice(0, ends[-2])
        ends.pop()
    return pa.concat_tables([whole, fresh], promote_options="default")


def _has_dictionaries(schema: pa.Schema) -> bool:
    return any(pa.types.is_dictionary(field.type) for field in schema)


_CONTINUATION = b"\xff\xff\xff\xff"


def _messages(data: bytes) -> Iterator[tuple[pa.Message, int]]:
    """The whole messages of an Arrow IPC stream, and where each ends.

    Each is framed as continuation mark, int32 length of the metadata, metadata, body (Arrow columnar format, section
    "Encapsulated message format"). Stops before an incomplete message, and at the end-of-stream mark.
    """
    view = memoryview(data)
    position = 0
    while len(view) >= position + 8:
        mark, length = struct.unpack_from("<4si", view, position)
        if mark == b"\0\0\0\0" and not any(view[position:]):  # zeros that a file system allocated before a power cut
            return
        if mark != _CONTINUATION or length < 0:
            raise ValueError(f"no message starts at byte {position}")
        stop = position + 8 + length
        if length == 0 or stop > len(view):
            return
        stop += _body_length(view[position + 8 : stop])
        if stop > len(view):
            return
        yield pa.ipc.read_message(pa.py_buffer(view[position:stop])), stop
        position = stop


def _body_length(metadata: memoryview) -> int:
    """Field `bodyLength` (the fourth) of a message's metadata, a flatbuffer: root offset, vtable, then the slot."""
    try:
        (root,) = struct.unpack_from("<I", metadata, 0)
        vtable = root - struct.unpack_from("<i", metadata, root)[0]
        size, slot = struct.unpack_from("<H8xH", metadata, vtable)
        length = struct.unpack_from("<q", metadata, root + slot)[0] if size >= 12 and slot else 0
    except struct.error:
        raise ValueError("a message's metadata is damaged") from None
    if length < 0:
        raise ValueError("a message has a negative length")
    return int(length)


def conform(rows: pa.Table, table: Table, where: str) -> pa.Table:
    """`rows` with the promised columns, in the promised types and order, then its other columns."""
    try:
        given = rows.column_names
    except UnicodeDecodeError:
        raise DamageError(f"{where} has a column whose name is not UTF-8") from None
    if len(set(given)) < len(given):
        raise DamageError(f"{where} has two columns of one name")
    arrays, names = [], []
    for column in table.columns:
        if column.name in rows.column_names:
            values = rows.column(column.name)
            if values.type != column.type:
                try:
                    values = values.cast(column.type)
                except pa.ArrowException as error:
                    raise DamageError(
                        f"{where} has column {column.name!r} of type {values.type}, which is no {column.type}: "
                        f"{first_line(error)}"
                    ) from None
        elif column.required:
            raise DamageError(f"{where} has no column {column.name!r}; each row of {table.name!r} needs it")
        else:
            values = pa.chunked_array([pa.repeat(pa.scalar(column.default, column.type), rows.num_rows)])
        arrays.append(values)
        names.append(column.name)
    for name in rows.column_names:
        if name not in names:
            arrays.append(rows.column(name))
            names.append(name)
    return pa.Table.from_arrays(arrays, names=names)


def is_ordered(table: pa.Table, keys: list[str]) -> bool:
    """Whether rows are already sorted by the first key and, within it, by the second."""
    if not keys:
        return True
    first = table.column(keys[0])
    if len(first) < 2:
        return True
    # Compared by Arrow: its `to_numpy` imports pandas, which takes a third of a second. A missing value is unordered.
    before, after = first[:-1], first[1:]
    if not pc.all(pc.less_equal(before, after), skip_nulls=False).as_py():
        return False
    if len(keys) == 1:
        return True
    second = table.column(keys[1])
    ordered = pc.or_kleene(pc.less(before, after), pc.less_equal(second[:-1], second[1:]))
    return bool(pc.all(ordered, skip_nulls=False).as_py())


class DamageAsRunError:
    """Turns the errors of reading a damaged file into `DamageError`, and of a protected one into `RunError`;
    `FileNotFoundError` passes through."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, FileNotFoundError | RunError):
            return
        if isinstance(error, PermissionError) and error.errno is not None:
            raise RunError(f"{self._name} cannot be read: {os.strerror(error.errno)}") from None
        if isinstance(error, pa.ArrowException | OSError | ValueError | TypeError):
            raise DamageError(f"{self._name} is damaged: {first_line(error)}") from None


def first_line(error: BaseException) -> str:
    if "Parquet magic bytes not found" in str(error) or "Parquet file size is" in str(error):  # pyarrow's words
        return "it is cut off, or not a Parquet file"
    return str(error).strip().split("\n")[0][:200].rstrip(".")
