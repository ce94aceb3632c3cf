"""Stream the events of a Chrome trace: at most a few megabytes of a trace of gigabytes are in memory.

    >>> trace = TraceStream("rank0.pt.trace.json.gz")
    >>> sum(event.get("cat") == "kernel" for event in trace)
    6080
    >>> trace.head["deviceProperties"][0]["name"]         # the values beside the events
    'NVIDIA A100-SXM4-80GB'

The file is JSON: an object with `traceEvents`, as torch.profiler writes it, or a bare list of events, as older versions
of torch did. It is decoded event by event with the standard library's own scanner, which reads 140 MB/s here; `ijson`
on yajl is as fast, and loading the whole file, with `json` or `orjson`, takes as long and ten times its size in memory.

Values that are not valid JSON are repaired where that is possible, and counted in `repaired`.
"""

import codecs
import contextlib
import gzip
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from amp_core.schema import RunError
from amp_core.traces import lenient_json, other_files

CHUNK_BYTES = 2**20
_EVENTS = "traceEvents"
"""The key of the events."""
_DEVICES, _DEVICE = "deviceProperties", re.compile(r'\{[^{}]*"computeMajor"[^{}]*\}')
"""The key of the devices, and one of them: what a head cut by hand leaves."""
MAX_BYTES = 16 * 2**30
"""Longest trace that is read, unpacked: a profiler window of minutes. Bounds what a gzip bomb may cost."""
MAX_VALUE_CHARS = 2**26
"""Longest single event, or single value beside the events."""


class _Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


_CUT = re.compile(r"[-+.\\\w]*\Z")
"""What may follow the last valid JSON in a file that was cut off: nothing, or the start of a token."""
_MAX_TOKEN_CHARS = 64
"""An error so close to the end of the buffer may be due to a token that continues after it."""
_SPACE = re.compile(r"[ \t\r\n]*")


def _encoding(data: bytes) -> str:
    """The encoding of JSON that begins with `data`: UTF-8, or UTF-16 as PowerShell's `>` writes it."""
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    return {b"{\0": "utf-16-le", b"[\0": "utf-16-le", b"\0{": "utf-16-be", b"\0[": "utf-16-be"}.get(
        data[:2], "utf-8-sig"
    )


class TraceStream:
    """Iterate over it once for the events; afterwards `head` holds the file's other values. Raises `RunError`."""

    def __init__(self, path: str | os.PathLike[str], progress: Callable[[float], None] | None = None) -> None:
        """`progress` is called with the share of the file that has been read, 0–1, after each megabyte or so."""
        self.path = Path(path)
        self._progress = progress
        self.head: dict[str, Any] = {}
        self._text = ""
        self._at = 0
        self._read = 0
        self._ended = False
        self.repaired = 0
        """Number of values that were not valid JSON."""
        self._scan = json.JSONDecoder().raw_decode

    def __iter__(self) -> Iterator[dict[str, Any]]:
        try:
            with open(self.path, "rb") as raw:
                packed = raw.read(2) == b"\x1f\x8b"
                raw.seek(0)
                self._raw, self._size = raw, max(1, os.fstat(raw.fileno()).st_size)
                with gzip.GzipFile(fileobj=raw) if packed else raw as file:
                    yield from self._events(file)
        except gzip.BadGzipFile:
            raise RunError(
                f"{self._name} is damaged: what follows its compressed data is not gzip; give one trace per file"
            ) from None
        except (OSError, EOFError, zlib.error) as error:
            raise RunError(f"{self._name} cannot be read: {getattr(error, 'strerror', None) or error}") from None
        except RecursionError:
            raise RunError(f"{self._name} is nested deeper than a trace can be") from None

    @property
    def _name(self) -> str:
        return f"trace={self.path.name!r}"

    # inside

    def _events(self, file: _Readable) -> Iterator[dict[str, Any]]:
        self._file = file
        self._decoder: codecs.IncrementalDecoder | None = None
        first = self._next_char()
        if first == "[":
            yield from self._array(last=True)
            self._check_end()
            return
        if first != "{":
            if what := other_files.told(self.path, self._first_bytes):
                raise RunError(f"{self._name} is {what}")
            raise RunError(f"{self._name} is not a profiler trace: it begins with {first!r}, not with a JSON object")
        self._at += 1
        seen = False
        while (char := self._next_char()) != "}":
            if char == ",":
                self._at += 1
                continue
            try:
                key = self._value("key") if char == '"' else None
                if not isinstance(key, str) or self._next_char() != ":":
                    raise self._broken()
                self._at += 1
                if key != _EVENTS or self._next_char() != "[":
                    self.head[key] = self._value("member")
                    continue
            except RunError:  # a head that was cut by hand
                if seen or not self._skip_to_events():
                    raise
                self.repaired += 1
                continue
            seen = True
            yield from self._array(last=False)
        if not seen:
            raise RunError(f"{self._name} is not a profiler trace: it has no list of traceEvents")
        self._at += 1
        self._check_end()

    def _skip_to_events(self) -> bool:
        """Go on to the key of the events, whatever stands before it, of which devices are kept; False if it does not
        follow."""
        while (found := self._text.find(f'"{_EVENTS}"', self._at)) < 0 and not self._ended:
            self._at = max(self._at, len(self._text) - len(_EVENTS) - 1)
            self._fill(CHUNK_BYTES)
        for device in _DEVICE.findall(self._text[: max(0, found)]):
            with contextlib.suppress(ValueError):  # a damaged one tells nothing, and that the head is cut is told
                self.head.setdefault(_DEVICES, []).append(json.loads(device))
        self._at = max(self._at, found)
        return found >= 0

    def _check_end(self) -> None:
        """Raise `RunError` if anything but space follows the trace, as in a file to which two traces were written."""
        if self._next_char(may_end=True):
            rest = self._text[self._at : self._at + 40]
            raise RunError(f"{self._name} is damaged: {rest!r} follows its last bracket; give one trace per file")

    def _array(self, last: bool) -> Iterator[dict[str, Any]]:
        """The objects of the list that begins here. Chrome's bare lists may lack the closing bracket."""
        self._at += 1
        while True:
            char = self._next_char(may_end=last)
            if char == ",":
                self._at += 1
                continue
            if char in ("]", ""):
                self._at += 1
                return
            event = self._value("item")
            if isinstance(event, dict):
                yield event
            else:
                raise RunError(f"{self._name} has a {type(event).__name__} among its events, which are JSON objects")

    def _value(self, place: lenient_json.Place) -> Any:
        """The JSON value that begins here; reads on while the buffer does not hold all of it."""
        wanted = CHUNK_BYTES
        self._next_char()
        while True:
            try:
                value, end = self._scan(self._text, self._at)
            except ValueError as error:
                if not isinstance(error, json.JSONDecodeError):  # a number of thousands of digits
                    raise RunError(f"{self._name} is damaged: {error}") from None
                if self._ended or error.pos < len(self._text) - _MAX_TOKEN_CHARS:
                    with contextlib.suppress(ValueError):
                        return self._repaired(place)
                if self._ended:
                    raise self._broken(error) from None
            else:
                if end < len(self._text) or self._ended:  # a number at the end of the buffer may continue
                    self._at = end
                    return value
            if len(self._text) - self._at > MAX_VALUE_CHARS:
                raise self._broken()
            self._fill(wanted)
            wanted *= 2

    def _repaired(self, place: lenient_json.Place) -> Any:
        """The value that begins here though it is not valid JSON. Raises `ValueError` if it cannot be made out."""
        value, self._at = lenient_json.decode(self._text, self._at, place)
        self.repaired += 1
        return value

    def _next_char(self, may_end: bool = False) -> str:
        while True:
            self._at = _SPACE.match(self._text, self._at).end()  # type: ignore[union-attr]  # it matches nothing, too
            if self._at < len(self._text):
                return self._text[self._at]
            if self._ended:
                if may_end:
                    return ""
                raise self._broken()
            self._fill(CHUNK_BYTES)

    def _fill(self, size: int) -> None:
        data = self._file.read(size)
        self._read += len(data)
        if self._progress is not None:
            self._progress(self._raw.tell() / self._size)
        if self._read > MAX_BYTES:
            raise RunError(f"{self._name} is longer than {MAX_BYTES // 2**30} GiB; profile fewer steps at a time")
        self._ended = not data
        if self._decoder is None:
            self._first_bytes = data[:32]
            self._decoder = codecs.getincrementaldecoder(_encoding(data))("replace")
        self._text = self._text[self._at :] + self._decoder.decode(data, final=self._ended)
        self._at = 0

    def _broken(self, error: json.JSONDecodeError | None = None) -> RunError:
        if self._ended and (error is None or error.msg.startswith("Unterminated") or _CUT.match(self._text, error.pos)):
            return RunError(f"{self._name} is cut off: it ends in the middle of the trace")
        at = self._at if error is None else max(self._at, error.pos - 20)
        return RunError(f"{self._name} is damaged: {self._text[at : at + 40]!r} is not JSON")
