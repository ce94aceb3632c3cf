"""One test over many parts of the same kind, each of which is named where it fails."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def noted(name: str) -> Iterator[None]:
    """Say in an exception to which part it belongs."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"of {name}")
        raise
