"""A process that decodes segments of untrusted runs, so that none can take this one down.

    >>> sandbox = Sandbox()
    >>> sandbox.convert("shared/runs/a", file, "steps", path, Path("private/0.parquet"))
    Converted(decoded_bytes=46080, end=0, schema=None)

Damaged Parquet files can crash the process that reads them (pyarrow 26), and small ones may claim to be huge. So the
sandbox process decodes each segment, in bounded memory and time, and writes it to a new file (see `sandbox_process`).
The process ends after it has been idle for a while.
"""

import base64
import json
import os
import subprocess
import sys
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from amp_core.hardware.child_environment import python_path
from amp_core.schema import DamageError
from amp_core.store.segment_reader import File

SEGMENT_TIMEOUT_S = 60.0
"""A segment of 16 MB takes a fraction of a second; longer ones are crafted."""
MAX_REFUSALS = 20_000
"""Refused files that are remembered, so that none is tried at each tick."""


class Converted(NamedTuple):
    """A converted segment."""

    decoded_bytes: int
    """Bytes of its rows in memory."""
    end: int
    """Of a stream: how many of the given bytes whole messages took."""
    schema: pa.Schema | None
    """Of a stream: what to read on with."""


class Sandbox:
    """The process, for any number of threads; started when it is first needed."""

    def __init__(self, timeout_s: float = SEGMENT_TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._refused: OrderedDict[tuple[str, File], str] = OrderedDict()

    def convert(
        self, run: str, file: File, table: str, content: bytes | Path, out: Path, schema: pa.Schema | None = None
    ) -> Converted:
        """Write the rows of a segment of `run` to `out`, in the promised columns.

        `content` is its path if it is Parquet, else its bytes; with `schema`, the bytes continue a stream of that
        schema. Raises `DamageError`, and `FileNotFoundError` if the file has vanished.
        """
        start = bytes(schema.serialize()) if schema is not None else b""
        data, path = (content, "") if isinstance(content, bytes) else (b"", str(content.absolute()))
        request = {"path": path, "name": file.name, "table": table, "out": str(out)}
        line = json.dumps(request | {"schema": len(start), "data": len(data)}).encode() + b"\n" + start + data
        sealed = file.name.endswith(".parquet")
        with self._lock:
            sentence = self._refused.get((run, file)) if sealed else None
            if sentence is None:
                reply = self._ask(line)
                if reply.get("vanished"):
                    raise FileNotFoundError(file.name)
                if "decoded_bytes" in reply:
                    encoded = reply["schema"]
                    known = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(encoded))) if encoded else None
                    return Converted(reply["decoded_bytes"], reply["end"], known)
                sentence = str(reply.get("refused") or f"{file.name} is damaged and crashed its reader")
            if sealed:
                self._refused[run, file] = sentence
                while len(self._refused) > MAX_REFUSALS:
                    self._refused.popitem(last=False)
            raise DamageError(sentence)

    def close(self) -> None:
        """End the process, if there is one."""
        with self._lock:
            self._end()

    def _ask(self, line: bytes) -> dict[str, Any]:
        """The reply of the process; empty if it died or took too long."""
        answer = self._answer(line) if self._child is not None else None
        # No process, or it ended when idle: retry in a new one; if that dies, the segment is at fault.
        if answer is None:
            self._end()
            self._child = _start()
            answer = self._answer(line)
        if answer is None:
            self._end()
            return {}
        reply: dict[str, Any] = json.loads(answer)
        return reply

    def _answer(self, line: bytes) -> bytes | None:
        child = self._child
        assert child is not None and child.stdin is not None and child.stdout is not None
        timer = threading.Timer(self._timeout_s, child.kill)
        timer.start()
        try:
            child.stdin.write(line)
            child.stdin.flush()
            return child.stdout.readline() or None
        except OSError:
            return None
        finally:
            timer.cancel()

    def _end(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.communicate()
            self._child = None


def _start() -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-m", "amp_core.store.untrusted.sandbox_process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # the parent reports a crash in one sentence
        env=os.environ | python_path(),
    )
