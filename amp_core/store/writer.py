"""Write a run folder: append rows, seal segments, record how the run ended.

    >>> writer = RunWriter("runs/a", name="my run", config={"precision": "fp16"})
    >>> writer.append("steps", {"step": [0], "loss": [2.5], "loss_scale": [65536.0]})
    >>> writer.event("skipped", name="head.weight", step=0)
    >>> writer.close()

Each table is a list of segments. The open one is an Arrow IPC stream, `steps/00000.arrows`; every `append` adds one
record batch to it with a single write to the file, so `kill -9` loses at most the batch being written. A segment that
is full or old is sealed as `00000.parquet` by a background thread: written to a temporary file, renamed, and
only then is the stream removed. `run.json` is replaced atomically. Nothing is modified in place.

A run whose `folder` is an address (`s3://bucket/runs/a`) has its open streams on local disk and only sealed segments at
the address: see `upload.py`.

`run.py` reads what this writes; `packing.py` makes and opens zips.
"""

import contextlib
import dataclasses
import datetime
import errno
import logging
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from amp_core.hardware.host import this_process
from amp_core.schema import Head, RunError
from amp_core.store import shutdown
from amp_core.store.atomic import check_outside_runs, create_file, replace_file
from amp_core.store.claim import refusal, refuse_content, refuse_rows
from amp_core.store.open_segments import REMOVED, OpenSegments
from amp_core.store.record_batch import message
from amp_core.store.resume import Earlier, earlier_part, with_earlier_nodes
from amp_core.store.segment_writer import Sealer
from amp_core.store.upload import Shipment, seal_age_s
from amp_core.store.urls import Address, located

SEAL_BYTES = 16 * 2**20
"""A segment larger than this is sealed: a few thousand steps, some tens of sampled steps of a large model."""
SEAL_AGE_S = 600.0
"""A segment older than this is sealed, so that a long run keeps little in the larger stream form."""

log = logging.getLogger("amp_core")


class RunWriter:
    """Writes one run folder, or the part of one that process `rank` of `world_size` contributes.

    Safe to use from several threads. In a forked child every call does nothing: the run belongs to the process that
    opened it. With `resume` an existing run in the folder is resumed. Raises `RunError` if the folder cannot
    be used.
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
        resume: bool = False,
        seal_bytes: int = SEAL_BYTES,
        seal_age_s: float = SEAL_AGE_S,
    ) -> None:
        self.into = located(folder)
        """The run's folder or address."""
        self._shipment = Shipment(self.into) if isinstance(self.into, Address) else None
        self.folder = self._shipment.staging if self._shipment is not None else _absolute(folder)
        """The local folder, as an absolute path: the loop may change its working directory."""
        self.rank = rank
        self._seal_age_s = seal_age_s
        self._began = time.monotonic()  # not time.time(): clocks are set back
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._closing_lock = threading.RLock()
        self._writing_thread: int | None = None
        self._closing_thread: int | None = None
        self._ended = threading.Event()
        self.earlier = self._earlier() if resume else None
        """The part of a resumed run that earlier processes wrote; None for a new run."""
        self._sealer = Sealer(self._shipment)
        self._segments = OpenSegments(
            self.folder,
            rank,
            self.earlier.segments if self.earlier is not None else {},
            self._sealer,
            seal_bytes,
            self._max_age_s,
            self._check_ownership,
        )
        self.closed = False
        self.before_end: Callable[[], None] | None = None
        """Called once before the run ends, however it ends, to write what is still pending."""
        self.head = Head(
            run_id=uuid.uuid4().hex[:12],
            name=name or self.into.name or self.folder.name,
            created_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
            config=config or {},
            environment=environment or {},
            model=model or {},
            world_size=world_size,
            process=this_process(),
        )
        if self.earlier is not None:
            before = self.earlier.head
            self._began -= self.earlier.elapsed_s
            self.head = dataclasses.replace(
                self.head,
                run_id=before.run_id,
                name=name or before.name,
                created_at=before.created_at,
                environment=with_earlier_nodes(before.environment, self.head.environment),
                config={**before.config, **self.head.config},
                extra=before.extra,
            )
        self._claim()

    @property
    def crowded(self) -> bool:
        """Whether too many rows wait to be written for a step to be sampled. This writer never queues rows."""
        return False

    # rows and head

    def time_s(self) -> float:
        """Seconds since the run was created."""
        return time.monotonic() - self._began

    def append(self, table: str, columns: Mapping[str, Any]) -> None:
        """Add rows to `table`: one sequence (list, NumPy or Arrow array) per column, all of one length.

        Columns not given are null, or what the schema gives as their default; `rank` is filled in. When this returns
        the rows are with the operating system and survive the death of the process.
        """
        with self._writing() as may_write:
            if may_write:
                self._put(table, message(table, columns, self.rank))

    def _put(self, table: str, batch: bytes) -> None:
        self._segments.of_table(table).write(batch)
        if self._shipment is not None:  # at an address rows are visible only once they are sealed
            self._segments.seal_due()

    def event(self, kind: str, name: str = "", detail: str = "", step: int | None = None, **more: Any) -> None:
        """Record an event now; `kind` is one of `schema.EVENT_KINDS`, `more` holds further columns."""
        row = {"step": step, "time_s": self.time_s(), "kind": kind, "name": name, "detail": detail} | more
        self.append("events", {column: [value] for column, value in row.items()})

    def update_head(self, **changes: Any) -> None:
        """Replace fields of the head, e.g. `update_head(results={"eval_loss": 2.1})`. Only rank 0
        writes it to disk."""
        with self._writing() as may_write:
            if may_write:
                self.head = dataclasses.replace(self.head, **changes)
                self._write_head()

    # closing

    def close(self, status: str = "finished", end_reason: str | None = None) -> None:
        """Seal the open segments and write the end. A second call does nothing."""
        if self._pid != os.getpid():
            return
        with self._closing_lock:
            if self._closing_thread is not None:
                return
            self._closing_thread = threading.get_ident()
        try:
            self._write_pending()
            self.event("ended", name=status, detail=end_reason or "")
        finally:
            self._end(status, end_reason)

    def _write_pending(self) -> None:
        if self.before_end is not None:
            self.before_end()

    def _end(self, status: str, end_reason: str | None) -> None:
        try:
            self._write_end(status, end_reason)
        finally:
            self._release()

    def _write_end(self, status: str, end_reason: str | None) -> None:
        with contextlib.ExitStack() as afterwards:  # all of it, whichever part fails
            if self._shipment is not None:
                afterwards.callback(self._shipment.finish)
            afterwards.callback(self._sealer.finish)
            with self._writing(), contextlib.ExitStack() as last:
                self.closed = True
                self.head = dataclasses.replace(self.head, status=status, end_reason=end_reason)
                last.callback(self._write_head)  # also if sealing fails: readers read the stream as well
                last.callback(self._segments.seal_all)
                self._restore_removed()

    def _release(self) -> None:
        """Release signal handlers and locks; called on the thread that closes."""
        shutdown.unregister(self)
        self._closing_thread = _NO_THREAD
        self._ended.set()
        shutdown.after_write()

    def __enter__(self) -> "RunWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is None:
            self.close()
        else:
            self.close(*shutdown.describe(kind, error))

    def end(self, status: str, reason: str) -> None:
        """The process is ending (called by `shutdown`)."""
        self.close(status, reason)
        self._ended.wait(_END_TIMEOUT_S)  # another thread may be closing it already

    def busy(self) -> bool:
        """Whether this thread is in the middle of a write or of the end (called by `shutdown` in a signal handler)."""
        return threading.get_ident() in (self._writing_thread, self._closing_thread)

    # inside

    def _claim(self) -> None:
        try:
            os.fspath(self.folder).encode()  # Arrow cannot open other file names
            if self._shipment is None:
                check_outside_runs(self.folder, "into")
            self.folder.mkdir(parents=True, exist_ok=True)
            present = {p.name for p in self.folder.iterdir()} if self._shipment is None else self._shipment.names()
            if self.earlier is not None:
                pass
            elif self.rank == 0:
                refuse_content(present, self.into)
            else:
                refuse_rows(self.folder, self.rank, self.into)
            shutdown.register(self)  # first, so that every run.json with "running" gets an end
            if self._shipment is not None and self.rank == 0:
                self._shipment.begin(self.head.to_json().encode())  # now, so that a refusal is raised now
            if self.earlier is not None:
                self._write_head()
            elif self.rank == 0:
                create_file(self.folder / "run.json", self.head.to_json().encode())
        except BaseException as error:
            shutdown.unregister(self)
            if self._shipment is not None:
                shutil.rmtree(self.folder, ignore_errors=True)
            if (refused := refusal(error, self.folder, self.into)) is not None:
                raise refused from error
            raise

    def _earlier(self) -> Earlier | None:
        if self._shipment is not None:
            raise RunError(f"into={str(self.into)!r} is an address, where runs cannot be resumed; give a folder")
        return earlier_part(self.folder, self.rank)

    def _write_head(self) -> None:
        if self.rank == 0:
            data = self.head.to_json().encode()
            self._check_ownership()
            replace_file(self.folder / "run.json", data)
            self._sealer.send_head(data)

    def _restore_removed(self) -> None:
        """At the end, write deleted files again and record that in `events`."""
        removed = self._segments.removed()
        if not removed:
            return
        lost = list(removed)
        try:
            for table in removed:
                if self._segments.write_again(table):
                    lost.remove(table)
            kept = "all rows not yet sealed were kept and are being written now"
            rest = f"rows lost: those in {', '.join(lost)}" if lost else kept
            for table in lost:
                self._segments.abandon(table)
            kind, name = ("warning", "not recorded") if lost else ("phase change", "writing")
            row = {"time_s": self.time_s(), "kind": kind, "name": name, "detail": f"{REMOVED}; {rest}"}
            self._put("events", message("events", {column: [value] for column, value in row.items()}, self.rank))
            log.warning("AMPscope: %s; %s", REMOVED, rest)
        except OSError:
            if lost:
                log.warning("AMPscope: %s, and rows with them: those in %s", REMOVED, ", ".join(lost))
            raise
        finally:
            for table in lost:
                self._segments.abandon(table)

    def _check_ownership(self) -> None:
        """Raise `OSError` if the folder is gone or holds another run; write the head again if only that is gone."""
        if self.rank:
            return
        head = self.folder / "run.json"
        try:
            if self.head.run_id.encode() not in head.read_bytes():
                raise FileExistsError(errno.EEXIST, "the folder now holds another run", str(head))
        except FileNotFoundError:
            create_file(head, self.head.to_json().encode())

    def _max_age_s(self) -> float:
        return self._seal_age_s if self._shipment is None else min(self._seal_age_s, seal_age_s(self.time_s()))

    def _writing(self) -> "_Writing":
        return _Writing(self)


def _absolute(folder: str | os.PathLike[str]) -> Path:
    try:
        return Path(folder).absolute()
    except FileNotFoundError:  # the working directory was removed: making the folder says so
        return Path(folder)


class _Writing:
    """Holds the writer's lock; yields whether writing is still possible; handles a pending signal afterwards."""

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
        if writer._closing_thread != threading.get_ident():  # a signal must not interrupt the end between two writes
            shutdown.after_write()


_END_TIMEOUT_S = 10.0
_NO_THREAD = 0  # no thread has this number
