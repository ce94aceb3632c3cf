"""A run that is read from an address: sealed segments in an object store, or a packed run there.

    >>> source = open_address(Address("s3://bucket/runs/a"))
    >>> source.head().status, sorted(source.segments("steps"))
    ('finished', ['steps/00000', 'steps/00001'])

One listing serves all tables, and the segments of a table are fetched together, so opening a run takes a few round
trips instead of one per file.
"""

import datetime
import time
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from amp_core.hardware.host import process_alive
from amp_core.schema import TABLES, Head, RunError, Table
from amp_core.store.segment_reader import File, Segment, read_parquet, read_stream
from amp_core.store.sightings import SIGHTINGS
from amp_core.store.sources import (
    MAX_HEAD_BYTES,
    SEGMENT_NAME,
    SINGLE_FILE_NAME,
    STALE_S,
    Source,
    ZipSource,
    keep_sealed,
    last_lines,
)
from amp_core.store.urls import Address, errors_as_run_error, filesystem

LISTING_S = 2.0
"""Lifetime of a cached listing; `head()`, the first call of every refresh, renews it."""


def open_address(address: Address) -> Source:
    """The source of the run at `address`. Raises `RunError` if it cannot be read."""
    return RemoteZip(address) if address.name.endswith(".zip") else RemoteSource(address)


class RemoteSource:
    """A run in an object store, or on any other filesystem that fsspec supports."""

    def __init__(self, path: Address) -> None:
        self.path = path
        self._fs, self._root = filesystem(path)
        self._listing: tuple[float, dict[str, File]] | None = None
        self._fetched: dict[str, bytes] = {}
        self._given: set[str] = set()

    def head(self) -> Head:
        self._listing = None
        try:
            data = self._bytes("run.json", 0, MAX_HEAD_BYTES + 1)
        except FileNotFoundError:
            raise RunError(f"path={str(self.path)!r} holds no run: run.json is missing") from None
        return read_head(data, self.path)

    def alive(self, head: Head) -> bool:
        known = process_alive(head.process)
        if known is not None:
            return known
        files = sorted((file.name, file.size, file.mtime_ns) for file in self._listed().values())
        return SIGHTINGS.changed_lately(str(self.path), tuple(files), STALE_S)

    def segments(self, table: str) -> dict[str, File]:
        files: dict[str, File] = {}
        for file in self._listed().values():
            path = PurePosixPath(file.name)
            in_folder = path.parent == PurePosixPath(table) and SEGMENT_NAME.fullmatch(path.name)
            if in_folder or (len(path.parts) == 1 and SINGLE_FILE_NAME[table].fullmatch(path.name)):
                keep_sealed(files, file)
        return files

    def read(self, file: File, table: Table, before: Segment | None, where: pc.Expression | None = None) -> Segment:
        data = self.content(file, table, before.offset if before is not None else 0)
        if file.name.endswith(".parquet"):
            return read_parquet(file, pa.BufferReader(data), table, before, where=where)
        return read_stream(file, data, table, before)

    def content(self, file: File, table: Table, start: int = 0) -> bytes:
        if file.name.endswith(".parquet"):
            return self._sealed(file, table)
        return self._bytes(file.name, start, None) if file.size > start else b""

    def console(self, lines: int) -> list[str]:
        file = self._listed().get("console.log")
        if file is None or not file.size:
            return []
        return last_lines(self._bytes("console.log", max(0, file.size - 400 * lines - 4096), None), lines)

    def fingerprint(self) -> tuple[tuple[str, int, int], ...]:
        ours = [f for table in TABLES for f in self.segments(table).values()]
        beside = [f for name in ("run.json", "console.log") if (f := self._listed().get(name)) is not None]
        return tuple(sorted((f.name, f.size, f.mtime_ns) for f in (*ours, *beside)))

    def size_bytes(self) -> int:
        """Bytes of all files of the run."""
        return sum(file.size for file in self._listed().values())

    def _listed(self) -> dict[str, File]:
        if self._listing is None or time.monotonic() - self._listing[0] > LISTING_S:
            with errors_as_run_error(self.path):
                infos = self._fs.find(self._root, maxdepth=2, detail=True)
            files = {}
            for path, info in infos.items():
                name = path.removeprefix(self._root).lstrip("/")
                files[name] = File(name, int(info.get("size") or 0), modified_ns(info))
            self._listing = (time.monotonic(), files)
        return self._listing[1]

    def _sealed(self, file: File, table: Table) -> bytes:
        """A sealed segment, fetched together with all others of its table that are still missing."""
        if file.name not in self._fetched:
            names = [f.name for f in self.segments(table.name).values() if f.name.endswith(".parquet")]
            wanted = {file.name, *(name for name in names if name not in self._given)}
            paths = [f"{self._root}/{name}" for name in wanted]
            with errors_as_run_error(self.path):
                bodies = self._fs.cat_ranges(paths, None, None, on_error="return")
            self._fetched |= {name: body for name, body in zip(wanted, bodies, strict=True) if isinstance(body, bytes)}
            failed = {name: body for name, body in zip(wanted, bodies, strict=True) if isinstance(body, Exception)}
            if file.name in failed:
                with errors_as_run_error(self.path):
                    raise failed[file.name]
        self._given.add(file.name)
        return self._fetched.pop(file.name)

    def _bytes(self, name: str, start: int, end: int | None) -> bytes:
        with errors_as_run_error(self.path):
            return bytes(self._fs.cat_file(f"{self._root}/{name}", start=start or None, end=end))


class RemoteZip(ZipSource):
    """A packed run at an address; only the parts that are read are fetched."""

    def __init__(self, path: Address) -> None:
        self._fs, self._root_path = filesystem(path)
        try:
            with errors_as_run_error(path):
                opened = self._fs.open(self._root_path, "rb")
        except FileNotFoundError:
            raise RunError(f"path={str(path)!r} does not exist; give a run or a packed run (.zip)") from None
        super().__init__(path, opened)

    def fingerprint(self) -> tuple[tuple[str, int, int], ...]:
        with errors_as_run_error(self._address):
            info = self._fs.info(self._root_path)
        return ((self._address.name, int(info.get("size") or 0), modified_ns(info)),)

    @property
    def _address(self) -> Address:
        assert isinstance(self.path, Address)
        return self.path


def read_head(data: bytes, path: Address) -> Head:
    """The head that `data`, the run.json at `path`, holds. Raises `RunError`."""
    if len(data) > MAX_HEAD_BYTES:
        raise RunError(f"{path}/run.json is larger than {MAX_HEAD_BYTES // 2**20} MiB, so it is not a run head")
    return Head.from_json(data, f"{path}/run.json")


def modified_ns(info: dict[str, Any]) -> int:
    """When a file was last written, in ns since 1970; each store has a key of its own for it. 0 if the store has
    none."""
    for key in ("LastModified", "mtime", "last_modified", "updated", "modified", "created"):
        moment = info.get(key)
        if isinstance(moment, str):
            try:
                moment = datetime.datetime.fromisoformat(moment)
            except ValueError:
                continue
        if isinstance(moment, datetime.datetime):
            return int(moment.timestamp() * 1e9)
        if isinstance(moment, int | float):
            return int(moment * 1e9)
    return 0


@dataclass(frozen=True)
class Listed:
    """A run below an address: its head, or a sentence why it cannot be read."""

    path: Address
    head: Head | None
    status: str
    sentence: str = ""


def runs_below(root: Address, most: int = 2000) -> list[Listed]:
    """The runs below `root` and one level deeper, like those of a folder in the library; reads at most `most` folders.

    Raises `RunError` if the address cannot be reached.
    """
    fs, path = filesystem(root)
    with errors_as_run_error(root):
        first = _folders(fs, path)[:most]
        heads = _heads(fs, first)
        inner = [p for folder in first if folder not in heads for p in _folders(fs, folder)][:most]
        heads |= _heads(fs, inner)
    listed = []
    for folder in [f for f in (*first, *inner) if f in heads]:
        below = folder.removeprefix(path).lstrip("/")
        listed.append(_listed(root / below, heads[folder]))
    return listed


def _folders(fs: Any, path: str) -> list[str]:
    try:
        entries = fs.ls(path, detail=True)
    except FileNotFoundError:  # nothing was written there yet
        return []
    names = [entry["name"].rstrip("/") for entry in entries if entry["type"] == "directory"]
    return sorted(n for n in names if n != path and not n.rpartition("/")[2].startswith("."))


def _heads(fs: Any, folders: list[str]) -> dict[str, bytes]:
    """The run.json of those folders that have one, fetched together."""
    files = [f"{folder}/run.json" for folder in folders]
    bodies = fs.cat_ranges(files, 0, MAX_HEAD_BYTES + 1, on_error="return") if files else []
    for body in bodies:
        if isinstance(body, Exception) and not isinstance(body, FileNotFoundError):
            raise body
    return {folder: body for folder, body in zip(folders, bodies, strict=True) if isinstance(body, bytes)}


def _listed(path: Address, data: bytes) -> Listed:
    try:
        head = read_head(data, path)
        status = head.status
        if status == "running":
            status = "running" if RemoteSource(path).alive(head) else "lost"
    except RunError as error:
        return Listed(path, None, "damaged", str(error))
    return Listed(path, head, status)
