"""Sources that a run is read from: a folder, perhaps one that is still being written, or a packed zip.

>>> source = FolderSource(Path("runs/a"))
>>> source.head().status, sorted(source.segments("steps"))
('running', ['steps/00000', 'steps/00001'])
"""

import os
import re
import stat
import time
import zipfile
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import IO, Protocol, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from amp_core.hardware.host import process_alive
from amp_core.schema import TABLES, DamageError, Head, RunError, Table
from amp_core.store.segment_reader import File, Segment, read_parquet, read_stream
from amp_core.store.sightings import SIGHTINGS
from amp_core.store.untrusted.zip_directory import open_zip
from amp_core.store.urls import Address

_T = TypeVar("_T")

STALE_S = 600.0
"""A running run of another machine counts as lost when its files have not changed for so long; see `sightings`."""

MAX_HEAD_BYTES = 4 * 2**20
MAX_ZIPPED_BYTES = 4 * 2**30
"""Memory that all tables of a zip together may take: many files of equal values would each be small."""
LISTINGS = 5
"""How often a folder is listed again if segments appear meanwhile or a number is missing."""
SEGMENT_NAME = re.compile(r"[A-Za-z0-9][\w.\-]*\.(parquet|arrows)")
SINGLE_FILE_NAME = {table: re.compile(rf"{table}\.(parquet|arrows)") for table in TABLES}
"""Another program may write a table as one file beside `run.json`."""


class Source(Protocol):
    @property
    def path(self) -> Path | Address: ...

    def head(self) -> Head: ...
    def alive(self, head: Head) -> bool: ...
    def segments(self, table: str) -> dict[str, File]: ...
    def read(self, file: File, table: Table, before: Segment | None, where: pc.Expression | None = None) -> Segment:
        """Read a segment; rows that do not match `where` may be left out."""

    def content(self, file: File, table: Table, start: int = 0) -> bytes | Path:
        """The path of a sealed segment in a folder; the bytes from `start` on of any other segment."""

    def console(self, lines: int) -> list[str]: ...
    def fingerprint(self) -> tuple[tuple[str, int, int], ...]: ...


class FolderSource:
    """A run folder, perhaps one that is still being written."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def head(self) -> Head:
        file = self.path / "run.json"
        try:
            info = file.lstat()
            if not (
                stat.S_ISREG(info.st_mode) or stat.S_ISDIR(info.st_mode)
            ):  # reading a pipe or a device might never end
                raise RunError(f"{file} is not a regular file; a run head is neither a link nor a pipe")
            if info.st_size > MAX_HEAD_BYTES:
                raise RunError(f"{file} is larger than {MAX_HEAD_BYTES // 2**20} MiB, so it is not a run head")
            return Head.from_json(file.read_bytes(), str(file))
        except FileNotFoundError:
            raise RunError(f"path={str(self.path)!r} holds no run: run.json is missing") from None
        except OSError as error:
            raise RunError(f"{file} cannot be read: {error.strerror or error}") from None

    def alive(self, head: Head) -> bool:
        known = process_alive(head.process)
        if known is not None:
            return known
        return SIGHTINGS.changed_lately(str(self.path), retried(self.fingerprint, self.path), STALE_S)

    def segments(self, table: str) -> dict[str, File]:
        files: dict[str, File] = {}
        for folder, within, names in (
            (self.path / table, f"{table}/", SEGMENT_NAME),
            (self.path, "", SINGLE_FILE_NAME[table]),
        ):
            if folder.is_dir():
                if folder.is_symlink() and folder != self.path:
                    raise RunError(f"{folder} is a link; a run folder holds its own files")
                files |= _listed(folder, within, names)
        return files

    def read(self, file: File, table: Table, before: Segment | None, where: pc.Expression | None = None) -> Segment:
        try:
            content = self.content(file, table, before.offset if before is not None else 0)
        except FileNotFoundError:  # sealed after it was listed
            content = (self.path / file.name).with_suffix(".parquet")
            info = content.stat()
            file = File(content.relative_to(self.path).as_posix(), info.st_size, info.st_mtime_ns)
        if isinstance(content, bytes):
            return read_stream(file, content, table, before)
        return read_parquet(file, str(content), table, before, where=where)

    def content(self, file: File, table: Table, start: int = 0) -> bytes | Path:  # noqa: ARG002
        path = self.path / file.name
        if file.name.endswith(".parquet"):
            return path
        with open(path, "rb") as stream:
            stream.seek(start)
            return stream.read()

    def console(self, lines: int) -> list[str]:
        return console_tail(self.path / "console.log", lines)

    def fingerprint(self) -> tuple[tuple[str, int, int], ...]:
        files = [f for table in TABLES for f in self.segments(table).values()]
        rows = [(f.name, f.size, f.mtime_ns) for f in files]
        for name in ("run.json", "console.log"):
            if (self.path / name).is_file():
                info = (self.path / name).stat()
                rows.append((name, info.st_size, info.st_mtime_ns))
        return tuple(sorted(rows))


class ZipSource:
    """A packed run, read in place. Nothing is extracted, so a name inside it cannot point outside."""

    path: Path | Address

    def __init__(self, path: Path | Address, opened: IO[bytes] | None = None) -> None:
        self.path = path
        try:
            self._archive = open_zip(opened if opened is not None else path)
        except PermissionError as error:
            raise RunError(f"path={str(path)!r} cannot be read: {error.strerror}") from None
        except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
            is_trace = ".json" in PurePosixPath(str(path)).suffixes
            how = "; import a profiler trace with ampscope import-trace" if is_trace else ""
            raise RunError(f"path={str(path)!r} is not a packed run: {error}{how}") from None
        names = {PurePosixPath(n) for n in self._archive.namelist()}
        heads = sorted((p for p in names if p.name == "run.json"), key=lambda p: len(p.parts))
        if not heads:
            raise RunError(f"path={str(path)!r} holds no run: run.json is missing")
        self._root = heads[0].parent
        self._held: dict[str, int] = {}

    def head(self) -> Head:
        return Head.from_json(self._bytes("run.json", MAX_HEAD_BYTES), f"{self.path}:run.json")

    def alive(self, head: Head) -> bool:  # noqa: ARG002 - nothing writes into a zip
        return False

    def segments(self, table: str) -> dict[str, File]:
        files: dict[str, File] = {}
        for info in self._archive.infolist():
            path = PurePosixPath(info.filename)
            within = path.parent == self._root / table and SEGMENT_NAME.fullmatch(path.name)
            if within or (path.parent == self._root and SINGLE_FILE_NAME[table].fullmatch(path.name)):
                keep_sealed(files, File(path.relative_to(self._root).as_posix(), info.file_size, 0))
        return files

    def read(self, file: File, table: Table, before: Segment | None, where: pc.Expression | None = None) -> Segment:  # noqa: ARG002 - a zip is bounded as a whole
        data = self.content(file, table)
        if file.name.endswith(".parquet"):
            segment = read_parquet(file, pa.BufferReader(data), table, before, bounded=True)
        else:
            segment = read_stream(file, data, table, None, bounded=True)
        self._held[file.name] = segment.table.nbytes if segment.table is not None else 0
        if sum(self._held.values()) > MAX_ZIPPED_BYTES:
            raise RunError(f"{self.path} holds more than {MAX_ZIPPED_BYTES / 2**30:.3g} GiB of rows; unpack it first")
        return segment

    def content(self, file: File, table: Table, start: int = 0) -> bytes:  # noqa: ARG002
        return self._bytes(file.name, file.size)[start:]

    def console(self, lines: int) -> list[str]:
        if str(self._root / "console.log") not in self._archive.namelist():
            return []
        return last_lines(self._bytes("console.log", 2**24), lines)

    def fingerprint(self) -> tuple[tuple[str, int, int], ...]:
        info = Path(self.path).stat()
        return ((self.path.name, info.st_size, info.st_mtime_ns),)

    def _bytes(self, name: str, most: int) -> bytes:
        try:
            with self._archive.open(str(self._root / name)) as member:
                return member.read(most)
        except Exception as error:  # zipfile passes on what its decompressors raise, which has no common base
            raise DamageError(f"{self.path}:{name} is damaged: {str(error)[:200]}") from None


def _listed(folder: Path, within: str, names: re.Pattern[str]) -> dict[str, File]:
    """The regular files whose names match, without a gap in the numbers of their segments.

    A segment that is sealed while its folder is listed may appear neither as the stream, which is already removed, nor
    as the Parquet file, which did not exist yet. So the folder is listed again. The second listing may in turn hold
    segments that were begun meanwhile, with a gap among them: new ones count only as long as their numbers follow each
    other. A stream may have got its last rows before the next segment was begun, so where a listing finds new segments,
    the sizes of the streams before them are read again.
    """
    files: dict[str, File] = {}
    numbers: dict[str, set[int]] = {}
    for again in range(1 + LISTINGS):
        fresh = [e for e in os.scandir(folder) if names.fullmatch(e.name)]
        if again:
            fresh = sorted(
                (e for e in fresh if within + _stem(e.name) not in files), key=lambda e: _series_and_number(e.name)
            )
        if again and fresh:
            streams = {stem: file for stem, file in files.items() if file.name.endswith(".arrows")}
            files |= {stem: _as_it_is(folder, file) for stem, file in streams.items()}
        for entry in fresh:
            series, number = _series_and_number(entry.name)
            known = numbers.setdefault(series, set())
            if (not again or not known or number <= max(known) + 1) and _keep_file(files, within, entry):
                known.add(number)
        if again and not fresh and all(max(n) - min(n) < len(n) for n in numbers.values() if n):
            break
    return files


def _series_and_number(name: str) -> tuple[str, int]:
    """The writer of a segment, and its number: `00003.r1.parquet` is number 3 of rank 1."""
    series = _stem(name).lstrip("0123456789")
    return series, int(_stem(name)[: -len(series) or None][-18:] or 0)


def _keep_file(files: dict[str, File], within: str, entry: os.DirEntry[str]) -> bool:
    try:
        info = entry.stat(follow_symlinks=False)
    except FileNotFoundError:  # a stream that was sealed meanwhile
        return False
    if stat.S_ISREG(info.st_mode):
        keep_sealed(files, File(within + entry.name, info.st_size, info.st_mtime_ns))
    return stat.S_ISREG(info.st_mode)


def _as_it_is(folder: Path, file: File) -> File:
    """A listed stream with its size now, or what it was sealed to meanwhile."""
    path = folder / PurePosixPath(file.name).name
    try:
        info = path.lstat()
    except FileNotFoundError:
        info = path.with_suffix(".parquet").lstat()
        return File(f"{_stem(file.name)}.parquet", info.st_size, info.st_mtime_ns)
    return File(file.name, info.st_size, info.st_mtime_ns)


def retried(read: Callable[[], _T], what: Path | Address) -> _T:
    """The result of `read`, which is tried again if a file vanished between being listed and being opened."""
    for attempt in range(20):
        try:
            return read()
        except FileNotFoundError:
            time.sleep(0.002 * attempt)
        except OSError as error:
            raise RunError(f"{what} cannot be read: {error.strerror or error}") from None
        except MemoryError:
            raise RunError(f"{what} needs more memory than is available") from None
    raise RunError(f"{what} cannot be read: its files disappear while they are opened")


def console_tail(file: Path, lines: int = 20) -> list[str]:
    """The last lines of a `console.log`; none if there is no such file. If it cannot be read, one line says why."""
    try:
        if not file.is_file():
            return []
        with open(file, "rb") as stream:
            stream.seek(max(0, file.stat().st_size - 400 * lines - 4096))
            return last_lines(stream.read(), lines)
    except OSError as error:
        return [f"{file.name} cannot be read: {error.strerror or error}"]


def keep_sealed(files: dict[str, File], file: File) -> None:
    """Prefer a sealed segment to the stream it was made from; a crash may have left both."""
    stem = _stem(file.name)
    if stem not in files or file.name.endswith(".parquet"):
        files[stem] = file


def _stem(name: str) -> str:
    return name.rsplit(".", 1)[0]


def last_lines(data: bytes, lines: int) -> list[str]:
    text = data.decode("utf-8", "replace").rstrip()
    tail = text.split("\n")[-lines:] if text else []
    # A progress bar redraws its line after a carriage return; its last state counts.
    return [line.rstrip("\r").rsplit("\r", 1)[-1] for line in tail]
