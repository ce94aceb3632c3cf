"""A stranger's segments are read by a process of its own before this one reads them, so that none can take it down.

    >>> taster = Taster()
    >>> run = open_extract("shared/runs/a", taster=taster)
    >>> run.table("steps")              # refused with a sentence where its taster died of it

Damaged Parquet files end the process that reads them (pyarrow 26), and small ones may say that they are huge. So the
taster decodes each segment as this process will, in bounded memory and time (see `_taster`). It is asked once for each
sealed file of one size and time, and for what is new in a growing stream. Runs that were written on this machine since
it booted are trusted: they are read at once, and a live one costs nothing more. The taster ends when nobody has asked
it for a while.
"""

import json
import os
import subprocess
import sys
import threading
from collections import OrderedDict
from pathlib import Path

from amp_core.hardware.child_environment import python_path
from amp_core.hardware.host import this_machine
from amp_core.schema import Head, RunError
from amp_core.store.segment_reader import File, Segment
from amp_core.store.urls import Address

LONGEST_S = 60.0
"""A segment of 16 MB takes a fraction of a second; what takes longer was made to."""
MAX_HELD = 2**30
"""Bytes that a stranger's run may take here, all tables together; of `tensors` in folders only parts are read."""
MAX_KNOWN = 20_000
"""Files whose verdicts are remembered."""


def written_here(head: Head) -> bool:
    """Whether a process of this machine wrote the run, since it booted: who does not know its boot id cannot say so."""
    return head.process.get("machine") == this_machine()


class Sandbox:
    """The process that tastes, for any number of threads; begun when it is first needed."""

    def __init__(self, longest_s: float = LONGEST_S) -> None:
        self._longest_s = longest_s
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._known: OrderedDict[tuple[str, File], int | str] = OrderedDict()

    def sealed(self, where: str, file: File, table: str, data: bytes | None = None) -> int:
        """Bytes that a Parquet file decodes to; `data` is its content where `where` is no folder. Raises `RunError`."""
        with self._lock:
            if (where, file) not in self._known:
                said = self._asked(where, file, table, data or b"", b"")
                if said is None:
                    raise FileNotFoundError(file.name)
                self._known[where, file] = said
                while len(self._known) > MAX_KNOWN:
                    self._known.popitem(last=False)
            self._known.move_to_end((where, file))
            return _sound(self._known[where, file])

    def stream(self, file: File, table: str, data: bytes, before: Segment | None) -> int:
        """Bytes that whole messages in `data` decode to, which follow what was read `before`. Raises `RunError`."""
        schema = before.schema if before is not None else None
        with self._lock:
            said = self._asked("", file, table, data, bytes(schema.serialize()) if schema is not None else b"")
            return _sound(said or 0)

    def close(self) -> None:
        """End the process, if there is one."""
        with self._lock:
            self._end()

    # inside

    def _asked(self, where: str, file: File, table: str, data: bytes, schema: bytes) -> int | str | None:
        """What the segment decodes to, or the sentence that refuses it; None where its file has vanished."""
        asked = {"folder": where, "name": file.name, "table": table, "schema": len(schema), "data": len(data)}
        line = json.dumps(asked).encode() + b"\n" + schema + data
        answer = self._answer(line) if self._child is not None else None
        if answer is None:  # none was there, or it has ended for want of work: a fresh one tells that from a death
            self._end()
            self._child = _begun()
            answer = self._answer(line)
        if answer is None:
            self._end()
            return f"{file.name} is damaged in a way that stopped its reader"
        said: int | str | None = json.loads(answer)
        return said

    def _answer(self, line: bytes) -> bytes | None:
        """What the process says to it; None where it died, or was ended because it took too long."""
        child = self._child
        assert child is not None and child.stdin is not None and child.stdout is not None
        clock = threading.Timer(self._longest_s, child.kill)
        clock.start()
        try:
            child.stdin.write(line)
            child.stdin.flush()
            return child.stdout.readline() or None
        except OSError:
            return None
        finally:
            clock.cancel()

    def _end(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.communicate()
            self._child = None


class SandboxedReads:
    """What is read of one run, tasted."""

    def __init__(self, sandbox: Sandbox, where: Path | Address) -> None:
        self._taster = sandbox
        self._where = where
        self._held: dict[str, int] = {}

    def sealed(self, file: File, table: str, data: bytes | None = None) -> None:
        """Raise `RunError` where a Parquet file, of a folder or with this content, is not to be read."""
        where = str(self._where.absolute()) if isinstance(self._where, Path) else str(self._where)
        size = self._taster.sealed(where, file, table, data)
        self._hold(file, 0 if table == "tensors" and data is None else size)

    def stream(self, file: File, table: str, data: bytes, before: Segment | None) -> None:
        """The same for what is new in a stream."""
        size = self._taster.stream(file, table, data, before)
        self._hold(file, size + (self._held.get(file.name, 0) if before is not None else 0))

    def _hold(self, file: File, size: int) -> None:
        self._held[file.name] = size
        if sum(self._held.values()) > MAX_HELD:
            raise RunError(f"{self._where} holds more than {MAX_HELD / 2**30:.3g} GiB of rows; open it in Python")


def _sound(said: int | str) -> int:
    if isinstance(said, str):
        raise RunError(said)
    return said


def _begun() -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-m", "amp_core.store.untrusted.sandbox_process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # what is said to die of a damaged file is said in a sentence
        env=os.environ | python_path(),
    )
