"""Pack a run folder into one `.zip`, and unpack a zip of unknown origin.

    >>> pack("runs/a")
    PosixPath('runs/a.zip')
    >>> unpack("a.zip", "runs/from-a-colleague")

A packed run holds `run.json`, sealed `.parquet` segments and `console.log`. `unpack` writes nothing but those names,
nothing outside the target, and nothing at all unless the whole run was read and is valid.
"""

import os
import re
import stat
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pyarrow as pa
import pyarrow.parquet as pq

from amp_core.schema import TABLES, RunError
from amp_core.store.atomic import check_outside_runs, new_folder, replace_file
from amp_core.store.run import Run, load_run
from amp_core.store.untrusted.zip_directory import open_zip
from amp_core.store.urls import Address

MAX_UNPACKED_BYTES = 4 * 2**30
"""A run that would unpack to more is refused: no sample of a training needs it, and a zip bomb does."""
MAX_MEMBERS = 20_000
"""Likewise for the number of files in it."""
MAX_RATIO = 200
"""Likewise for how much larger a file may be than what it is compressed to: Parquet and logs reach a tenth of that."""
SEGMENT_ROWS = 2**15
"""Of a table in one file: more are read in pieces, each within what one segment may hold (`untrusted.limits`)."""


def pack(run: str | os.PathLike[str], out: str | os.PathLike[str] | None = None) -> Path:
    """Write the run folder `run` as a zip, by default beside it as `<run>.zip`, and return its path.

    A run that is still being written is packed with the rows it has so far. Only a zip is ever replaced, and only once
    the new one is complete. Raises `RunError`.
    """
    opened = load_run(run)
    target = Path(out) if out is not None else _beside(opened)
    _refuse_to_replace(target)
    aside = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with zipfile.ZipFile(aside, "w", zipfile.ZIP_STORED) as archive:  # parquet is compressed already
            archive.writestr("run.json", opened.head.to_json(), zipfile.ZIP_DEFLATED)
            for name in TABLES:
                for number, rows in enumerate(_segments(opened.table(name))):
                    archive.writestr(f"{name}/{number:05d}.parquet", _parquet(rows))
            console = opened.console(10_000)
            if console:
                archive.writestr("console.log", "\n".join(console) + "\n", zipfile.ZIP_DEFLATED)
        aside.replace(target)
    except OSError as error:
        raise RunError(f"out={str(target)!r} cannot be written: {error.strerror or error}") from None
    finally:
        aside.unlink(missing_ok=True)
    return target


def _beside(run: Run) -> Path:
    if isinstance(run.path, Address):
        raise RunError(f"run={str(run.path)!r} is an address, beside which no zip is written; give out, the file")
    folder = run.path.resolve()  # `.` has no name that the zip could take
    return folder.with_name(f"{folder.name}.zip")


def _refuse_to_replace(target: Path) -> None:
    check_outside_runs(target)
    if target.is_file() and target.stat().st_size and not zipfile.is_zipfile(target):
        raise RunError(
            f"out={str(target)!r} is a different kind of file; give a zip, or a file that does not exist yet"
        )


def unpack(file: str | os.PathLike[str], out: str | os.PathLike[str]) -> Path:
    """Unpack the zip `file` into the new folder `out` and return it.

    The run is read and validated in full first. Raises `RunError`, with nothing written, if it is damaged, no run, too
    large, or if `out` exists already.
    """
    target = Path(out)
    check_outside_runs(target)
    if target.exists():
        raise RunError(f"out={str(target)!r} exists already; give a folder that does not exist yet")
    refuse_hostile(file)
    run = load_run(file)
    run.validate(full=True)
    with new_folder(out) as aside:
        _write(run, aside)
    return target


def refuse_hostile(file: str | os.PathLike[str]) -> None:
    """Raise `RunError` if the zip's directory shows that it is not a valid packed run: too large, too many files,
    absolute or duplicate names, names that lead outside, links, encrypted members."""
    try:
        with open_zip(file) as archive:
            members = archive.infolist()
    except PermissionError as error:
        raise RunError(f"file={str(file)!r} cannot be read: {error.strerror}") from None
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise RunError(f"file={str(file)!r} is not a packed run: {error}") from None
    if len(members) > MAX_MEMBERS:
        raise RunError(f"file={str(file)!r} holds {len(members)} files; a packed run has at most {MAX_MEMBERS}")
    total = sum(m.file_size for m in members)
    if total > MAX_UNPACKED_BYTES:
        raise RunError(
            f"file={str(file)!r} would unpack to {total / 2**30:.1f} GiB; a packed run has at most "
            f"{MAX_UNPACKED_BYTES // 2**30} GiB"
        )
    earlier_names: set[str] = set()
    for member in members:
        fault = _fault_of(member, earlier_names)
        if fault is not None:
            raise RunError(f"file={str(file)!r} is not a packed run: its member {member.filename!r:.80} {fault}")
        earlier_names.add(member.filename)


def _fault_of(member: zipfile.ZipInfo, earlier_names: set[str]) -> str | None:
    name = member.filename
    if name.startswith("/") or "\\" in name or re.match("[A-Za-z]:", name) or ".." in PurePosixPath(name).parts:
        return "points outside it"
    if name in earlier_names:
        return "occurs twice"
    if stat.S_ISLNK(member.external_attr >> 16):
        return "is a link"
    if member.flag_bits & 0x1:
        return "is encrypted"
    # Deflate packs 1,000 equal bytes into one. No member of a run is like that, so this is a zip bomb.
    if member.file_size > MAX_RATIO * member.compress_size + 2**20:
        return f"would grow to more than {MAX_RATIO} times its size"
    return None


def _write(run: Run, folder: Path) -> None:
    for name in TABLES:
        for number, rows in enumerate(_segments(run.table(name))):
            (folder / name).mkdir(exist_ok=True)
            pq.write_table(rows, folder / name / f"{number:05d}.parquet", compression="zstd")
    console = run.console(10_000)
    if console:
        (folder / "console.log").write_text("\n".join(console) + "\n", encoding="utf-8")
    replace_file(folder / "run.json", run.head.to_json().encode())


def _segments(table: pa.Table) -> Iterator[pa.Table]:
    return (table.slice(start, SEGMENT_ROWS) for start in range(0, table.num_rows, SEGMENT_ROWS))


def _parquet(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    return bytes(sink.getvalue().to_pybytes())
