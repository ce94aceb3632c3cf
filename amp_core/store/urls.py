"""Addresses of runs that are not on this machine's disks: `s3://bucket/runs/a`, `gs://…`, anything that fsspec knows.

    >>> load_run("s3://bucket/runs/a")
    >>> watch(model, optimizer, into="gs://bucket/runs/b")
    >>> roots("runs:s3://bucket/runs")          # what AMPSCOPE_RUNS may hold
    [PosixPath('runs'), Address('s3://bucket/runs')]

Text with a scheme is an address; all else is a path, for which fsspec is not imported. Credentials and endpoints come
from where fsspec's packages look for them: the environment and fsspec's configuration files.
"""

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from amp_core.schema import RunError

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.:\-]+://")  # two letters or more: `C:` is a drive


class Address(os.PathLike[str]):
    """An address with the parts of `Path`'s interface that runs need: `/`, `name`, `stem`, `with_name`."""

    def __init__(self, text: str) -> None:
        self._text = text.rstrip("/") if not text.endswith("://") else text

    def __str__(self) -> str:
        return self._text

    def __fspath__(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return f"Address({self._text!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Address) and other._text == self._text

    def __hash__(self) -> int:
        return hash(self._text)

    def __truediv__(self, name: str) -> "Address":
        return Address(f"{self._text}/{name}" if not self._text.endswith("/") else f"{self._text}{name}")

    @property
    def name(self) -> str:
        """The last part."""
        return self._text.partition("://")[2].rpartition("/")[2]

    @property
    def stem(self) -> str:
        """The last part without a suffix."""
        return Path(self.name).stem

    def with_name(self, name: str) -> "Address":
        """The address with `name` as its last part."""
        return Address(self._text[: len(self._text) - len(self.name)] + name)


def is_address(place: str | os.PathLike[str]) -> bool:
    """Whether `place` has a scheme, like `s3://bucket/runs`."""
    return _SCHEME.match(os.fspath(place)) is not None


def located(place: str | os.PathLike[str]) -> Path | Address:
    """`place` as a path, or as an address where it has a scheme."""
    return Address(os.fspath(place)) if is_address(place) else Path(place)


def roots(text: str) -> list[Path | Address]:
    """The places that `text` lists, one per line, or on one line separated by `os.pathsep` (`:`, on Windows `;`).

    The colons of an address, after its scheme and before a port, do not separate: `hdfs://host:8020/runs`.
    """
    if "\n" in text:
        parts = text.splitlines()
    elif os.pathsep == ":":
        parts = re.split(r"(?<!:):(?!//|:)(?!\d+/)", text)
    else:
        parts = text.split(os.pathsep)
    return [located(part.strip()) for part in parts if part.strip()]


def with_extra(extra: str) -> str:
    """The command that installs the packages of `extra`: AMPscope is on no package index."""
    return f"install it with `pip install 'DIR[{extra}]'`, where DIR is the folder that AMPscope was checked out to"


def filesystem(address: Address, argument: str = "path") -> tuple[Any, str]:
    """The fsspec filesystem of `address`, without a cache of listings, and the address as a path in it.

    Raises `RunError` if fsspec, or the package it needs for the scheme, is missing.
    """
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise RunError(
            f"{argument}={str(address)!r} is an address, which needs fsspec; {with_extra('remote')}; or give a folder"
        ) from None
    with errors_as_run_error(address, argument):
        opened, path = url_to_fs(str(address), use_listings_cache=False)
        return opened, path.rstrip("/")


@contextlib.contextmanager
def errors_as_run_error(address: Address, argument: str = "path", what: str = "cannot be read") -> Iterator[None]:
    """Turns errors of the store's client into `RunError`, except `FileNotFoundError`."""
    try:
        yield
    except (RunError, FileNotFoundError):
        raise
    except Exception as error:  # each store's client raises its own errors, which have no common base
        text = " ".join(str(error).split()) or type(error).__name__
        raise RunError(f"{argument}={str(address)!r} {what}: {text:.300}") from error
