"""One test over many cases: a failure names the case."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def note_on_error(case: str) -> Iterator[None]:
    """Add the name of the case to an exception."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"of {case}")
        raise
