"""CSV that is safe to open in a spreadsheet: untrusted names that look like formulas stay text.

    >>> as_csv(pd.DataFrame({"name": ["=1+1", "w"], "loss": [-0.5, None]}))
    b"name,loss\\n'=1+1,-0.5\\nw,\\n"

Text that begins like a formula (OWASP, "CSV Injection") gets an apostrophe before it, which makes it text there.
"""

import io
import re
from typing import Any

import pandas as pd
import pyarrow as pa

BEGINNINGS = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")
"""The full-width forms of the first four are included."""


def as_csv(frame: pd.DataFrame) -> bytes:
    """UTF-8 with a header; a value that was not measured is an empty cell."""
    plain = pd.DataFrame(
        {i: frame.iloc[:, i].map(harmless) if _may_hold_text(frame.iloc[:, i]) else frame.iloc[:, i]
         for i in range(frame.shape[1])},
        index=frame.index,
    )  # fmt: skip
    plain.columns = pd.Index([harmless(str(name)) for name in frame.columns])
    return plain.to_csv(index=False).encode("utf-8", "replace")


def csv_safe(table: pa.Table) -> pa.Table:
    """The table without text that a spreadsheet would calculate, and with lists as JSON text."""
    columns = [_cells(table.column(i)) for i in range(table.num_columns)]
    return pa.table(columns, names=[harmless(name) for name in table.column_names])


def _cells(column: pa.ChunkedArray) -> pa.ChunkedArray:
    kind = column.type
    if pa.types.is_list(kind) or pa.types.is_struct(kind):
        return pa.chunked_array([pa.array([None if v is None else str(v) for v in column.to_pylist()], pa.string())])
    if pa.types.is_dictionary(kind):
        column = column.cast(kind.value_type)
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        return pa.chunked_array([_texts(chunk) for chunk in column.chunks], column.type)
    return column


def _texts(chunk: pa.Array) -> pa.Array:
    coded = chunk.dictionary_encode()  # names repeat in many rows
    return pa.array([harmless(text) for text in coded.dictionary.to_pylist()], chunk.type).take(coded.indices)


def as_parquet(frame: pd.DataFrame) -> bytes:
    """The frame with its types; a column of mixed types becomes text."""
    plain = frame.reset_index(drop=True)
    plain.columns = pd.Index([str(column) for column in plain.columns])
    mixed = [c for c in plain if plain[c].dtype == object and plain[c].dropna().map(type).nunique() > 1]
    out = io.BytesIO()
    plain.astype(dict.fromkeys(mixed, "str")).to_parquet(out, index=False)
    return out.getvalue()


def file_name(title: str) -> str:
    """A file name, without extension, from a table's title."""
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")[:60] or "table"


def harmless(value: Any) -> Any:
    """Text that no spreadsheet takes for a formula; numbers, also those written as text, are unchanged."""
    if not isinstance(value, str) or not value.startswith(BEGINNINGS):
        return value
    try:
        float(value)
    except ValueError:
        return f"'{value}"
    return value


def _may_hold_text(column: pd.Series) -> bool:
    return not (pd.api.types.is_numeric_dtype(column) or pd.api.types.is_datetime64_any_dtype(column))
