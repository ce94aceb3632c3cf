"""The writer of a run during training: whatever happens to its folder, the loop continues and never waits for long.

    >>> writer = TrainingWriter("runs/a")      # a `RunWriter` that raises no OSError
    >>> writer.append("steps", {"step": [0]})

While writes succeed quickly, `append` writes in the calling thread, and the operating system has the rows when it
returns. After the first write that fails or takes longer than `SLOW_S`, and from the start on network file systems,
which can hang, a background thread writes. `append` then waits for it for at most `HANDOVER_TIMEOUT_S`. Rows that the
thread has not written wait in memory, at most `MAX_BYTES` of them. Sampled tensors may take half of that, so that steps
and events are dropped last, and nothing is sampled while a quarter is full. Failures are logged once, and recorded in
`events` as soon as events can be written again.
"""

import dataclasses
import functools
import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from amp_core.store import shutdown
from amp_core.store.record_batch import message
from amp_core.store.writer import RunWriter

SLOW_S = 0.25
"""After a write that takes longer, the background thread writes."""
HANDOVER_TIMEOUT_S = 0.05
"""How long one append waits for the thread; the next does not, until the thread has caught up."""
RETRY_S = 1.0
"""Pause before a failed write is tried again."""
END_TIMEOUT_S = 10.0
"""How long `close` waits for a folder that does not respond."""
MAX_BYTES = 32 * 2**20
"""Rows in memory: some twenty thousand steps."""
DROPPED_LAST = frozenset({"steps", "events"})
NETWORK_FILE_SYSTEMS = (
    "nfs",
    "cifs",
    "smb",
    "fuse",
    "lustre",
    "ceph",
    "gpfs",
    "beegfs",
    "gluster",
    "9p",
    "afs",
    "virtiofs",
)
"""Prefixes of the names of network file systems."""

log = logging.getLogger("amp_core")


class _Task(NamedTuple):
    """Work for the thread; for rows, with their bytes in memory, table and number."""

    act: Callable[[], None]
    size: int = 0
    table: str = ""
    rows: int = 0


class TrainingWriter(RunWriter):
    """Takes the arguments of `RunWriter` and refuses the same folders. After that it raises only `RunError`, for rows
    that do not fit their table."""

    def __init__(self, folder: str | os.PathLike[str], **settings: Any) -> None:
        self._queue_lock = threading.RLock()
        self._queue_changed = threading.Condition(self._queue_lock)
        self._queue: deque[_Task] = deque()
        self._queued_bytes = 0
        self._queued_count = 0
        self._done_count = 0
        self._thread: threading.Thread | None = None
        self._direct = True
        self._keeps_up = True
        self._closing = False
        self._stopped = threading.Event()
        self._queueing_threads: set[int] = set()  # threads that are queueing a task
        self._failure: tuple[str, float] | None = None
        self._dropped: Counter[str] = Counter()
        self._logged: set[str] = set()
        super().__init__(folder, **settings)
        self._direct = not can_hang(self.folder)

    @property
    def crowded(self) -> bool:
        """Whether too many rows wait to be written for a step to be sampled."""
        return self._queued_bytes > MAX_BYTES // 4

    @property
    def written(self) -> bool:
        """Whether the operating system has all appended rows, so that they survive the death of the process."""
        return not self._queue

    def append(self, table: str, columns: Mapping[str, Any]) -> None:
        """`RunWriter.append`, in at most `SLOW_S` if the file system responds, else in `HANDOVER_TIMEOUT_S`."""
        if self._pid != os.getpid():
            return
        if self._direct and self._write_directly(functools.partial(super().append, table, columns)):
            return
        batch = message(table, columns, self.rank)
        rows = len(next(iter(columns.values())))
        self._enqueue(_Task(functools.partial(self._write_rows, table, batch), len(batch), table, rows))

    def update_head(self, **changes: Any) -> None:
        """`RunWriter.update_head`; the background thread syncs it to disk."""
        if self._pid != os.getpid() or self.closed:
            return
        self.head = dataclasses.replace(self.head, **changes)
        self._enqueue(_Task(self._write_head))

    def close(self, status: str = "finished", end_reason: str | None = None) -> None:
        """Write queued rows and the end; takes at most `END_TIMEOUT_S` if the folder does not respond."""
        if self._pid == os.getpid():
            self._release_locks()
        super().close(status, end_reason)

    def _write_pending(self) -> None:
        try:
            super()._write_pending()
        except Exception as error:  # e.g. of a failed device: pending rows are lost, the run is not
            self._log_once(f"not all of the run's end was recorded: {type(error).__name__}: {error}")
            self.event("warning", "not recorded", f"what was held back at the end: {type(error).__name__}: {error}")

    def _end(self, status: str, end_reason: str | None) -> None:
        try:
            with self._queue_changed:
                self._closing = True
                self._enqueue(_Task(self._report))
                self._enqueue(_Task(functools.partial(self._stop, status, end_reason)))
            if not self._stopped.wait(END_TIMEOUT_S):
                self._log_once(f"the end of the run could not be written within {END_TIMEOUT_S:g} s to {self.folder}")
        finally:
            self._release()

    def busy(self) -> bool:
        """See `RunWriter.busy`."""
        return super().busy() or threading.get_ident() in self._queueing_threads

    # inside

    def _release_locks(self) -> None:
        """Release locks that this thread still holds: Ctrl-C may arrive after a lock was acquired and before the block
        that releases it. The background thread could not write the end otherwise."""
        for lock in (self._lock, self._queue_lock):
            while lock._is_owned():  # type: ignore[attr-defined]  # used by `threading.Condition` too
                lock.release()

    def _write_directly(self, write: Callable[[], None]) -> bool:
        """Write in this thread; False if that failed, or another thread held the lock for too long."""
        began = time.monotonic()
        if not self._lock.acquire(timeout=HANDOVER_TIMEOUT_S):
            self._direct = False
            return False
        self._lock.release()  # not kept: on a signal the background thread must be able to write the end
        try:
            write()
        except OSError as error:
            self._report_failure(error)
            self._direct = False
            return False
        if time.monotonic() - began > SLOW_S:
            self._direct = False
            self._log_once(f"writing to {self.folder} is slow; it continues in the background")
        return True

    def _stop(self, status: str, end_reason: str | None) -> None:
        try:
            self._write_end(status, end_reason)
        finally:
            self._stopped.set()

    def _write_rows(self, table: str, batch: bytes) -> None:
        with self._writing() as may_write:
            if may_write:
                self._put(table, batch)

    def _enqueue(self, one: "_Task") -> None:
        """Queue a task for the thread, and wait for it for a short time."""
        me = threading.get_ident()
        self._queueing_threads.add(me)
        try:
            with self._queue_changed:
                self._add_task(one)
        finally:
            self._queueing_threads.discard(me)
        if self._closing_thread != me:
            shutdown.after_write()

    def _add_task(self, one: "_Task") -> None:
        room = MAX_BYTES if one.table in DROPPED_LAST else MAX_BYTES // 2
        if one.size and self._queued_bytes + one.size > room:
            self._dropped[one.table] += one.rows
            return
        self._queue.append(one)
        self._queued_bytes += one.size
        self._queued_count += 1
        mine = self._queued_count
        if not self._has_thread():
            return
        self._queue_changed.notify_all()
        if self._keeps_up and not self._closing and threading.current_thread() is not self._thread:
            done = self._queue_changed.wait_for(
                lambda: self._done_count >= mine or not self._keeps_up, HANDOVER_TIMEOUT_S
            )
            self._keeps_up = self._keeps_up and done

    def _has_thread(self) -> bool:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="ampscope-write", daemon=True)
            try:
                self._thread.start()
            except RuntimeError:  # at interpreter exit no thread can be started
                self._thread = None
                self._closing = True
                while self._queue:
                    self._run_first()
                return False
        return True

    def _work(self) -> None:
        while not self._stopped.is_set():
            with self._queue_changed:
                self._queue_changed.wait_for(lambda: len(self._queue) > 0)
            if not self._run_first():
                self._stopped.wait(RETRY_S)

    def _run_first(self) -> bool:
        """Run the oldest task; False if it must be tried again."""
        one = self._queue[0]
        failed = False
        try:
            try:
                one.act()
            except OSError:
                if not (self._closing and one.rows):
                    raise
                one.act()  # the fault may be in one file, and the next write opens a new one
        except Exception as error:
            self._report_failure(error)
            failed = True
            if isinstance(error, OSError) and not self._closing:
                with self._queue_changed:
                    self._keeps_up = False
                    self._queue_changed.notify_all()
                return False
        with self._queue_changed:
            self._queue.popleft()
            self._queued_bytes -= one.size
            self._done_count += 1
            if failed and one.rows:
                self._dropped[one.table] += one.rows
            if not self._queue:
                self._keeps_up = True
                if not failed and not self.closed and (self._failure is not None or self._dropped):
                    self._queue += [_Task(self._report), _Task(self._write_head)]
                    self._queued_count += 2
            self._queue_changed.notify_all()
        return True

    def _report_failure(self, error: Exception) -> None:
        reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        if self._failure is None:
            self._failure = (reason, self.time_s())
        self._log_once(f"{self.folder} cannot be written: {reason}; training continues, and rows wait in memory")

    def _report(self) -> None:
        """If writing failed since the last report, record that in `events` and in the log."""
        if self._failure is None and not self._dropped:
            return
        reason, since = self._failure or ("it did not keep up", self.time_s())
        lost = ", ".join(f"{count} of {table}" for table, count in sorted(self._dropped.items()))
        detail = f"the folder could not be written for {self.time_s() - since:.0f} s: {reason}; "
        detail += (
            f"rows lost because memory was full: {lost}" if lost else ("all rows were kept and are being written now")
        )
        kind, name = ("warning", "not recorded") if lost else ("phase change", "writing")
        RunWriter.append(  # directly: the end may already be queued before it
            self, "events", {"time_s": [self.time_s()], "kind": [kind], "name": [name], "detail": [detail]}
        )
        self._dropped, self._failure = Counter(), None
        self._log_once(detail)

    def _log_once(self, message: str) -> None:
        """Log a message once."""
        if message not in self._logged:
            self._logged.add(message)
            log.warning("AMPscope: %s", message)


def can_hang(folder: Path) -> bool:
    """Whether `folder` is on a file system that may stop responding, as network file systems do."""
    where = Path(os.path.realpath(folder))
    try:
        mounts = {Path(p.mountpoint): p.fstype for p in psutil.disk_partitions(all=True)}
    except OSError:  # the list of mounts cannot be read
        return False
    kind = next((mounts[p] for p in (where, *where.parents) if p in mounts), "")
    return kind.startswith(NETWORK_FILE_SYSTEMS)
