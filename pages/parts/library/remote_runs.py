"""Runs at addresses such as s3://bucket/runs, listed in the background: no page waits long for a network.

    >>> for remote in runs_at(Address("s3://bucket/runs")):
    ...     remote.path, remote.head, remote.status

An answer is good for `FRESH_S`; after that the old one is shown while a thread asks anew. Only the first listing of
an address is waited for, and not longer than `LISTING_TIMEOUT_S`.
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
class _Listing:
    """The state of one address."""

    listed: list[Listed] | None = None
    error: str = ""
    ended_s: float = 0.0
    at_work: bool = False
    answered: threading.Event = field(default_factory=threading.Event)


_listings: dict[Address, _Listing] = {}
_lock = threading.Lock()


def runs_at(root: Address) -> list[Listed]:
    """The runs below `root`, as last listed. Raises `RunError` if it cannot be listed or has not answered yet."""
    with _lock:
        listing = _listings.setdefault(root, _Listing())
        if not listing.at_work and time.monotonic() - listing.ended_s > FRESH_S:
            listing.at_work = True
            threading.Thread(target=_ask, args=(root, listing), name="ampscope-elsewhere", daemon=True).start()
    listing.answered.wait(LISTING_TIMEOUT_S)
    if listing.error:
        raise RunError(listing.error)
    if listing.listed is None:
        raise RunError(f"{root} has not answered yet; come back in a moment")
    return listing.listed


def forget() -> None:
    """List every address anew."""
    with _lock:
        _listings.clear()


def _ask(root: Address, listing: _Listing) -> None:
    listed, error = None, ""
    try:
        listed = runs_below(root)
    except RunError as refused:
        error = str(refused)
    finally:
        listing.listed, listing.error, listing.ended_s = listed, error, time.monotonic()
        listing.at_work = False
        listing.answered.set()
