"""The writer of a run while it trains: whatever happens to its folder, the loop continues and never waits for long.

    >>> writer = TrainingWriter("runs/a")      # a `RunWriter` that raises no OSError
    >>> writer.append("steps", {"step": [0]})

While writes succeed quickly, `append` writes itself, and the operating system has the rows when it returns. After the
first write that fails or takes longer than `SLOW_S`, and from the start on network file systems, which can hang, a
background thread writes. `append` then waits for it for at most `HANDOVER_TIMEOUT_S`. Rows that the thread has not
written wait in memory, at most `MAX_BYTES` of them. Sampled tensors may take half of that, so that steps and events are
dropped last, and nothing is sampled while a quarter is full. Failures are logged once, and recorded in `events` as soon
as events can be written again.
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
"""After a write that takes longer, the thread writes."""
HANDOVER_TIMEOUT_S = 0.05
"""How long one append waits for the thread; the next does not, until the thread has caught up."""
RETRY_S = 1.0
"""Pause before a failed write is tried again."""
END_TIMEOUT_S = 10.0
"""How long `close` waits for a folder that does not answer."""
MAX_BYTES = 32 * 2**20
"""Rows in memory: some twenty thousand steps."""
DROPPED_LAST = frozenset({"steps", "events"})
CAN_HANG = ("nfs", "cifs", "smb", "fuse", "lustre", "ceph", "gpfs", "beegfs", "gluster", "9p", "afs", "virtiofs")
"""Prefixes of the names of network file systems."""

log = logging.getLogger("amp_core")


class _Waiting(NamedTuple):
    """Something for the thread to do; of rows, their bytes in memory, their table and their number too."""

    act: Callable[[], None]
    size: int = 0
    table: str = ""
    rows: int = 0


class TrainingWriter(RunWriter):
    """Takes the arguments of `RunWriter` and refuses the same folders; later raises `RunError` alone, for rows that do
    not fit their table."""

    def __init__(self, folder: str | os.PathLike[str], **settings: Any) -> None:
        self._line = threading.RLock()
        self._at_hand = threading.Condition(self._line)
        self._waiting: deque[_Waiting] = deque()
        self._held = 0
        self._given = 0
        self._done = 0
        self._thread: threading.Thread | None = None
        self._direct = True
        self._keeps_up = True
        self._hurry = False
        self._stopped = threading.Event()
        self._handing: set[int] = set()  # threads that are about to give the thread something to do
        self._trouble: tuple[str, float] | None = None
        self._dropped: Counter[str] = Counter()
        self._logged: set[str] = set()
        super().__init__(folder, **settings)
        self._direct = not can_hang(self.folder)

    @property
    def crowded(self) -> bool:
        """Whether so much waits to be written that nothing should be sampled."""
        return self._held > MAX_BYTES // 4

    @property
    def written(self) -> bool:
        """Whether every row appended is with the operating system, so that the death of the process loses none."""
        return not self._waiting

    def append(self, table: str, columns: Mapping[str, Any]) -> None:
        """`RunWriter.append`, in at most `SLOW_S` where the file system answers, else in `HANDOVER_TIMEOUT_S`."""
        if self._pid != os.getpid():
            return
        if self._direct and self._tried(functools.partial(super().append, table, columns)):
            return
        batch = message(table, columns, self.rank)
        rows = len(next(iter(columns.values())))
        self._hand_over(_Waiting(functools.partial(self._write_rows, table, batch), len(batch), table, rows))

    def update_head(self, **changes: Any) -> None:
        """`RunWriter.update_head`; it is the thread that waits until the disk has it."""
        if self._pid != os.getpid() or self.closed:
            return
        self.head = dataclasses.replace(self.head, **changes)
        self._hand_over(_Waiting(self._write_head))

    def close(self, status: str = "finished", end_reason: str | None = None) -> None:
        """Write what is held and the end, for at most `END_TIMEOUT_S` where the folder does not answer."""
        if self._pid == os.getpid():
            self._let_go_of_locks()
        super().close(status, end_reason)

    def _write_what_is_held_back(self) -> None:
        try:
            super()._write_what_is_held_back()
        except Exception as error:  # of a device that failed, say: what was held back is lost, the run is not
            self._log_once(f"not all of the run's end was recorded: {type(error).__name__}: {error}")
            self.event("warning", "not recorded", f"what was held back at the end: {type(error).__name__}: {error}")

    def _end(self, status: str, end_reason: str | None) -> None:
        try:
            with self._at_hand:
                self._hurry = True
                self._hand_over(_Waiting(self._report))
                self._hand_over(_Waiting(functools.partial(self._stop, status, end_reason)))
            if not self._stopped.wait(END_TIMEOUT_S):
                self._log_once(f"the end of the run could not be written within {END_TIMEOUT_S:g} s to {self.folder}")
        finally:
            self._let_go()

    def busy(self) -> bool:
        """See `RunWriter.busy`."""
        return super().busy() or threading.get_ident() in self._handing

    # inside

    def _let_go_of_locks(self) -> None:
        """Ctrl-C may come when a lock is taken and the block that gives it back not yet begun. Then this thread, which
        is in no such block when it ends the run, still holds it, and the other could not write the end."""
        for lock in (self._lock, self._line):
            while lock._is_owned():  # type: ignore[attr-defined]  # what `threading.Condition` asks too
                lock.release()

    def _tried(self, write: Callable[[], None]) -> bool:
        """Write here; False where that did not work, or somebody else has been at it for too long."""
        began = time.monotonic()
        if not self._lock.acquire(timeout=HANDOVER_TIMEOUT_S):
            self._direct = False
            return False
        self._lock.release()  # not held on to: a signal that comes now has the thread write the end
        try:
            write()
        except OSError as error:
            self._failed(error)
            self._direct = False
            return False
        if time.monotonic() - began > SLOW_S:
            self._direct = False
            self._log_once(f"writing to {self.folder} is slow; from now on it is done in the background")
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

    def _hand_over(self, one: "_Waiting") -> None:
        """Let the thread do it, and wait a little for that."""
        me = threading.get_ident()
        self._handing.add(me)
        try:
            with self._at_hand:
                self._put_in_line(one)
        finally:
            self._handing.discard(me)
        if self._closing_thread != me:
            shutdown.after_write()

    def _put_in_line(self, one: "_Waiting") -> None:
        room = MAX_BYTES if one.table in DROPPED_LAST else MAX_BYTES // 2
        if one.size and self._held + one.size > room:
            self._dropped[one.table] += one.rows
            return
        self._waiting.append(one)
        self._held += one.size
        self._given += 1
        mine = self._given
        if not self._has_thread():
            return
        self._at_hand.notify_all()
        if self._keeps_up and not self._hurry and threading.current_thread() is not self._thread:
            done = self._at_hand.wait_for(lambda: self._done >= mine or not self._keeps_up, HANDOVER_TIMEOUT_S)
            self._keeps_up = self._keeps_up and done

    def _has_thread(self) -> bool:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="ampscope-write", daemon=True)
            try:
                self._thread.start()
            except RuntimeError:  # at interpreter exit none can be started any more
                self._thread = None
                self._hurry = True
                while self._waiting:
                    self._do_first()
                return False
        return True

    def _work(self) -> None:
        while not self._stopped.is_set():
            with self._at_hand:
                self._at_hand.wait_for(lambda: len(self._waiting) > 0)
            if not self._do_first():
                self._stopped.wait(RETRY_S)

    def _do_first(self) -> bool:
        """Do what has waited longest; False where it is to be tried again."""
        one = self._waiting[0]
        failed = False
        try:
            try:
                one.act()
            except OSError:
                if not (self._hurry and one.rows):
                    raise
                one.act()  # what is wrong may have been the file alone, and the next is a new one
        except Exception as error:
            self._failed(error)
            failed = True
            if isinstance(error, OSError) and not self._hurry:
                with self._at_hand:
                    self._keeps_up = False
                    self._at_hand.notify_all()
                return False
        with self._at_hand:
            self._waiting.popleft()
            self._held -= one.size
            self._done += 1
            if failed and one.rows:
                self._dropped[one.table] += one.rows
            if not self._waiting:
                self._keeps_up = True
                if not failed and not self.closed and (self._trouble is not None or self._dropped):
                    self._waiting += [_Waiting(self._report), _Waiting(self._write_head)]
                    self._given += 2
            self._at_hand.notify_all()
        return True

    def _failed(self, error: Exception) -> None:
        reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        if self._trouble is None:
            self._trouble = (reason, self.time_s())
        self._log_once(f"{self.folder} cannot be written: {reason}; the training goes on, and rows wait in memory")

    def _report(self) -> None:
        """Say in the run, and in the log, what happened since writing went wrong, if it did."""
        if self._trouble is None and not self._dropped:
            return
        reason, since = self._trouble or ("it did not keep up", self.time_s())
        lost = ", ".join(f"{count} of {table}" for table, count in sorted(self._dropped.items()))
        detail = f"the folder could not be written for {self.time_s() - since:.0f} s: {reason}; "
        detail += (
            f"rows lost, for which memory had no room: {lost}" if lost else "all rows were kept, and are written now"
        )
        kind, name = ("warning", "not recorded") if lost else ("phase change", "writing")
        RunWriter.append(  # here and now: behind what else waits the end may stand already
            self, "events", {"time_s": [self.time_s()], "kind": [kind], "name": [name], "detail": [detail]}
        )
        self._dropped, self._trouble = Counter(), None
        self._log_once(detail)

    def _log_once(self, what: str) -> None:
        """Once in the log."""
        if what not in self._logged:
            self._logged.add(what)
            log.warning("AMPscope: %s", what)


def can_hang(folder: Path) -> bool:
    """Whether `folder` is on a file system that may stop answering, as those of a network do."""
    where = Path(os.path.realpath(folder))
    try:
        mounts = {Path(p.mountpoint): p.fstype for p in psutil.disk_partitions(all=True)}
    except OSError:  # nothing is known of the mounts
        return False
    kind = next((mounts[p] for p in (where, *where.parents) if p in mounts), "")
    return kind.startswith(CAN_HANG)
