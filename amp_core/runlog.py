"""Write a run folder: append rows, seal segments, write an end in every case.

    >>> writer = RunWriter("runs/a", name="my run", config={"precision": "fp16"})
    >>> writer.append("steps", {"step": [0], "loss": [2.5], "loss_scale": [65536.0]})
    >>> writer.event("skipped", name="head.weight", step=0)
    >>> writer.close()

Each table is a list of segments. The open one is an Arrow IPC stream, `steps/00000.arrows`; every `append` adds one
record batch to it with a single write to the file, so `kill -9` loses at most the batch being written. A segment that
is full or old is sealed as `00000.parquet` by a background thread: written aside, renamed, and only then is the
stream removed. `run.json` is replaced atomically. Nothing is modified in place.

`run.py` reads what this writes; `packing.py` makes and opens zips.
"""

import dataclasses
import datetime
import functools
import io
import os
import queue
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from amp_core import _ending
from amp_core.schema import TABLES, Head, RunError

SEAL_BYTES = 16 * 2**20
"""A segment larger than this is sealed: a few thousand steps, some tens of sampled steps of a large model."""
SEAL_AGE_S = 600.0
"""A segment older than this is sealed, so that a week's run never keeps much in the wordier stream form."""

BESIDE = frozenset({"console.log", "job.json", "config.json"})
"""Files that may lie in the folder before the run begins: `jobs` puts them there."""


class RunWriter:
    """Writes one run folder, or the part of one that process `rank` of `world_size` contributes.

    Safe to use from several threads. In a forked child every call does nothing: the run belongs to the process that
    opened it. Raises `RunError` where the folder cannot be used.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        name: str | None = None,
        config: Mapping[str, Any] | None = None,
        environment: Mapping[str, Any] | None = None,
        model: Mapping[str, Any] | None = None,
        rank: int = 0,
        world_size: int = 1,
        seal_bytes: int = SEAL_BYTES,
        seal_age_s: float = SEAL_AGE_S,
    ) -> None:
        self.folder = Path(folder)
        self.rank = rank
        self._seal_bytes = seal_bytes
        self._seal_age_s = seal_age_s
        self._began = time.time()
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._writing_thread: int | None = None
        self._segments: dict[str, _Segment] = {}
        self._counts: dict[str, int] = {}
        self._sealer = _Sealer()
        self.closed = False
        self.before_end: Callable[[], None] | None = None
        """Called once when the run is about to end, however that comes about: the place for what is still held back."""
        self.head = Head(
            run_id=uuid.uuid4().hex[:12],
            name=name or self.folder.name,
            created_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
            config=config or {},
            environment=environment or {},
            model=model or {},
            world_size=world_size,
            process=this_process(),
        )
        self._claim()
        _ending.watch_over(self)

    # what a run is made of

    def time_s(self) -> float:
        """Seconds since the run was created."""
        return time.time() - self._began

    def append(self, table: str, columns: Mapping[str, Any]) -> None:
        """Add rows to `table`: one sequence (list, NumPy or Arrow array) per column, all of one length.

        Columns not given are null, or what the schema gives as their default; `rank` is filled in. When this returns
        the rows are with the operating system and survive the death of the process.
        """
        with self._writing() as may_write:
            if may_write:
                self._segment(table).write(_batch(table, columns, self.rank))

    def event(self, kind: str, name: str = "", detail: str = "", step: int | None = None) -> None:
        """Record that something happened now; `kind` is one of the words in the schema's description of events."""
        self.append(
            "events",
            {"step": [step], "time_s": [self.time_s()], "kind": [kind], "name": [name], "detail": [detail]},
        )

    def update_head(self, **changes: Any) -> None:
        """Replace fields of the head, e.g. `update_head(results={"eval_loss": 2.1})`. Rank 0 writes it, others keep
        it to themselves."""
        with self._writing() as may_write:
            if may_write:
                self.head = dataclasses.replace(self.head, **changes)
                self._write_head()

    # its end

    def close(self, status: str = "finished", end_reason: str | None = None) -> None:
        """Seal what is open and write the end. Closing twice is harmless; the first end stands."""
        if self.closed or self._pid != os.getpid():
            return
        if self.before_end is not None:
            hold, self.before_end = self.before_end, None
            hold()
        self.event("ended", name=status, detail=end_reason or "")
        with self._writing():
            self.closed = True
            for segment in self._segments.values():
                segment.close()
                self._sealer.put(segment.path)
            self._segments.clear()
            _ending.release(self)
            self.head = dataclasses.replace(self.head, status=status, end_reason=end_reason)
            try:
                self._sealer.finish()
            finally:  # a segment that could not be sealed is still readable as a stream; the end must be written
                self._write_head()

    def __enter__(self) -> "RunWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is None:
            self.close()
        else:
            self.close(*_ending.describe(kind, error))

    def end(self, status: str, reason: str) -> None:
        """The process is ending (called by `_ending`)."""
        self.close(status, reason)

    def busy(self) -> bool:
        """Whether this thread is in the middle of a write (asked by `_ending` from a signal handler)."""
        return self._writing_thread == threading.get_ident()

    # inside

    def _claim(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            present = {p.name for p in self.folder.iterdir()}
            if self.rank == 0:
                self._refuse_foreign(present)
                self._write_head()
        except OSError as error:
            raise RunError(f"into={str(self.folder)!r} cannot be written: {error.strerror or error}") from error

    def _refuse_foreign(self, present: set[str]) -> None:
        if "run.json" in present:
            raise RunError(f"into={str(self.folder)!r} already holds a run; give a folder that does not exist yet")
        ours = BESIDE | TABLES.keys()  # other ranks may have begun before rank 0
        # A dot begins what nobody means by the folder's content: our own files aside, .DS_Store, .nfs0001.
        foreign = sorted(n for n in present if n not in ours and not n.startswith("."))
        if foreign:
            raise RunError(
                f"into={str(self.folder)!r} holds other files ({foreign[0]!r}); give an empty folder or a new one"
            )

    def _write_head(self) -> None:
        if self.rank == 0:
            replace_file(self.folder / "run.json", self.head.to_json().encode())

    def _segment(self, table: str) -> "_Segment":
        segment = self._segments.get(table)
        if segment is not None and segment.due(self._seal_bytes, self._seal_age_s):
            segment.close()
            self._sealer.put(segment.path)
            segment = None
        if segment is None:
            number = self._counts.get(table, 0)
            self._counts[table] = number + 1
            suffix = f".r{self.rank}" if self.rank else ""
            path = self.folder / table / f"{number:05d}{suffix}.arrows"
            segment = self._segments[table] = _Segment(path, TABLES[table].schema)
        return segment

    def _writing(self) -> "_Writing":
        return _Writing(self)


class _Writing:
    """Holds the writer's lock; says whether writing is still possible here; lets a waiting signal through after."""

    def __init__(self, writer: RunWriter) -> None:
        self._writer = writer

    def __enter__(self) -> bool:
        writer = self._writer
        if writer._pid != os.getpid():  # forked: its lock may have been copied in a locked state
            return False
        writer._lock.acquire()
        writer._writing_thread = threading.get_ident()
        return not writer.closed

    def __exit__(self, *_: object) -> None:
        writer = self._writer
        if writer._pid != os.getpid():
            return
        writer._writing_thread = None
        writer._lock.release()
        _ending.after_write()


class _Segment:
    """An open segment: an Arrow IPC stream that grows by whole record batches."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        path.parent.mkdir(exist_ok=True)
        self.path = path
        self._began = time.monotonic()
        self._size = 0
        # Unbuffered, each batch collected first: one append is one write(2), so a torn tail needs a kill within it.
        self._file = open(path, "xb", buffering=0)  # noqa: SIM115
        self._pending = io.BytesIO()
        self._stream = pa.ipc.new_stream(self._pending, schema)

    def write(self, batch: pa.RecordBatch) -> None:
        self._stream.write_batch(batch)
        self._flush()

    def due(self, most_bytes: int, most_seconds: float) -> bool:
        return self._size >= most_bytes or time.monotonic() - self._began >= most_seconds

    def close(self) -> None:
        self._stream.close()  # writes the end-of-stream mark
        self._flush()
        self._file.close()

    def _flush(self) -> None:
        data = memoryview(self._pending.getvalue())
        self._pending.seek(0)
        self._pending.truncate()
        self._size += len(data)
        while data:
            data = data[self._file.write(data) :]


class _Sealer:
    """Seals closed segments one after another in a background thread that lives only while there is work."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Path | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def put(self, stream: Path) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="ampscope-seal", daemon=True)
            try:
                self._thread.start()
            except RuntimeError:  # at interpreter exit no thread can be started any more
                self._thread = None
                seal(stream)
                return
        self._work.put(stream)

    def finish(self) -> None:
        """Wait for all seals; raises what the last failing one raised."""
        if self._thread is not None:
            self._work.put(None)
            self._thread.join()
            self._thread = None
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while (stream := self._work.get()) is not None:
            try:
                seal(stream)
            except Exception as error:  # the stream stays and is as readable as the parquet would have been
                self._error = error


def seal(stream: Path) -> None:
    """Turn the closed Arrow stream `NNNNN.arrows` into `NNNNN.parquet` beside it, then remove the stream."""
    with pa.memory_map(str(stream)) as source:
        table = pa.ipc.open_stream(source).read_all()
        aside = stream.with_name(f".{stream.stem}.parquet.tmp")
        pq.write_table(table, aside, compression="zstd")
        aside.replace(stream.with_suffix(".parquet"))
    stream.unlink()


def replace_file(path: Path, data: bytes) -> None:
    """Write `data` to `path` so that a reader, or a crash, finds either the old content or the new."""
    aside = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    with open(aside, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)


def this_process() -> dict[str, Any]:
    """Who this process is: enough to tell later whether it still lives, and whether we could know."""
    return {"machine": this_machine(), "pid": os.getpid(), "started_s": psutil.Process().create_time()}


def process_alive(process: Mapping[str, Any]) -> bool | None:
    """Whether the process that `this_process` described still runs; None where another machine would have to say.

    The start time is compared too, since pids are given out again; a zombie (ended, not yet waited for) is not alive.
    """
    if process.get("machine") != this_machine():
        return None
    pid, started = process.get("pid"), process.get("started_s")
    if not isinstance(pid, int) or not isinstance(started, int | float):
        return None
    try:
        found = psutil.Process(pid)
        # create_time is reckoned from boot time, which clock corrections move by fractions of a second.
        return abs(found.create_time() - started) < 2.0 and found.status() != psutil.STATUS_ZOMBIE
    except (psutil.NoSuchProcess, ValueError, OverflowError):
        return False
    except psutil.AccessDenied:
        return True


@functools.cache
def this_machine() -> str:
    """The host, this boot of it, and the container: where a pid means something."""
    parts = [socket.gethostname()]
    boot, namespace = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    if boot.exists():
        parts.append(boot.read_text().strip()[:8])
    if namespace.exists():
        parts.append(str(namespace.stat().st_ino))
    return "/".join(parts)


def _batch(table: str, columns: Mapping[str, Any], rank: int) -> pa.RecordBatch:
    spec = TABLES[table]
    unknown = columns.keys() - {c.name for c in spec.columns}
    if unknown:
        raise RunError(f"table {table!r} has no column {sorted(unknown)[0]!r}")
    rows = len(next(iter(columns.values())))
    arrays = []
    for column in spec.columns:
        if column.name in columns:
            arrays.append(_array(columns[column.name], column.type))
        elif column.name == "rank":
            arrays.append(pa.repeat(pa.scalar(rank, column.type), rows))
        else:
            arrays.append(pa.repeat(pa.scalar(column.default, column.type), rows))
    return pa.RecordBatch.from_arrays(arrays, schema=spec.schema)


def _array(values: Any, kind: pa.DataType) -> pa.Array:
    if isinstance(values, pa.Array):
        return values if values.type == kind else values.cast(kind)
    if isinstance(values, Sequence | np.ndarray):
        return pa.array(values, type=kind, from_pandas=False)  # from_pandas would turn NaN into null
    raise TypeError(f"a column is a sequence or an array, not {type(values).__name__}")
