"""The process that reads strangers' segments first: see `sandboxed`.

    python -m amp_core.store.untrusted.sandbox_process

Asked on standard input by a line of JSON, a schema where a stream goes on, and the bytes themselves where they lie in
no folder. It answers with a line of JSON: the bytes that the segment decodes to, the sentence that refuses it, or null
where its file has vanished. Where it dies instead, that is the answer.
"""

import json
import os
import sys
import threading
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from amp_core.hardware.host import bounded_memory
from amp_core.schema import TABLES, RunError, Table
from amp_core.store.long_runs.sealed_tensors import Reading, SealedTensors
from amp_core.store.segment_reader import File, Segment, conform, read_parquet, read_stream
from amp_core.store.untrusted.limits import read_bounded, refuse_large

MAX_MEMORY_GIB = 6
"""Of address space: what a segment may decode to (see `_bounds`), twice, and the libraries."""
IDLE_S = 30.0
"""It ends when nobody has asked for so long: another is begun in half a second."""


def decode(asked: dict[str, Any], schema: bytes, data: bytes) -> int:
    """Bytes that the segment decodes to. Raises `RunError`, or dies."""
    file, table = File(asked["name"], len(data), 0), TABLES[asked["table"]]
    if not file.name.endswith(".parquet"):
        before = Segment(file, None, 0, pa.ipc.read_schema(pa.py_buffer(schema))) if schema else None
        return _size(read_stream(file, data, table, before, bounded=True).table)
    if data:
        return _size(read_parquet(file, pa.BufferReader(data), table, None, bounded=True).table)
    if table.name == "tensors":
        return _in_parts(Path(asked["folder"]), file, table)
    return _size(read_parquet(file, str(Path(asked["folder"]) / file.name), table, None, bounded=True).table)


def _in_parts(folder: Path, file: File, table: Table) -> int:
    """As `SealedTensors` reads it: the statistics, and each row group, its texts as a dictionary and as themselves."""
    sealed = SealedTensors(folder, file)
    path = str(folder / file.name)
    size = 0
    with Reading(file):
        for group in sealed.groups:
            reader = pq.ParquetFile(path)
            found = read_bounded(reader, path, [group.index])
            refuse_large(found, len(table.columns))
            plain = reader.read_row_group(group.index, use_threads=False)
            plain.validate(full=True)
            size += _size(conform(plain, table, file.name))
    return size


def _size(table: pa.Table | None) -> int:
    return int(table.nbytes) if table is not None else 0


def answer(stdin: IO[bytes], stdout: IO[bytes]) -> None:
    """Answer what is asked until nobody does any more."""
    while True:
        idle = threading.Timer(IDLE_S, os._exit, (0,))
        idle.daemon = True
        idle.start()
        line = stdin.readline()
        idle.cancel()
        if not line:
            return
        asked = json.loads(line)
        schema, data = stdin.read(asked["schema"]), stdin.read(asked["data"])
        said: int | str | None
        try:
            said = decode(asked, schema, data)
        except RunError as error:
            said = str(error)
        except MemoryError:
            said = f"{asked['name']} needs more than {MAX_MEMORY_GIB} GiB to read; no segment of a run does"
        except FileNotFoundError:
            said = None
        stdout.write(json.dumps(said).encode() + b"\n")
        stdout.flush()


if __name__ == "__main__":
    with bounded_memory(MAX_MEMORY_GIB):
        answer(sys.stdin.buffer, sys.stdout.buffer)
