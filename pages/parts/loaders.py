"""Open runs and analyse them, each thing once.

    >>> run = open_run(entry)
    >>> trace = analysed(scale_trace, run)

A `Run` belongs to one session, because it fills itself as it is read; a live one reads only what is new. What an
analysis made of a run that no longer grows is shared by all sessions, under the fingerprint of the run's files.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import streamlit as st

from amp_core import Run
from amp_core.extract import open_extract
from pages.parts.library import Entry

T = TypeVar("T")

KEPT = 6
"""Runs that a session keeps open."""


def open_run(entry: Entry) -> Run:
    """The entry's run, up to date and, once it has ended, checked in full: other programs write runs too.

    Raises `RunError` where it cannot be read or is not what a run must be.
    """
    opened: dict[str, Run] = st.session_state.setdefault("loaders.runs", {})
    run = opened.pop(str(entry.path), None)
    if run is None:
        run = open_extract(entry.path)
    else:
        run.refresh()
    opened[str(entry.path)] = run  # put last: the first is the one not looked at for longest
    while len(opened) > KEPT:
        opened.pop(next(iter(opened)))
    if not run.is_live:
        analysed(_check, run)
    return run


def _check(run: Run) -> None:
    run.validate(full=True)


def analysed(function: Callable[..., T], of: Run | Sequence[Run], *args: Any, **options: Any) -> T:
    """`function(of, *args, **options)`, remembered where all of its runs have ended."""
    runs = list(of) if isinstance(of, Sequence) else [of]
    if any(run.is_live for run in runs):
        return function(of, *args, **options)
    name = f"{function.__module__}.{function.__qualname__}"
    files = tuple((str(run.path), run.fingerprint()) for run in runs)
    given = (args, tuple(sorted(options.items())))
    remembered: T = _remembered(function, of, name, files, given)
    return remembered


@st.cache_data(max_entries=512, show_spinner=False)
def _remembered(
    _function: Callable[..., Any],
    _of: Run | Sequence[Run],
    name: str,  # noqa: ARG001 - this and `files` are the key under which it is remembered
    files: tuple[tuple[str, tuple[tuple[str, int, int], ...]], ...],  # noqa: ARG001
    given: tuple[tuple[Any, ...], tuple[tuple[str, Any], ...]],
) -> Any:
    args, options = given
    return _function(_of, *args, **dict(options))
