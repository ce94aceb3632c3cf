"""Segments of a run that is being written: open ones grow, full or old ones are sealed in the background.

>>> segment = OpenSegment(Path("runs/a/steps/00000.arrows"), TABLES["steps"].schema)
>>> segment.write(message("steps", {"step": [0]}, rank=0))
>>> segment.close()
>>> sealer = Sealer()
>>> sealer.put(segment.path)            # becomes 00000.parquet
>>> sealer.finish()
"""

import contextlib
import errno
import functools
import os
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from amp_core.store.atomic import temporary
from amp_core.store.upload import Shipment

CHECK_INTERVAL_S = 1.0
"""How often to check whether the open file was deleted."""

_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"


class OpenSegment:
    """An open segment: an Arrow IPC stream that grows by whole record batches, each with one write to the file."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        path.parent.mkdir(exist_ok=True)
        self.path = path
        self.torn = False
        self._began = self._checked = time.monotonic()
        self._file = open(path, "x+b", buffering=0)  # noqa: SIM115
        self._size = 0
        # Written with the first batch: a file is empty, or holds a schema and rows.
        self._start = bytes(schema.serialize())

    def write(self, batch: bytes) -> None:
        try:
            self._put(self._start + batch)
        except BaseException:  # a full disk, Ctrl-C between two writes: the next batch starts a new segment
            self.torn = True
            raise
        self._start = b""

    def due(self, max_bytes: int, max_age_s: float) -> bool:
        return self.torn or self._size >= max_bytes or time.monotonic() - self._began >= max_age_s

    def removed(self, at_once: bool = False) -> bool:
        """Whether the file was deleted, which loses what is written to it; checks every `CHECK_INTERVAL_S`, or now."""
        now = time.monotonic()
        if not at_once and now - self._checked < CHECK_INTERVAL_S:
            return False
        self._checked = now
        try:
            return os.fstat(self._file.fileno()).st_nlink == 0
        except OSError:  # a network file system no longer knows the file
            return True

    def write_again(self) -> bool:
        """Write a deleted file again, with all its rows: the system keeps its content until it is closed. False if
        the content is lost; raises `OSError` if the file cannot be written."""
        try:
            content = self._content()
        except OSError:
            return False
        self.path.parent.mkdir(exist_ok=True)
        with temporary(self.path.with_name(f".{self.path.name}.tmp")) as unfinished:
            with open(unfinished, "wb") as file:
                file.write(content)
            unfinished.rename(self.path)
        gone, self._file = self._file, open(self.path, "r+b", buffering=0)  # noqa: SIM115
        self._file.seek(0, os.SEEK_END)
        self.torn = False
        gone.close()
        return True

    def _content(self) -> bytes:
        self._file.seek(0)
        content = b""
        while len(content) < self._size:
            part = self._file.read(self._size - len(content))
            if not part:
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(self.path))
            content += part
        return content

    def abandon(self) -> None:
        """Close a file that was deleted."""
        with contextlib.suppress(OSError):
            self._file.close()

    def close(self) -> None:
        with self._file:
            if self.torn:
                self._file.truncate(self._size)
                self._file.seek(self._size)
            if self._size:
                try:
                    self._put(_END_OF_STREAM)
                except OSError:  # no space for eight bytes: a reader needs all of them or none
                    self._file.truncate(self._size)

    def _put(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[self._file.write(rest) :]
        self._size += len(data)


class Sealer:
    """Seals closed segments one after another in a background thread that exists only while there is work, and uploads
    them if the run is written at an address."""

    def __init__(self, shipment: Shipment | None = None) -> None:
        self._shipment = shipment
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def put(self, stream: Path) -> None:
        self._do(functools.partial(self._seal, stream))

    def send_head(self, data: bytes) -> None:
        if self._shipment is not None:
            self._do(functools.partial(self._shipment.send, "run.json", data))

    def _do(self, work: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="ampscope-seal", daemon=True)
            try:
                self._thread.start()
            except RuntimeError:  # at interpreter exit no thread can be started any more
                self._thread = None
                work()
                return
        self._work.put(work)

    def finish(self) -> None:
        """Wait for all seals; raises the last error of one."""
        if self._thread is not None:
            self._work.put(None)
            self._thread.join()
            self._thread = None
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except Exception as error:  # the stream stays, and readers read it like the Parquet file
                self._error = error

    def _seal(self, stream: Path) -> None:
        sealed = stream.with_suffix(".parquet")
        try:
            seal(stream)
        finally:  # a stream that cannot be sealed is sent as it is: the local folder is removed at the end
            written = sealed if sealed.exists() else stream
            if self._shipment is not None and written.exists():
                self._shipment.send(f"{stream.parent.name}/{written.name}")


def seal(stream: Path) -> None:
    """Turn the closed Arrow stream `NNNNN.arrows` into `NNNNN.parquet` beside it, then remove the stream."""
    if stream.stat().st_size == 0:  # its first write failed
        stream.unlink()
        return
    with pa.memory_map(str(stream)) as source:
        table = pa.ipc.open_stream(source).read_all()
        with temporary(stream.with_name(f".{stream.stem}.parquet.tmp")) as unfinished:
            pq.write_table(table, unfinished, compression="zstd")
            with unfinished.open("rb") as file:
                # Before the stream is removed: a power cut may keep the rename and lose the content.
                os.fsync(file.fileno())
            unfinished.replace(stream.with_suffix(".parquet"))
    stream.unlink()
