"""Limits on the memory that an untrusted segment decodes to, checked before decoding: a kilobyte may hold 2^31 equal
values.

    >>> table = read_bounded(pq.ParquetFile(source))        # raises ValueError instead of decoding too much
    >>> refuse_large(table)

Strings are read dictionary-encoded, and their size is computed before they are expanded. The footer states how many
values the lists hold; the buffers of a compressed Arrow message state their decompressed length. A footer may lie: then
the memory limit of the sandbox process holds.
"""

import struct

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

MAX_VALUES = 2**25
"""Values in one segment, a quarter of a gibibyte of numbers. A row of `tensors` with two histograms of every exponent
has 574, and a packed file at most 2^15 rows."""
MAX_BYTES = 2**28
"""Bytes that one segment may decode to."""
ROWS_AT_ONCE = 65_536
FEW_ROWS = 64
"""Rows decoded at a time where each text may share a megabyte with the one before (DELTA_BYTE_ARRAY)."""
_SCANNED = 2048


def read_bounded(reader: pq.ParquetFile, source: object, groups: list[int] | None = None) -> pa.Table:
    """All columns of a Parquet file, or of some of its row groups; `reader` has opened `source`.

    Raises `ValueError` for more than `MAX_VALUES` or `MAX_BYTES`, and what pyarrow raises for a damaged file.
    """
    for field in reader.schema_arrow:
        _refuse_type(field.type)
    groups = list(range(reader.metadata.num_row_groups)) if groups is None else groups
    texts, at_once = _columns_of_text(reader, groups)
    coded = pq.ParquetFile(source, metadata=reader.metadata, read_dictionary=texts)
    batches, size = [], 0
    for batch in coded.iter_batches(at_once, row_groups=groups, use_threads=False):
        size += decoded_bytes(batch)
        if size > MAX_BYTES:
            raise ValueError(f"it decodes to more than {MAX_BYTES / 2**30:.3g} GiB")
        batches.append(batch)
    return pa.Table.from_batches(batches, coded.schema_arrow).cast(reader.schema_arrow)


def _columns_of_text(reader: pq.ParquetFile, groups: list[int]) -> tuple[list[str], int]:
    """The string columns to read dictionary-encoded, and how many rows to decode at a time. Refuses files whose footer
    states too many values."""
    metadata = reader.metadata
    leaves = [reader.schema.column(i) for i in range(metadata.num_columns)]
    rows = sum(metadata.row_group(g).num_rows for g in groups)
    _refuse_values(rows * len(leaves))
    nested = [i for i, leaf in enumerate(leaves) if leaf.max_repetition_level or leaf.physical_type == "BYTE_ARRAY"]
    if not nested or not rows:
        return [], ROWS_AT_ONCE
    # Statistics of a damaged column end the process (pyarrow 26: std::terminate); scanning it raises instead.
    reader.reader.scan_contents(nested, _SCANNED)
    chunks = [(i, metadata.row_group(g).column(i)) for g in groups for i in nested]
    _refuse_values(sum(c.num_values for _, c in chunks) + rows * (len(leaves) - len(nested)))
    shared = {i for i, c in chunks if "DELTA_BYTE_ARRAY" in c.encodings}  # pyarrow cannot read these dictionary-encoded
    texts = [leaves[i].path for i in nested if i not in shared and leaves[i].physical_type == "BYTE_ARRAY"]
    return texts, FEW_ROWS if shared else ROWS_AT_ONCE


def _refuse_values(values: int) -> None:
    if values > MAX_VALUES:
        raise ValueError(f"it holds {values:,} values; at most {MAX_VALUES:,} are read")


def refuse_large(table: pa.Table, columns: int = 0) -> None:
    """Raise `ValueError` if `table` is too large once shared values are expanded and it has at least `columns`
    columns."""
    _refuse_values(table.num_rows * max(table.num_columns, columns))
    if sum(decoded_bytes(batch) for batch in table.to_batches()) > MAX_BYTES:
        raise ValueError(f"it decodes to more than {MAX_BYTES / 2**30:.3g} GiB")


def decoded_bytes(batch: pa.RecordBatch) -> int:
    """Bytes that the columns take once shared values are expanded. Raises `ValueError` as `refuse_large` does."""
    for column in batch.columns:
        _refuse_type(column.type)
    return sum(_decoded(column) for column in batch.columns)


def _refuse_type(kind: pa.DataType) -> None:
    """Raise `ValueError` for types that no run has: views and run-end encoding share values, and fixed-size values may
    be huge."""
    if pa.types.is_dictionary(kind) or _is_list(kind):
        _refuse_type(kind.value_type)
    elif pa.types.is_struct(kind):
        for i in range(kind.num_fields):
            _refuse_type(kind.field(i).type)
    elif not (_is_text(kind) or pa.types.is_null(kind) or pa.types.is_primitive(kind) or pa.types.is_decimal(kind)):
        raise ValueError(f"it has a column of type {str(kind)[:80]}, which runs do not use")


def _decoded(values: pa.Array) -> int:
    kind = values.type
    if pa.types.is_dictionary(kind) and _is_text(kind.value_type):
        lengths = pc.take(pc.binary_length(values.dictionary), values.indices)
        return 4 * len(values) + int(pc.sum(pc.cast(lengths, pa.int64())).as_py() or 0)
    if pa.types.is_dictionary(kind):
        return len(values) * max(8, _decoded(values.dictionary))
    if _is_list(kind):
        return 8 * len(values) + _decoded(values.values)
    if pa.types.is_struct(kind):
        return len(values) + sum(_decoded(values.field(i)) for i in range(kind.num_fields))
    return 8 * len(values) if pa.types.is_null(kind) else int(values.nbytes)


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _is_text(kind: pa.DataType) -> bool:
    return any(
        is_kind(kind)
        for is_kind in (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    )


def refuse_compressed(message: pa.Message) -> None:
    """Raise `ValueError` if the buffers of a record batch state that they decompress to too much.

    Arrow columnar format, "Compression": each buffer begins with its decompressed length, or -1 if it is not
    compressed. In the flatbuffer, the third field of `Message` is the batch; the third of `RecordBatch` are its
    buffers, the fourth is the compression.
    """
    data, body = memoryview(message.metadata), memoryview(message.body)
    try:
        batch = _follow(data, _slot(data, _follow(data, 0), 2))
        if not _slot(data, batch, 3):
            return
        buffers = _follow(data, _slot(data, batch, 2))
        (count,) = struct.unpack_from("<I", data, buffers)
        size = 0
        for i in range(count):
            start, length = struct.unpack_from("<qq", data, buffers + 4 + 16 * i)
            if length:
                (decompressed,) = struct.unpack_from("<q", body, start)
                size += max(int(decompressed), length)
    except struct.error:
        raise ValueError("a message's metadata is damaged") from None
    if size > MAX_BYTES:
        raise ValueError(f"it decompresses to {size / 2**30:.1f} GiB; at most {MAX_BYTES / 2**30:.3g} are read")


def _slot(data: memoryview, table: int, number: int) -> int:
    """The position of field `number` in a table of a flatbuffer; 0 if the field is absent."""
    vtable = table - int(struct.unpack_from("<i", data, table)[0])
    (size,) = struct.unpack_from("<H", data, vtable)
    if size < 6 + 2 * number:
        return 0
    offset = int(struct.unpack_from("<H", data, vtable + 4 + 2 * number)[0])
    return table + offset if offset else 0


def _follow(data: memoryview, at: int) -> int:
    return at + int(struct.unpack_from("<I", data, at)[0])
