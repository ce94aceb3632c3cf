"""Memory that a pass of a page no longer needs goes back to the system.

    memory_back.at_once()      # in every pass; only the first changes anything

A look at a live run makes some megabytes of tables and arrays and drops them again, in a thread that ends with it.
Arrow's own pool keeps what a thread freed for that thread: following a run, the app grew by 50 KB a second. And glibc
raises the size from which it takes blocks from the system one by one to that of the largest block it has ever freed, up
to 32 MiB (mallopt(3), M_MMAP_THRESHOLD): smaller ones then lie between others in a heap that cannot shrink, of which
two thirds were holes after an hour. So Arrow uses the system's pool, and the size stays where it starts.
"""

import ctypes
import functools
import platform

import pyarrow as pa

MMAP_THRESHOLD_BYTES = 128 * 1024
"""glibc's own first value."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


@functools.cache
def at_once() -> None:
    """Set both for this process; where the C library is not glibc, Arrow's pool alone."""
    pa.set_memory_pool(pa.system_memory_pool())
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        for option in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD):
            libc.mallopt(option, MMAP_THRESHOLD_BYTES)
