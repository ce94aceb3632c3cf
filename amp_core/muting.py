"""Findings that somebody has looked at and does not want to be told of again, run by run.

    >>> mute("runs/a", "watch-overhead")
    >>> muted("runs/a")
    frozenset({'watch-overhead'})

Kept in a small JSON file beside the run, `.a.muted.json` beside `a`: a run, once written, is not changed, and a packed
one cannot be.
"""

import json
import os
from pathlib import Path

from amp_core.addresses import Address, is_address, located
from amp_core.runlog import replace_file
from amp_core.schema import RunError
from amp_core.serving import current

MOST_BYTES = 2**16
"""A larger file is none of ours."""


def muted(path: str | os.PathLike[str]) -> frozenset[str]:
    """Codes that are muted for the run at `path`; none where the file is not there or cannot be read."""
    if is_address(path):
        return frozenset()
    file = _file(path)
    try:
        if file.stat().st_size > MOST_BYTES:
            return frozenset()
        codes = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return frozenset()
    return frozenset(c for c in codes if isinstance(c, str)) if isinstance(codes, list) else frozenset()


def mute(path: str | os.PathLike[str], code: str, on: bool = True) -> None:
    """Mute `code` for the run at `path`, or with `on=False` hear of it again.

    Raises `RunError` where the file beside the run cannot be written, or a server is read-only.
    """
    current().check_change("mute findings")
    codes = muted(path) | {code} if on else muted(path) - {code}
    file = _file(path)
    try:
        if codes:
            replace_file(file, json.dumps(sorted(codes)).encode())
        else:
            file.unlink(missing_ok=True)
    except OSError as error:
        raise RunError(f"path={str(path)!r} cannot be muted: {file} ({error.strerror or error})") from error


def _file(path: str | os.PathLike[str]) -> Path:
    where = located(path)
    if isinstance(where, Address):
        raise RunError(f"path={str(path)!r} cannot be muted: findings are muted beside a run on this machine's disks")
    where = where.resolve() if where.name in ("", "..") else where
    return where.with_name(f".{where.name}.muted.json")
