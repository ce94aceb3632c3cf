"""Let file modes deny access, also where the tests run as root, whom they otherwise do not restrict.

with restricted():
    folder.chmod(0)
    load_run(folder)      # as another user: "Permission denied"
"""

import contextlib
import ctypes
import os
from collections.abc import Iterator

_VERSION_3 = 0x20080522
_DENIED = 1 << 1 | 1 << 2  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH


@contextlib.contextmanager
def restricted() -> Iterator[None]:
    """Within it this thread, and threads that it starts, may open only what modes and ownership allow."""
    if os.geteuid() != 0:
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    head = (ctypes.c_uint32 * 2)(_VERSION_3, 0)
    before = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable of capabilities 0-31, then of 32-63
    _check(libc.capget(head, before))
    lowered = (ctypes.c_uint32 * 6)(*before)
    lowered[0] &= ~_DENIED
    _check(libc.capset(head, lowered))
    try:
        yield
    finally:
        _check(libc.capset(head, before))


def _check(code: int) -> None:
    if code != 0:
        raise OSError(ctypes.get_errno(), "capabilities cannot be changed")
