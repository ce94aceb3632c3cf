"""Optional frameworks that AMPscope can watch."""

from collections.abc import Iterator
from contextlib import contextmanager

from amp_core.store.urls import with_extra


@contextmanager
def needing(package: str) -> Iterator[None]:
    """Around the import of `package`: if it is missing, the `ModuleNotFoundError` says how to install it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != package:  # it is installed, but one of its own imports is missing
            raise
        raise ModuleNotFoundError(f"{package} is not installed; {with_extra(package)}", name=package) from None
