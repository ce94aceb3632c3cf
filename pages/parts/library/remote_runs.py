"""Runs at addresses such as s3://bucket/runs, looked for in the background: no page waits long for a network.

    >>> for found in runs_at(Address("s3://bucket/runs")):
    ...     found.path, found.head, found.status

An answer is good for `FRESH_S`; after that the old one is shown while a thread asks anew. Only the very first look at
an address is waited for, and not longer than `PATIENCE_S`.
"""

import threading
import time
from dataclasses import dataclass, field

from amp_core import RunError
from amp_core.store.remote import Listed, runs_below
from amp_core.store.urls import Address

FRESH_S = 30.0
LISTING_TIMEOUT_S = 4.0


@dataclass
class _Look:
    """What is known of one address."""

    listed: list[Listed] | None = None
    error: str = ""
    ended_s: float = 0.0
    at_work: bool = False
    answered: threading.Event = field(default_factory=threading.Event)


_looks: dict[Address, _Look] = {}
_lock = threading.Lock()


def runs_at(root: Address) -> list[Listed]:
    """The runs below `root`, as they were at the last look. Raises `RunError` where it cannot be looked at, or has not
    answered yet."""
    with _lock:
        look = _looks.setdefault(root, _Look())
        if not look.at_work and time.monotonic() - look.ended_s > FRESH_S:
            look.at_work = True
            threading.Thread(target=_ask, args=(root, look), name="ampscope-elsewhere", daemon=True).start()
    look.answered.wait(LISTING_TIMEOUT_S)
    if look.error:
        raise RunError(look.error)
    if look.listed is None:
        raise RunError(f"{root} has not answered yet; it is still being asked, come back in a moment")
    return look.listed


def forget() -> None:
    """Look anew, everywhere."""
    with _lock:
        _looks.clear()


def _ask(root: Address, look: _Look) -> None:
    listed, error = None, ""
    try:
        listed = runs_below(root)
    except RunError as refused:
        error = str(refused)
    finally:
        look.listed, look.error, look.ended_s = listed, error, time.monotonic()
        look.at_work = False
        look.answered.set()
