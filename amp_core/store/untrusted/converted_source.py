"""Runs of unknown origin: a sandbox process converts each segment into a private file, which is read like any other.

    >>> source = ConvertedSource(FolderSource(Path("shared/runs/a")), sandbox)
    >>> source.read(file, TABLES["steps"], None).rows
    120

Only the sandbox process decodes the run's files. A sealed segment is converted once, a growing stream batch by batch.
The private folder is removed with the source.
"""

import itertools
import shutil
import tempfile
import weakref
from pathlib import Path

import pyarrow.compute as pc

from amp_core.hardware.host import this_machine
from amp_core.schema import Head, RunError, Table
from amp_core.store.segment_reader import File, Segment, appended, read_parquet
from amp_core.store.sources import Source
from amp_core.store.untrusted.sandbox import Sandbox
from amp_core.store.urls import Address

MAX_MEMORY_BYTES = 2**30
"""Limit of the memory for the rows of an untrusted run, all tables together; of `tensors` only parts are held."""
MAX_DISK_BYTES = 4 * 2**30
"""Limit of the size of its private folder."""


def written_here(head: Head) -> bool:
    """Whether a process of this machine wrote the run since the last boot: the head of any other run has another boot
    id."""
    return head.process.get("machine") == this_machine()


class ConvertedSource:
    """Wraps a source; a sandbox decodes all its segments."""

    def __init__(self, source: Source, sandbox: Sandbox) -> None:
        self._source = source
        self._sandbox = sandbox
        self._private: Path | None = None
        self._numbers = itertools.count()
        self._sealed: dict[File, Path] = {}
        self._memory_bytes: dict[str, int] = {}

    @property
    def path(self) -> Path | Address:
        return self._source.path

    def head(self) -> Head:
        return self._source.head()

    def alive(self, head: Head) -> bool:
        return self._source.alive(head)

    def segments(self, table: str) -> dict[str, File]:
        return self._source.segments(table)

    def console(self, lines: int) -> list[str]:
        return self._source.console(lines)

    def fingerprint(self) -> tuple[tuple[str, int, int], ...]:
        return self._source.fingerprint()

    def content(self, file: File, table: Table, start: int = 0) -> bytes | Path:
        """The converted file of a sealed segment; the unchanged bytes from `start` on of a stream."""
        if not file.name.endswith(".parquet"):
            return self._source.content(file, table, start)
        if file not in self._sealed:
            given, out = self._source.content(file, table), self._new_file()
            done = self._sandbox.convert(str(self.path), file, table.name, given, out)
            self._check_memory(file, 0 if table.name == "tensors" and isinstance(given, Path) else done.decoded_bytes)
            self._sealed[file] = out
            self._check_disk()
        return self._sealed[file]

    def read(self, file: File, table: Table, before: Segment | None, where: pc.Expression | None = None) -> Segment:
        """Read a segment; rows that do not match `where` may be left out."""
        if file.name.endswith(".parquet"):
            return read_parquet(file, str(self.content(file, table)), table, before, where=where)
        if before is not None and before.schema is None:  # a stream with dictionaries is read whole each time
            before = None
        start, schema = (before.offset, before.schema) if before is not None else (0, None)
        data, out = self.content(file, table, start), self._new_file()
        try:
            done = self._sandbox.convert(str(self.path), file, table.name, data, out, schema)
            fresh = read_parquet(file, str(out), table, None).table
        finally:
            out.unlink(missing_ok=True)
        held = self._memory_bytes.get(file.name, 0) if before is not None else 0
        self._check_memory(file, held + done.decoded_bytes)
        return Segment(
            file, appended(before.table if before is not None else None, fresh), start + done.end, done.schema
        )

    def _new_file(self) -> Path:
        if self._private is None:
            self._private = Path(tempfile.mkdtemp(prefix="ampscope-"))
            weakref.finalize(self, shutil.rmtree, self._private, ignore_errors=True)
        return self._private / f"{next(self._numbers)}.parquet"

    def _check_memory(self, file: File, size: int) -> None:
        self._memory_bytes[file.name] = size
        if sum(self._memory_bytes.values()) > MAX_MEMORY_BYTES:
            raise RunError(f"{self.path} holds more than {MAX_MEMORY_BYTES / 2**30:.3g} GiB of rows; open it in Python")

    def _check_disk(self) -> None:
        if sum(path.stat().st_size for path in self._sealed.values()) > MAX_DISK_BYTES:
            raise RunError(f"{self.path} takes more than {MAX_DISK_BYTES / 2**30:.3g} GiB of files; open it in Python")
