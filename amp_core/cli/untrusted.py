"""Helpers of the commands that read untrusted runs and files."""

import argparse
import contextlib
from collections.abc import Iterator

from amp_core.hardware.host import bounded_memory
from amp_core.schema import RunError
from amp_core.text.printable import printable

__all__ = ["MAX_MEMORY_GIB", "RUN_HELP", "add_run_output", "printable", "reading_untrusted"]

RUN_HELP = "run folder, packed run (.zip), or address such as s3://bucket/runs/a"
"""Help of the argument for a run to read."""
MAX_MEMORY_GIB = 8
"""Memory limit of reading. Tables are read one at a time, and a trace of a gigabyte takes less than one."""


@contextlib.contextmanager
def reading_untrusted(what: str) -> Iterator[None]:
    """Bound the memory of this block; if that is exceeded, the error says that `what` was read."""
    try:
        with bounded_memory(MAX_MEMORY_GIB):
            yield
    except MemoryError:
        raise RunError(f"{what} needs more than {MAX_MEMORY_GIB} GiB to read") from None


def add_run_output(command: argparse.ArgumentParser) -> None:
    """Declare the flags for the run's folder and name."""
    command.add_argument("--out", metavar="RUN", required=True, help="run folder to create")
    command.add_argument("--name", metavar="NAME", help="name of the run (default: the folder's name)")
