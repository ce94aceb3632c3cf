"""Import uploads, which are untrusted until a process of their own has read them in full.

    >>> key = take_zip("a.zip", data)
    'run/uploads/a'

The upload goes to a temporary file. `python -m amp_core unpack` (`import-trace` for profiler traces, `import-te` for
Transformer Engine's logs) checks and unpacks it within a time limit, and only a valid run appears in the library. For
anything else `RunError` is raised with one sentence, and nothing is written.
"""

import io
import os
import re
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath

from amp_core import RunError
from amp_core.hardware.child_environment import python_path
from amp_core.library.permissions import current
from amp_core.schema import TABLES
from pages.parts.library import run_list

ZIP = b"PK"
"""How every zip begins."""
READING_TIMEOUT_S = 60
"""A run of 64 MB takes seconds; one that takes longer is hostile."""
_upload_slots = threading.BoundedSemaphore(2)
"""Uploads that are read at the same time, in all sessions: each may take gigabytes while it is checked."""


def take(files: Sequence[tuple[str, bytes]], progress: Callable[[str], None] | None = None) -> Iterator[str]:
    """Import what was uploaded, given as name or relative path and content: packed runs, a run folder, the traces of
    one run, or logs of Transformer Engine, as their names and first bytes tell. Yields the key of each run once it is
    in the library. `progress` is called with what has been read of traces, in words."""
    if any(PurePosixPath(path).name == "run.json" for path, _ in files):
        if all(path == "run.json" for path, _ in files):
            raise RunError("run.json alone is the head of a run; choose its folder under Other sources, or pack it")
        yield take_folder(files)
        return
    zips = [(name, data) for name, data in files if name.lower().endswith(".zip") or data.startswith(ZIP)]
    traces = [file for file in files if file not in zips and file[0].lower().endswith((".json", ".gz"))]
    if not zips and not traces:
        logs = [file for file in files if file[0].lower().endswith(".log") or "tfevents" in file[0]]
        yield take_te_logs(logs) if logs else take_folder(files)
        return
    for name, data in zips:
        yield take_zip(name, data)
    if traces:
        yield take_traces(traces, progress)


def take_zip(file_name: str, data: bytes) -> str:
    """Unpack an uploaded zip into the library; returns its key."""
    return _take(_stem(file_name), "unpack", [(file_name, "upload.zip", data)])


def take_traces(files: Sequence[tuple[str, bytes]], progress: Callable[[str], None] | None = None) -> str:
    """Make a run from uploaded profiler traces, one per rank, given as name and content; returns its key. `progress`
    is called with what has been read, in words."""
    # Numbered, since files of several ranks may have the same name.
    named = [(name, f"{i}-{_name(name)}", data) for i, (name, data) in enumerate(files)]
    return _take(_stem(files[0][0]).split(".")[0], "import-trace", named, progress)


def take_te_logs(files: Sequence[tuple[str, bytes]]) -> str:
    """Make a run from uploaded logs of Transformer Engine's debug tool, given as name and content; returns its key."""
    # The number keeps two files of one name apart; the name tells the rank, and whether it is an event file.
    named = [(name, f"{i}-{_name(PurePosixPath(name).name)}", data) for i, (name, data) in enumerate(files)]
    return _take("te-logs", "import-te", named)


def _take(
    wanted: str,
    command: str,
    files: Sequence[tuple[str, str, bytes]],
    progress: Callable[[str], None] | None = None,
) -> str:
    """Run `command` on files to make a run in the library. Each file is its name for the user, its stored name, and its
    content."""
    folder = run_list.runs_dir() / run_list.UPLOADS
    target = _free(folder, _name(wanted))
    known = files[0][0]
    current().check_upload(run_list.runs_dir(), sum(len(data) for _, _, data in files))
    with _upload_slots, tempfile.TemporaryDirectory(prefix="ampscope-upload-") as aside:
        for _, stored, data in files:
            (Path(aside) / stored).write_bytes(data)
        paths = [str(Path(aside) / stored) for _, stored, _ in files]
        line = [sys.executable, "-m", "amp_core", command, *paths, "--out", str(target.absolute())]
        names = {stored: name for name, stored, _ in files}
        code, errors = _run(line, lambda text: progress and progress(_in_users_names(text, Path(aside), names)))
        if code is None:
            raise RunError(f"{known} took more than {READING_TIMEOUT_S} s to read; it was left out")
        if code != 0:
            raise RunError(_error_sentence(errors, Path(aside), names))
    return f"run/{run_list.UPLOADS}/{target.name}"


def _run(line: Sequence[str], progress: Callable[[str], object]) -> tuple[int | None, str]:
    """Run a command; its exit status (None if it took too long) and what it wrote as errors. `progress` is called with
    each line of these that begins with `reading`."""
    child = subprocess.Popen(
        line,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | python_path(),
    )
    expired = threading.Event()

    def expire() -> None:
        expired.set()
        child.kill()

    timer = threading.Timer(READING_TIMEOUT_S, expire)
    timer.start()
    errors = []
    with child:
        try:
            for text in child.stderr or ():
                if text.startswith("reading "):
                    progress(text.strip())
                else:
                    errors.append(text)
            code = child.wait()
        finally:
            timer.cancel()
            child.kill()
    return (None if expired.is_set() else code), "".join(errors)


def take_folder(files: Iterable[tuple[str, bytes]]) -> str:
    """Import the files of an uploaded folder, given as relative path and content; returns the run's key."""
    kept = {PurePosixPath(path): data for path, data in files if _belongs(PurePosixPath(path))}
    heads = [path for path in kept if path.name == "run.json"]
    if not heads:
        raise RunError("the folder holds no run: run.json is missing; choose the folder that directly contains it")
    if len(heads) > 1:
        raise RunError(f"the folder holds {len(heads)} runs; upload one run folder at a time")
    root = heads[0].parent
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for path, data in kept.items():
            if path.is_relative_to(root):
                archive.writestr(str(path.relative_to(root)), data)
    return take_zip(f"{root.name or 'upload'}.zip", packed.getvalue())


def _belongs(path: PurePosixPath) -> bool:
    """Whether a run folder has such a file; all others are omitted unread."""
    if path.is_absolute() or ".." in path.parts:
        return False
    if path.name in ("run.json", "console.log"):
        return True
    if path.suffix not in (".parquet", ".arrows"):
        return False
    return path.parent.name in TABLES or path.stem in TABLES  # segments in a folder, or the table as one file


def _name(wanted: str) -> str:
    """A folder name of harmless characters only."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", wanted).strip(".-")[:80] or "upload"


def _free(folder: Path, name: str) -> Path:
    """`name` in `folder`, with a number behind it if the name is taken."""
    target, number = folder / name, 2
    while target.exists():
        target, number = folder / f"{name}-{number}", number + 1
    return target


def _stem(file_name: str) -> str:
    return PurePosixPath(file_name.replace("\\", "/")).stem


def _error_sentence(stderr: str, aside: Path, names: Mapping[str, str]) -> str:
    """The sentence on which reading ended, with the user's names of files (`names`: by stored name)."""
    lines = [line.removeprefix("ampscope: ") for line in stderr.strip().splitlines() if line.strip()]
    if not lines or not stderr.strip().splitlines()[-1].startswith("ampscope: "):
        return f"{next(iter(names.values()))} is damaged in a way that stopped its reader"
    return _in_users_names(lines[-1], aside, names)


def _in_users_names(text: str, aside: Path, names: Mapping[str, str]) -> str:
    """`text` with the user's names of files in place of the stored ones."""
    for stored, name in names.items():
        path = str(aside / stored)
        for written in (f"file={path!r}", f"path={path!r}", path, f"trace={stored!r}", stored):
            text = text.replace(written, name)
    return text
