"""Whether a new run may be written into a folder, and the refusals if not.

>>> refuse_content({"run.json"}, into="runs/a")
Traceback (most recent call last):
amp_core.schema.RunError: into='runs/a' already holds a run; give a folder that does not exist yet
"""

import os
from collections.abc import Collection
from pathlib import Path

from amp_core.schema import TABLES, RunError

JOB_FILES = frozenset({"console.log", "job.json", "config.json", "job.sh", "job.log"})
"""Files that may lie in the folder before the run begins: `jobs` puts them there."""


def refuse_content(present: Collection[str], into: str | os.PathLike[str]) -> None:
    """Raise `RunError` if rank 0 finds a run or other files, of which `present` are the names. Other ranks may have
    begun before it."""
    if "run.json" in present:
        raise already_used(into)
    # Names with a leading dot do not count as content: temporary files, .DS_Store, .nfs0001.
    foreign = sorted(n for n in present if n not in JOB_FILES | TABLES.keys() and not n.startswith("."))
    if foreign:
        raise RunError(f"into={str(into)!r} holds other files ({foreign[0]!r}); give an empty folder or a new one")


def refuse_rows(folder: Path, rank: int, into: str | os.PathLike[str]) -> None:
    """Raise `RunError` if the folder holds rows of a rank other than 0 already."""
    if any(folder.glob(f"*/[0-9]*.r{rank}.*")):
        raise RunError(f"into={str(into)!r} already holds rows of rank {rank}; give a folder that does not exist yet")


def already_used(into: str | os.PathLike[str], argument: str = "into") -> RunError:
    """The refusal of a folder with a run."""
    return RunError(f"{argument}={str(into)!r} already holds a run; give a folder that does not exist yet")


def refusal(error: BaseException, folder: Path, into: str | os.PathLike[str]) -> RunError | None:
    """What stopped a run from beginning, in one sentence; None for `RunError`, which has one, and other exceptions."""
    if isinstance(error, FileExistsError) and folder.is_dir():
        return already_used(into)
    if isinstance(error, OSError):
        return RunError(f"into={str(into)!r} cannot be written: {error.strerror or error}")
    if isinstance(error, ValueError) and not isinstance(error, RunError):
        what = "its name is not in UTF-8" if isinstance(error, UnicodeError) else error
        return RunError(f"into={str(into)!r} cannot be written: {what}")
    return None
