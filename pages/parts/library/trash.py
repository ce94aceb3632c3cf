"""Deleted runs: kept in the runs folder until the trash is emptied, so that a deletion can be undone.

    >>> deleted = delete(entry)
    >>> restore(deleted)
    'run/a'

A run `cmp/fp32` goes to `.deleted/<time>/cmp/fp32`, with its label beside it; the library lists no hidden folders.
Each function raises `RunError` if the disk or a read-only server refuses.
"""

import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from amp_core import RunError
from amp_core.library.permissions import current
from pages.parts.library import run_list
from pages.parts.library.run_list import Entry

TRASH = ".deleted"


@dataclass(frozen=True)
class DeletedRun:
    """A deleted run."""

    stamp: str
    """Name of its folder in the trash: the time of deletion in nanoseconds."""
    key: str
    """Its key in the library before deletion and after restoring."""
    path: Path
    """Where it is stored now."""


def delete(entry: Entry) -> DeletedRun:
    """Move a run to the trash."""
    current().check_change("delete a run")
    if not isinstance(entry.path, Path):
        raise RunError(f"{entry.name} is not stored on this machine; delete it where it is")
    place = entry.key.removeprefix("run/")
    stamp = str(time.time_ns())
    target = run_list.runs_dir() / TRASH / stamp / place
    _move(entry.path, target)
    return DeletedRun(stamp, entry.key, target)


def deleted_runs() -> list[DeletedRun]:
    """The runs in the trash, the latest first."""
    root = run_list.runs_dir() / TRASH
    deleted = []
    try:
        stamps = sorted((p for p in root.iterdir() if p.name.isdecimal()), reverse=True)
    except OSError:  # nothing was deleted yet, or it is another user's trash: there is nothing to restore from here
        return []
    for stamp in stamps:
        runs = run_list.folders(stamp, "run", 1 + run_list.SEARCH_DEPTH)
        deleted += [DeletedRun(stamp.name, key, run) for run, key, _ in runs]
    return deleted


def restore(run: DeletedRun) -> str:
    """Move a run back to where it was; returns its key. Raises `RunError` if another run has taken its place."""
    current().check_change("restore a run")
    target = run_list.runs_dir() / run.key.removeprefix("run/")
    if target.exists():
        place = run.key.removeprefix("run/")
        raise RunError(f"the place of {place} is taken by another run; rename or delete that first")
    _move(run.path, target)
    shutil.rmtree(run_list.runs_dir() / TRASH / run.stamp, ignore_errors=True)
    return run.key


def size_bytes() -> int:
    """Bytes on disk of the trash."""
    return sum(run_list.size_bytes(run.path) for run in deleted_runs())


def empty() -> None:
    """Remove every run in the trash permanently."""
    current().check_change("delete runs")
    try:
        shutil.rmtree(run_list.runs_dir() / TRASH)
    except FileNotFoundError:
        return
    except OSError as error:
        raise RunError(f"the deleted runs cannot be removed: {error.strerror or error}") from error


def _move(source: Path, target: Path) -> None:
    """Move a run with the hidden files that belong to it."""
    beside = [p for p in source.parent.glob(f".{source.name}.*.json") if p.is_file()]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        source.rename(target)
        for file in beside:
            file.rename(target.with_name(file.name))
    except OSError as error:
        if not source.exists():
            raise RunError(f"{source.name} is no longer there: it was moved or deleted elsewhere") from error
        raise RunError(f"{source.name} cannot be moved: {error.strerror or error}") from error
