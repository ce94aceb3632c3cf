"""Small JSON files beside a run for data added afterwards: a recorded run is not changed, and a packed one cannot be.

>>> write_beside(file_beside("runs/a", "muted"), ["watch-overhead"])        # runs/.a.muted.json
>>> read_beside(file_beside("runs/a", "muted"))
['watch-overhead']
"""

import json
import os
from pathlib import Path
from typing import Any

from amp_core.store.atomic import replace_file

MAX_BYTES = 2**16
"""AMPscope writes no larger file."""


def file_beside(path: str | os.PathLike[str], what: str) -> Path:
    """The file that holds `what` of the run at `path`."""
    where = Path(path)
    where = where.resolve() if where.name in ("", "..") else where
    return where.with_name(f".{where.name}.{what}.json")


def read_beside(file: Path) -> Any:
    """The content of the file; None if it is missing or cannot be read."""
    try:
        return json.loads(file.read_text(encoding="utf-8")) if file.stat().st_size <= MAX_BYTES else None
    except (OSError, ValueError, RecursionError):
        return None


def write_beside(file: Path, record: Any) -> None:
    """Write `record` to the file, or remove the file if it is None. Raises `OSError`."""
    if record is None:
        file.unlink(missing_ok=True)
    else:
        replace_file(file, json.dumps(record).encode())
