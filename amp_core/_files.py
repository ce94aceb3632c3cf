"""Files that are there whole or not at all, whatever happens while they are written.

>>> replace_file(Path("runs/a/run.json"), b"{}")        # a reader finds either what was there before, or this
"""

import contextlib
import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path


def replace_file(path: Path, data: bytes) -> None:
    """Write `data` to `path` so that a reader, or a crash, finds either the old content or the new."""
    with _written_aside(path, data) as aside:
        aside.replace(path)


def create_file(path: Path, data: bytes) -> None:
    """The same for a file that must not be there yet: of two that create it at a time, one gets `FileExistsError`."""
    with _written_aside(path, data) as aside:
        try:
            path.hardlink_to(aside)
        except FileExistsError:
            raise
        except OSError:  # a file system without links, on which looking first has to do
            if path.exists():
                raise FileExistsError(errno.EEXIST, "it exists already", str(path)) from None
            aside.replace(path)


@contextlib.contextmanager
def _written_aside(path: Path, data: bytes) -> Iterator[Path]:
    """`data` in a file beside `path`, with the disk; it is gone afterwards, if it has not become something else."""
    with aside(path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")) as beside:
        with open(beside, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        yield beside


@contextlib.contextmanager
def aside(path: Path) -> Iterator[Path]:
    """What is written to `path` does not stay there: on a full disk a half-written file would only take room."""
    try:
        yield path
    finally:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
