"""Muted findings: hidden by a user, per run.

    >>> mute("runs/a", "watch-overhead")
    >>> muted("runs/a")
    frozenset({'watch-overhead'})

Kept beside the run, `.a.muted.json` beside `a` (see `sidecar`).
"""

import os
from pathlib import Path

from amp_core.library.permissions import current
from amp_core.library.sidecar import file_beside, read_beside, write_beside
from amp_core.schema import RunError
from amp_core.store.urls import Address, is_address, located


def muted(path: str | os.PathLike[str]) -> frozenset[str]:
    """Codes that are muted for the run at `path`; none if the file is missing or cannot be read."""
    if is_address(path):
        return frozenset()
    codes = read_beside(_file(path))
    return frozenset(c for c in codes if isinstance(c, str)) if isinstance(codes, list) else frozenset()


def mute(path: str | os.PathLike[str], code: str, on: bool = True) -> None:
    """Mute `code` for the run at `path`, or with `on=False` show it again.

    Raises `RunError` if the file beside the run cannot be written, or on a read-only server.
    """
    current().check_change("mute findings")
    codes = muted(path) | {code} if on else muted(path) - {code}
    file = _file(path)
    try:
        write_beside(file, sorted(codes) or None)
    except OSError as error:
        raise RunError(f"path={str(path)!r} cannot be muted: {file} ({error.strerror or error})") from error


def _file(path: str | os.PathLike[str]) -> Path:
    where = located(path)
    if isinstance(where, Address):
        raise RunError(f"path={str(path)!r} cannot be muted: mutes are stored beside a run on this machine's disks")
    return file_beside(where, "muted")
