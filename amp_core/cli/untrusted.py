"""What the commands share that read runs and files, which may be a stranger's."""

import argparse
import contextlib
from collections.abc import Iterator
from unicodedata import category

from amp_core.hardware.host import bounded_memory
from amp_core.schema import RunError

RUN_HELP = "run folder, packed run (.zip), or address such as s3://bucket/runs/a"
"""What the commands say of a run that they read."""
MAX_MEMORY_GIB = 8
"""What reading may take of a machine. Tables are read one at a time, and a trace of a gigabyte takes less than one."""


@contextlib.contextmanager
def strangers(what: str) -> Iterator[None]:
    """While this lasts, memory is bounded; `what` is read, says the sentence that ends it where that is not enough."""
    try:
        with bounded_memory(MAX_MEMORY_GIB):
            yield
    except MemoryError:
        raise RunError(f"{what} needs more than {MAX_MEMORY_GIB} GiB to read") from None


def printable(text: str) -> str:
    """`text` without what would steer a terminal: names in a run may be a stranger's."""
    return "".join(c if c == "\n" or not category(c).startswith("C") else "?" for c in text)


def makes_a_run(command: argparse.ArgumentParser) -> None:
    """Where the run goes, and its name."""
    command.add_argument("--out", metavar="RUN", required=True, help="run folder to make")
    command.add_argument("--name", metavar="NAME", help="what to call the run (default: the folder's name)")
