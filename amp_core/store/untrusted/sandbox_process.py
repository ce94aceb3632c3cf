"""The process that converts segments of untrusted runs: see `sandbox`.

    python -m amp_core.store.untrusted.sandbox_process

Each request on standard input is a line of JSON, followed by the schema if the bytes continue a stream, and by the
bytes of the segment unless they are in a file. Each reply is a line of JSON: the rows written, the sentence that
refuses the segment, or that its file has vanished. A crash of the process counts as a refusal.
"""

import base64
import json
import os
import sys
import threading
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from amp_core.hardware.host import bounded_memory
from amp_core.schema import TABLES, RunError, Table
from amp_core.store.segment_reader import (
    DamageAsRunError,
    File,
    Segment,
    conform,
    first_line,
    read_parquet,
    read_stream,
)
from amp_core.store.untrusted.limits import read_bounded, refuse_large

MAX_MEMORY_GIB = 6
"""Of address space: what a segment may decode to (see `limits`), twice, and the libraries."""
IDLE_TIMEOUT_S = 30.0
"""The process ends after this idle time; starting another takes half a second."""


def convert(request: dict[str, Any], schema: bytes, data: bytes) -> dict[str, Any]:
    """Write the segment to `request["out"]`. Raises `RunError`, or dies."""
    file, table, out = File(request["name"], len(data), 0), TABLES[request["table"]], request["out"]
    if not file.name.endswith(".parquet"):
        before = Segment(file, None, 0, pa.ipc.read_schema(pa.py_buffer(schema))) if schema else None
        segment = read_stream(file, data, table, before, bounded=True)
        known = base64.b64encode(segment.schema.serialize()).decode() if segment.schema is not None else None
        return {"decoded_bytes": _write(out, segment.table, table), "end": segment.offset, "schema": known}
    if table.name == "tensors" and request["path"]:
        size = _convert_row_groups(request["path"], file, table, out)
    else:
        source = request["path"] or pa.BufferReader(data)
        size = _write(out, read_parquet(file, source, table, None, bounded=True).table, table)
    return {"decoded_bytes": size, "end": 0, "schema": None}


def _convert_row_groups(path: str, file: File, table: Table, out: str) -> int:
    """Convert a file of any length, for an extract, which reads parts of it: the limits apply per row group."""
    size, writer = 0, None
    try:
        with DamageAsRunError(file.name):
            groups = pq.ParquetFile(path).metadata.num_row_groups
        for group in range(groups):
            with DamageAsRunError(file.name):
                decoded = read_bounded(pq.ParquetFile(path), path, [group])
                refuse_large(decoded, len(table.columns))
                decoded.validate(full=True)
            rows = conform(decoded, table, file.name)
            writer = writer or pq.ParquetWriter(out, rows.schema, compression="lz4")
            writer.write_table(rows)
            size += int(rows.nbytes)
    finally:
        if writer is not None:
            writer.close()
    return size if writer is not None else _write(out, None, table)


def _write(out: str, rows: pa.Table | None, table: Table) -> int:
    rows = rows if rows is not None else table.schema.empty_table()
    pq.write_table(rows, out, compression="lz4")
    return int(rows.nbytes)


def answer(stdin: IO[bytes], stdout: IO[bytes]) -> None:
    """Reply to requests until no more come."""
    while True:
        idle = threading.Timer(IDLE_TIMEOUT_S, os._exit, (0,))
        idle.daemon = True
        idle.start()
        line = stdin.readline()
        idle.cancel()
        if not line:
            return
        request = json.loads(line)
        schema, data = stdin.read(request["schema"]), stdin.read(request["data"])
        try:
            reply = convert(request, schema, data)
        except RunError as error:
            reply = {"refused": str(error)}
        except FileNotFoundError:
            reply = {"vanished": True}
        except (OSError, pa.ArrowException) as error:  # a full disk, a type that Parquet does not have
            reply = {"refused": f"{request['name']} cannot be converted: {first_line(error)}"}
        except MemoryError:
            reply = {
                "refused": (f"{request['name']} needs more than {MAX_MEMORY_GIB} GiB to read, more than any segment")
            }
        stdout.write(json.dumps(reply).encode() + b"\n")
        stdout.flush()


if __name__ == "__main__":
    with bounded_memory(MAX_MEMORY_GIB):
        answer(sys.stdin.buffer, sys.stdout.buffer)
