"""Untrusted zip files, opened only if their directory is small enough to read.

`zipfile` makes an object per entry when it opens a file: a million entries, in 47 MB, take seven seconds.
"""

import os
import struct
import zipfile
from pathlib import Path
from typing import IO

MAX_DIRECTORY_BYTES = 4 * 2**20
"""20,000 entries of 200 bytes; one has 46 besides its name."""
_END, _LOCATOR_64, _END_64 = b"PK\5\6", b"PK\6\7", b"PK\6\6"
_TAIL = 22 + 65_535 + 20 + 56
"""Bytes at the end of a file that hold the records of its directory, with the longest comment."""


def open_zip(source: str | os.PathLike[str] | IO[bytes]) -> zipfile.ZipFile:
    """An opened zip. Raises the errors of `zipfile.ZipFile`, and `ValueError` if its directory is too large."""
    if isinstance(source, str | os.PathLike):
        with Path(source).open("rb") as file:
            size = _directory_bytes(file)
    else:
        size = _directory_bytes(source)
    if size > MAX_DIRECTORY_BYTES:
        most = f"{MAX_DIRECTORY_BYTES / 2**20:.3g} MiB"
        raise ValueError(f"its directory is {size / 2**20:,.1f} MiB; that of a packed run is at most {most}")
    return zipfile.ZipFile(source)


def _directory_bytes(file: IO[bytes]) -> int:
    """Size of the directory according to the end record, or to the zip64 end record before it if there is one
    (APPNOTE.TXT 6.3.10, 4.3.14 to 4.3.16). 0 without such a record: then it is no zip, and `zipfile` reports that."""
    file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
    tail = file.read(_TAIL)
    at = tail.rfind(_END, 0, max(0, len(tail) - 18))
    if at < 0:
        return 0
    (size,) = struct.unpack_from("<I", tail, at + 12)
    if at >= 76 and tail[at - 20 : at - 16] == _LOCATOR_64 and tail[at - 76 : at - 72] == _END_64:
        (size,) = struct.unpack_from("<Q", tail, at - 76 + 40)
    return int(size)
