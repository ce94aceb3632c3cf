"""Files and folders that appear whole or not at all, whatever happens while they are written.

>>> replace_file(Path("runs/a/run.json"), b"{}")        # a reader sees the old content or the new
"""

import contextlib
import errno
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from amp_core.schema import RunError
from amp_core.store.urls import is_address


def replace_file(path: Path, data: bytes) -> None:
    """Write `data` to `path` so that a reader sees the old content or the new, also after a crash."""
    with _written_temporary(path, data) as unfinished:
        unfinished.replace(path)


def create_file(path: Path, data: bytes) -> None:
    """Create `path`, which must not exist yet: of two processes that create it, one gets `FileExistsError`."""
    with _written_temporary(path, data) as unfinished:
        try:
            path.hardlink_to(unfinished)
        except FileExistsError:
            raise
        except OSError:  # a file system without links: check first instead
            if path.exists():
                raise FileExistsError(errno.EEXIST, "it already exists", str(path)) from None
            unfinished.replace(path)


@contextlib.contextmanager
def _written_temporary(path: Path, data: bytes) -> Iterator[Path]:
    """`data` in a file beside `path`, synced to disk; removed afterwards unless it was renamed."""
    with temporary(path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")) as beside:
        with open(beside, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        yield beside


@contextlib.contextmanager
def temporary(path: Path) -> Iterator[Path]:
    """Remove `path` afterwards: on a full disk a half-written file would only take space."""
    try:
        yield path
    finally:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def check_outside_runs(place: str | os.PathLike[str], argument: str = "out") -> None:
    """Raise `RunError` if `place` lies inside a run's folder: it could replace the run's files or be mistaken for
    one."""
    if is_address(place):
        return
    for folder in Path(place).resolve().parents:
        if (folder / "run.json").is_file():
            raise RunError(
                f"{argument}={os.fspath(place)!r} is inside the run {str(folder)!r}; give a place outside it"
            )


def check_holds_runs(out: str | os.PathLike[str]) -> None:
    """Raise `RunError` if `out` cannot hold runs: it is a run itself, lies inside one, or is a file."""
    target = Path(out)
    if (target / "run.json").is_file():
        raise RunError(f"out={os.fspath(out)!r} is a run; give a folder that does not exist yet, for several runs")
    check_outside_runs(out)
    if any(place.exists() and not place.is_dir() for place in (target, *target.parents)):
        raise RunError(f"out={os.fspath(out)!r} is a file, or inside one; give a folder that does not exist yet")


def check_new(out: str | os.PathLike[str]) -> None:
    """Raise `RunError` if `out` is an address, lies inside a run, or is not empty."""
    if is_address(out):
        raise RunError(f"out={os.fspath(out)!r} is an address; give a folder on this machine, and copy it from there")
    check_outside_runs(out)
    target = Path(out)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise RunError(f"out={os.fspath(out)!r} exists already; give a folder that does not exist yet")


@contextlib.contextmanager
def new_folder(out: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary folder that is renamed to `out` on success and removed otherwise. Raises `RunError`."""
    check_new(out)
    target = Path(out)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=".making-", dir=target.parent))
        try:
            yield made
            made.chmod(0o755)
            made.rename(target)
        finally:
            shutil.rmtree(made, ignore_errors=True)  # the rename has moved it if it succeeded
    except OSError as error:
        raise RunError(f"out={os.fspath(out)!r} cannot be written: {error.strerror or error}") from None
