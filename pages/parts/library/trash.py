"""Deleted runs: set aside in the runs folder until the bin is emptied, so that a deletion can be undone.

    >>> kept = discard(entry)
    >>> restore(kept)
    'run/a'

A run `cmp/fp32` goes to `.deleted/<time>/cmp/fp32`, with the small files beside it: a folder whose name begins with a
dot is no part of the library. Each function raises `RunError` where the disk, or a read-only server, refuses.
"""

import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from amp_core import RunError
from amp_core.library.permissions import current
from pages.parts.library import run_list
from pages.parts.library.run_list import Entry

BIN = ".deleted"


@dataclass(frozen=True)
class Kept:
    """A deleted run."""

    stamp: str
    """Name of its folder in the bin: when it was deleted, in nanoseconds."""
    key: str
    """Its key in the library before, and after it was restored."""
    path: Path
    """Where it lies now."""


def discard(entry: Entry) -> Kept:
    """Move a run into the bin."""
    current().check_change("delete a run")
    place = entry.key.removeprefix("run/")
    stamp = str(time.time_ns())
    target = run_list.runs_dir() / BIN / stamp / place
    _move(entry.path, target)
    return Kept(stamp, entry.key, target)


def kept() -> list[Kept]:
    """What lies in the bin, the latest first."""
    root = run_list.runs_dir() / BIN
    deleted = []
    for stamp in sorted((p for p in root.iterdir() if p.name.isdecimal()), reverse=True) if root.is_dir() else []:
        runs = run_list.folders(stamp, "run", 1 + run_list.SEARCH_DEPTH)
        deleted += [Kept(stamp.name, key, run) for run, key, _ in runs]
    return deleted


def restore(run: Kept) -> str:
    """Move a run back to where it was; gives its key. Raises `RunError` where another has taken its place."""
    current().check_change("restore a run")
    target = run_list.runs_dir() / run.key.removeprefix("run/")
    if target.exists():
        place = run.key.removeprefix("run/")
        raise RunError(f"the place of {place} is taken by another run; rename or delete that first")
    _move(run.path, target)
    shutil.rmtree(run_list.runs_dir() / BIN / run.stamp, ignore_errors=True)
    return run.key


def size_bytes() -> int:
    """Bytes on disk of everything in the bin."""
    return sum(run_list.size_bytes(run.path) for run in kept())


def empty() -> None:
    """Remove everything in the bin for good."""
    current().check_change("delete runs")
    try:
        shutil.rmtree(run_list.runs_dir() / BIN)
    except FileNotFoundError:
        return
    except OSError as error:
        raise RunError(f"the deleted runs cannot be removed: {error.strerror or error}") from error


def _move(source: Path, target: Path) -> None:
    """Move a run with the hidden files that stand beside it for it."""
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
