"""When files were last seen to change: whether a process of another machine still writes them.

>>> SIGHTINGS.changed_lately("runs/a", (("steps/00000.arrows", 74016, 1764000000000000000),), STALE_S)
True

Modification times come from the clocks of other machines, and the clock of this one may be set meanwhile. So they are
compared with it only once, when files are first seen; after that a change counts, timed by a clock that nobody sets.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

Files = tuple[tuple[str, int, int], ...]
"""Names, sizes and modification times in ns since 1970."""

MAX_SIGHTINGS = 20_000
"""Runs and jobs that are remembered."""


class _Sighting(NamedTuple):
    files: Files
    until_s: float
    """Until when they count as recently changed, on the clock that nobody sets."""


class Sightings:
    """The latest look at each run, for all threads; both clocks are parameters for tests."""

    def __init__(
        self, wall_s: Callable[[], float] = time.time, elapsed_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._wall_s, self._elapsed_s = wall_s, elapsed_s
        self._lock = threading.Lock()
        self._latest: OrderedDict[str, _Sighting] = OrderedDict()

    def changed_lately(self, what: str, files: Files, within_s: float) -> bool:
        """Whether the files changed within this time, as far as this process knows.

        At the first look their newest modification time decides; one in the future counts as now.
        """
        now_s = self._elapsed_s()
        with self._lock:
            seen = self._latest.pop(what, None)
            if seen is None:
                age_s = self._wall_s() - max((mtime_ns for *_, mtime_ns in files), default=0) / 1e9
                seen = _Sighting(files, now_s + within_s - max(0.0, age_s))
            elif seen.files != files:
                seen = _Sighting(files, now_s + within_s)
            self._latest[what] = seen
            while len(self._latest) > MAX_SIGHTINGS:
                self._latest.popitem(last=False)
        return now_s < seen.until_s


SIGHTINGS = Sightings()
"""Those of this process."""
