"""Take in what somebody uploads: hostile until a process of its own has read it in full.

    >>> key = take_zip("a.zip", data)
    'run/uploads/a'

The upload goes to a temporary file, `python -m amp_core unpack` checks and unpacks it under a time limit, and only a
sound run appears in the library. Raises `RunError` with one sentence, nothing written, for anything else.
"""

import io
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from amp_core import RunError
from amp_core.schema import TABLES
from pages.parts import library

TIME_LIMIT_S = 60
"""A run of 64 MB takes seconds; what takes longer was made to."""


def take_zip(file_name: str, data: bytes) -> str:
    """Unpack an uploaded zip into the library; gives its key."""
    wanted = _name(PurePosixPath(file_name.replace("\\", "/")).stem)
    folder = library.runs_dir() / library.UPLOADS
    target = _free(folder, wanted)
    with tempfile.TemporaryDirectory(prefix="ampscope-upload-") as aside:
        file = Path(aside) / "upload.zip"
        file.write_bytes(data)
        command = [sys.executable, "-m", "amp_core", "unpack", str(file), "--out", str(target.absolute())]
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIME_LIMIT_S, check=False
            )
        except subprocess.TimeoutExpired:
            raise RunError(f"{file_name} took more than {TIME_LIMIT_S} s to read; it was left out") from None
        if done.returncode != 0:
            raise RunError(_said(done.stderr, file, file_name))
    return f"run/{library.UPLOADS}/{target.name}"


def take_folder(files: Iterable[tuple[str, bytes]]) -> str:
    """The same for the files of an uploaded folder, given as relative path and content."""
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
    """Whether a file is one that a run folder has; everything else is left out unread."""
    if path.is_absolute() or ".." in path.parts:
        return False
    if path.name in ("run.json", "console.log"):
        return True
    if path.suffix not in (".parquet", ".arrows"):
        return False
    return path.parent.name in TABLES or path.stem in TABLES  # segments in a folder, or the table as one file


def _name(wanted: str) -> str:
    """A folder name made of harmless characters only."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", wanted).strip(".-")[:80] or "upload"


def _free(folder: Path, name: str) -> Path:
    """`name` in `folder`, or with the first number behind it that is not taken."""
    target, number = folder / name, 2
    while target.exists():
        target, number = folder / f"{name}-{number}", number + 1
    return target


def _said(stderr: str, file: Path, file_name: str) -> str:
    """The sentence that unpacking ended with, speaking of the file by the name the user knows."""
    lines = [line.removeprefix("ampscope: ") for line in stderr.strip().splitlines() if line.strip()]
    if not lines or not stderr.strip().splitlines()[-1].startswith("ampscope: "):
        return f"{file_name} is damaged in a way that stopped its reader"
    return lines[-1].replace(f"file={str(file)!r}", file_name).replace(str(file), file_name)
