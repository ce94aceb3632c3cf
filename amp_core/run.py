"""`Run`: what every analysis takes, read from a folder, a zip, or a run that is still being written.

    >>> run = load_run("runs/a")
    >>> run.head.config["precision"], run.status
    ('fp16', 'finished')
    >>> run.steps[["step", "loss", "loss_scale", "skipped"]].tail()
    >>> run.tensors(kind="weight_grad", name="blocks.0.fc.weight", steps=(100, 200))
    >>> run.refresh()          # a live run: reads only what is new

Frames are pandas; where null (not measured) and NaN (measured, not a number) must be told apart, take
`run.table("steps")`, the same rows as an Arrow table.
"""

import os
import re
import struct
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Protocol

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from amp_core.runlog import process_alive
from amp_core.schema import TABLES, Head, RunError, Table

if TYPE_CHECKING:
    import pandas as pd

STALE_S = 600.0
"""A running run whose process cannot be asked after (another machine's) counts as lost when its files rest so long."""

MAX_HEAD_BYTES = 4 * 2**20
_SEGMENT = re.compile(r"[A-Za-z0-9][\w.\-]*\.(parquet|arrows)")


def load_run(path: str | os.PathLike[str]) -> "Run":
    """Open a run folder or a packed `.zip`. Raises `RunError`, and nothing else, for what is not a readable run."""
    where = Path(path)
    try:
        if where.is_dir():
            return Run(_Folder(where))
        if where.is_file():
            return Run(_Zip(where))
    except OSError as error:
        raise RunError(f"path={str(path)!r} cannot be read: {error.strerror or error}") from None
    raise RunError(f"path={str(path)!r} does not exist; give a run folder or a packed run (.zip)")


class Run:
    """One run: its head and its tables. Tables are read when first asked for, and again only where they grew."""

    def __init__(self, source: "_Source") -> None:
        self._source = source
        self._segments: dict[str, dict[str, _Segment]] = {}
        self._tables: dict[str, pa.Table] = {}
        self._frames: dict[str, pd.DataFrame] = {}
        self.head = source.head()

    def __repr__(self) -> str:
        return f"Run({self.head.name!r}, {self.status}, {str(self.path)!r})"

    @property
    def path(self) -> Path:
        """The folder or zip it was read from."""
        return self._source.path

    @property
    def name(self) -> str:
        """What people call the run."""
        return self.head.name or self.path.stem

    @property
    def status(self) -> str:
        """`running`, `finished`, `stopped` or `failed`; `lost` where it says running but its process is gone."""
        if self.head.status != "running":
            return self.head.status
        alive = self._source.alive(self.head)
        return "running" if alive else "lost"

    @property
    def is_live(self) -> bool:
        """Whether more may still come."""
        return self.status == "running"

    @property
    def end_reason(self) -> str | None:
        """Why it ended, in words; for a lost run, what is known, with the last lines the process printed."""
        if self.status != "lost":
            return self.head.end_reason
        said = [line for line in self.console(5) if line.strip()]
        ending = "its process is gone and wrote no end: killed, out of memory, or the machine went down"
        return f"{ending}. Last output: {' / '.join(said)}" if said else ending

    @property
    def steps(self) -> "pd.DataFrame":
        """One row per optimizer step attempted."""
        return self._frame("steps")

    @property
    def events(self) -> "pd.DataFrame":
        """What happened, in order."""
        return self._frame("events")

    @property
    def device(self) -> "pd.DataFrame":
        """Device samples."""
        return self._frame("device")

    @property
    def kernels(self) -> "pd.DataFrame":
        """Kernels of profiled windows."""
        return self._frame("kernels")

    @property
    def ops(self) -> "pd.DataFrame":
        """Operators of traced steps."""
        return self._frame("ops")

    @property
    def audits(self) -> "pd.DataFrame":
        """Gradient audits: what was really lost."""
        return self._frame("audits")

    def tensors(
        self,
        kind: str | None = None,
        name: str | None = None,
        steps: tuple[int, int] | None = None,
    ) -> "pd.DataFrame":
        """Rows of `tensors`, of one kind, one name and the steps from `steps[0]` to `steps[1]`, both included.

        `exp_counts` holds a NumPy array of int64 per row.
        """
        table = self.table("tensors")
        if kind is not None:
            table = table.filter(pc.field("kind") == kind)
        if name is not None:
            table = table.filter(pc.field("name") == name)
        if steps is not None:
            first, last = steps
            table = table.filter((pc.field("step") >= first) & (pc.field("step") <= last))
        frame: pd.DataFrame = table.to_pandas()
        return frame

    def table(self, name: str) -> pa.Table:
        """A whole table with null and NaN kept apart; empty, with its columns, where the run has none.

        Raises `RunError` for a table that is damaged or does not exist in the schema.
        """
        if name not in TABLES:
            raise RunError(f"table={name!r} is unknown; choose one of {', '.join(TABLES)}")
        if name not in self._tables:
            self._tables[name] = self._read(TABLES[name])
        return self._tables[name]

    def console(self, lines: int = 20) -> list[str]:
        """The last lines that the process printed, where the app or a job started it."""
        return self._source.console(lines)

    def refresh(self) -> bool:
        """Look for what was written since; True where anything was. Unchanged segments are not read again."""
        head = self._source.head()
        changed = head != self.head
        self.head = head
        for name in list(self._tables):
            if self._read_new(TABLES[name]):
                del self._tables[name]
                self._frames.pop(name, None)
                changed = True
        return changed

    def validate(self, full: bool = False) -> None:
        """Raise `RunError` where the run is not what it claims to be; see `amp_core.validate`.

        Reads every table; with `full`, checks every row too, as is due to files from strangers.
        """
        from amp_core.validate import validate

        validate(self, full=full)

    def fingerprint(self) -> tuple[tuple[str, int, int], ...]:
        """Names, sizes and modification times (ns) of its files: changes whenever the run does. A key for caches."""
        return self._source.fingerprint()

    # inside

    def _frame(self, name: str) -> "pd.DataFrame":
        table = self.table(name)
        if name not in self._frames:
            self._frames[name] = table.to_pandas()
        frame: pd.DataFrame = self._frames[name].copy(deep=False)
        return frame

    def _read(self, table: Table) -> pa.Table:
        self._read_new(table)
        parts = [s.table for s in self._segments.get(table.name, {}).values() if s.table is not None]
        whole = pa.concat_tables(parts, promote_options="default") if parts else table.schema.empty_table()
        keys = [k for k in table.order if k in whole.column_names]
        if len(parts) > 1 and not _ordered(whole, keys):
            whole = whole.sort_by([(k, "ascending") for k in keys])
        return whole

    def _read_new(self, table: Table) -> bool:
        """Bring the segments of one table up to date; True where that changed anything."""
        for attempt in range(5):
            try:
                return self._try_read_new(table)
            except FileNotFoundError:  # a stream was sealed between listing the folder and opening it
                time.sleep(0.02 * attempt)
            except OSError as error:
                raise RunError(f"{self.path / table.name} cannot be read: {error.strerror or error}") from None
        raise RunError(f"{self.path / table.name} cannot be read: its files vanish while they are opened")

    def _try_read_new(self, table: Table) -> bool:
        known = self._segments.setdefault(table.name, {})
        listed = self._source.segments(table.name)
        changed = any(known.pop(gone, None) is not None for gone in known.keys() - listed.keys())
        fresh: dict[str, _Segment] = {}
        for stem, file in sorted(listed.items()):
            before = known.get(stem)
            if before is not None and before.file == file:
                fresh[stem] = before
                continue
            fresh[stem] = self._source.read(file, table, before)
            rows_before = before.rows if before is not None else 0
            changed = changed or fresh[stem].rows != rows_before
        self._segments[table.name] = fresh
        return changed


def console_tail(file: Path, lines: int = 20) -> list[str]:
    """The last lines of a `console.log`; none where there is no such file."""
    if not file.is_file():
        return []
    with open(file, "rb") as stream:
        stream.seek(max(0, file.stat().st_size - 400 * lines - 4096))
        return _lines(stream.read(), lines)


# ---- where runs come from -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _File:
    """A segment file as listed: path inside the run, size in bytes, modification time in ns."""

    name: str
    size: int
    mtime_ns: int


@dataclass(frozen=True)
class _Segment:
    """What was read of a segment: whole batches up to `offset` bytes of an open stream, or a whole file."""

    file: _File
    table: pa.Table | None
    offset: int = 0
    schema: pa.Schema | None = None

    @property
    def rows(self) -> int:
        return self.table.num_rows if self.table is not None else 0


class _Source(Protocol):
    path: Path

    def head(self) -> Head: ...
    def alive(self, head: Head) -> bool: ...
    def segments(self, table: str) -> dict[str, _File]: ...
    def read(self, file: _File, table: Table, before: _Segment | None) -> _Segment: ...
    def console(self, lines: int) -> list[str]: ...
    def fingerprint(self) -> tuple[tuple[str, int, int], ...]: ...


class _Folder:
    """A run folder, perhaps one that is still being written."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def head(self) -> Head:
        file = self.path / "run.json"
        try:
            if file.stat().st_size > MAX_HEAD_BYTES:
                raise RunError(f"{file} is larger than {MAX_HEAD_BYTES // 2**20} MiB; that is no run head")
            return Head.from_json(file.read_bytes(), str(file))
        except FileNotFoundError:
            raise RunError(f"path={str(self.path)!r} holds no run: run.json is missing") from None
        except OSError as error:
            raise RunError(f"{file} cannot be read: {error.strerror or error}") from None

    def alive(self, head: Head) -> bool:
        known = process_alive(head.process)
        if known is not None:
            return known
        newest = max((mtime for _, _, mtime in self.fingerprint()), default=0)
        return time.time() - newest / 1e9 < STALE_S

    def segments(self, table: str) -> dict[str, _File]:
        found: dict[str, _File] = {}
        folder = self.path / table
        if folder.is_dir():
            for entry in os.scandir(folder):
                if _SEGMENT.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                    info = entry.stat(follow_symlinks=False)
                    _keep_better(found, _File(f"{table}/{entry.name}", info.st_size, info.st_mtime_ns))
        return found

    def read(self, file: _File, table: Table, before: _Segment | None) -> _Segment:
        path = self.path / file.name
        if file.name.endswith(".parquet"):
            return _read_parquet(file, str(path), table, before)
        offset = before.offset if before is not None else 0
        with open(path, "rb") as stream:
            stream.seek(offset)
            return _read_stream(file, stream.read(), table, before)

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


class _Zip:
    """A packed run, read in place. Nothing is extracted, so names inside it can point nowhere."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._archive = zipfile.ZipFile(path)
        except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
            raise RunError(f"path={str(path)!r} is not a packed run: {error}") from None
        names = {PurePosixPath(n) for n in self._archive.namelist()}
        heads = sorted((p for p in names if p.name == "run.json"), key=lambda p: len(p.parts))
        if not heads:
            raise RunError(f"path={str(path)!r} holds no run: run.json is missing")
        self._root = heads[0].parent

    def head(self) -> Head:
        return Head.from_json(self._bytes("run.json", MAX_HEAD_BYTES), f"{self.path}:run.json")

    def alive(self, head: Head) -> bool:  # noqa: ARG002 - a zip is never being written, whoever wrote it
        return False

    def segments(self, table: str) -> dict[str, _File]:
        found: dict[str, _File] = {}
        for info in self._archive.infolist():
            path = PurePosixPath(info.filename)
            if path.parent == self._root / table and _SEGMENT.fullmatch(path.name):
                _keep_better(found, _File(f"{table}/{path.name}", info.file_size, 0))
        return found

    def read(self, file: _File, table: Table, before: _Segment | None) -> _Segment:
        data = self._bytes(file.name, file.size)
        if file.name.endswith(".parquet"):
            return _read_parquet(file, pa.BufferReader(data), table, before)
        return _read_stream(file, data, table, None)

    def console(self, lines: int) -> list[str]:
        if str(self._root / "console.log") not in self._archive.namelist():
            return []
        return _lines(self._bytes("console.log", 2**24), lines)

    def fingerprint(self) -> tuple[tuple[str, int, int], ...]:
        info = self.path.stat()
        return ((self.path.name, info.st_size, info.st_mtime_ns),)

    def _bytes(self, name: str, most: int) -> bytes:
        try:
            with self._archive.open(str(self._root / name)) as member:
                return member.read(most)
        except (zipfile.BadZipFile, OSError, EOFError, RuntimeError, NotImplementedError) as error:
            raise RunError(f"{self.path}:{name} is damaged: {error}") from None
        except Exception as error:  # zlib.error and lzma.LZMAError have no common base
            raise RunError(f"{self.path}:{name} is damaged: {error}") from None


# ---- reading segments -----------------------------------------------------------------------------------------------


def _keep_better(found: dict[str, _File], file: _File) -> None:
    """A sealed segment wins over the stream it was made of, which a crash may have left beside it."""
    stem = PurePosixPath(file.name).stem
    if stem not in found or file.name.endswith(".parquet"):
        found[stem] = file


def _read_parquet(file: _File, source: object, table: Table, before: _Segment | None) -> _Segment:
    try:
        reader = pq.ParquetFile(source)
        if before is not None and before.rows == reader.metadata.num_rows:
            return replace(before, file=file)  # sealed from the stream that was read already
        return _Segment(file, _conform(reader.read(), table, file.name))
    except FileNotFoundError:
        raise
    except (pa.ArrowException, OSError, ValueError, TypeError) as error:
        raise RunError(f"{file.name} is damaged: {_first_line(error)}") from None


def _read_stream(file: _File, data: bytes, table: Table, before: _Segment | None) -> _Segment:
    """Read the whole batches in `data`, the bytes after `before.offset`; a torn tail is left for the next time."""
    schema = before.schema if before is not None else None
    start = before.offset if before is not None else 0
    batches: list[pa.RecordBatch] = []
    end = 0
    try:
        for message, stop in _messages(data):
            if schema is None:
                schema = pa.ipc.read_schema(message)
            elif message.type == "record batch":
                batches.append(pa.ipc.read_record_batch(message, schema))
            else:
                raise RunError(f"{file.name} is damaged: it holds a {message.type} among its record batches")
            end = stop
    except (pa.ArrowException, OSError, ValueError, TypeError) as error:
        if isinstance(error, RunError):
            raise
        raise RunError(f"{file.name} is damaged: {_first_line(error)}") from None
    parts = [before.table] if before is not None and before.table is not None else []
    if batches:
        parts.append(_conform(pa.Table.from_batches(batches), table, file.name))
    whole = pa.concat_tables(parts, promote_options="default").combine_chunks() if parts else None
    return _Segment(file, whole, start + end, schema)


_CONTINUATION = b"\xff\xff\xff\xff"


def _messages(data: bytes) -> Iterator[tuple[pa.Message, int]]:
    """Whole messages of an Arrow IPC stream and where each ends.

    Each is framed as continuation mark, int32 length of the metadata, metadata, body (Arrow columnar format, section
    "Encapsulated message format"). Stops before a message that is not all there yet, and at the end-of-stream mark.
    """
    view = memoryview(data)
    position = 0
    while len(view) >= position + 8:
        mark, length = struct.unpack_from("<4si", view, position)
        if mark != _CONTINUATION or length < 0:
            raise ValueError(f"no message starts at byte {position}")
        stop = position + 8 + length
        if length == 0 or stop > len(view):
            return
        stop += _body_length(view[position + 8 : stop])
        if stop > len(view):
            return
        yield pa.ipc.read_message(pa.py_buffer(view[position:stop])), stop
        position = stop


def _body_length(metadata: memoryview) -> int:
    """Field `bodyLength` (the fourth) of a message's metadata, a flatbuffer: root offset, vtable, then the slot."""
    try:
        (root,) = struct.unpack_from("<I", metadata, 0)
        vtable = root - struct.unpack_from("<i", metadata, root)[0]
        size, slot = struct.unpack_from("<H8xH", metadata, vtable)
        length = struct.unpack_from("<q", metadata, root + slot)[0] if size >= 12 and slot else 0
    except struct.error:
        raise ValueError("a message's metadata is damaged") from None
    if length < 0:
        raise ValueError("a message has a negative length")
    return int(length)


def _conform(found: pa.Table, table: Table, where: str) -> pa.Table:
    """`found` with the promised columns, in the promised types and order, then whatever else it had."""
    arrays, names = [], []
    for column in table.columns:
        if column.name in found.column_names:
            values = found.column(column.name)
            if values.type != column.type:
                try:
                    values = values.cast(column.type)
                except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
                    raise RunError(
                        f"{where} has column {column.name!r} of type {values.type}, which is no {column.type}: "
                        f"{_first_line(error)}"
                    ) from None
        elif column.required:
            raise RunError(f"{where} has no column {column.name!r}; each row of {table.name!r} needs it")
        else:
            values = pa.chunked_array([pa.repeat(pa.scalar(column.default, column.type), found.num_rows)])
        arrays.append(values)
        names.append(column.name)
    for name in found.column_names:
        if name not in names:
            arrays.append(found.column(name))
            names.append(name)
    return pa.Table.from_arrays(arrays, names=names)


def _ordered(table: pa.Table, keys: list[str]) -> bool:
    """Whether rows already stand in the order of the first key and, within it, of the second."""
    if not keys:
        return True
    first = table.column(keys[0]).combine_chunks().to_numpy(zero_copy_only=False)
    if len(first) < 2:
        return True
    rise = first[1:] - first[:-1]
    if not (rise >= 0).all():
        return False
    if len(keys) == 1:
        return True
    second = table.column(keys[1]).combine_chunks().to_numpy(zero_copy_only=False)
    return bool(((rise > 0) | (second[1:] >= second[:-1])).all())


def _lines(data: bytes, lines: int) -> list[str]:
    # A progress bar redraws its line after a carriage return; what counts is what it said last.
    text = data.decode("utf-8", "replace")
    return [line.rsplit("\r", 1)[-1] for line in text.rstrip("\n").split("\n")[-lines:]] if text.strip() else []


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0][:200]
