"""Frameworks that AMPscope can watch and does not bring."""

from collections.abc import Iterator
from contextlib import contextmanager

from amp_core.store.urls import with_extra


@contextmanager
def needing(package: str) -> Iterator[None]:
    """Around the import of `package`: where it is not there, the `ModuleNotFoundError` says how it is installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != package:  # it is there, and misses something itself
            raise
        raise ModuleNotFoundError(f"{package} is not installed; {with_extra(package)}", name=package) from None
