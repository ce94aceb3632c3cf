"""The open segments of a writer, one per table: opened, sealed when due, written again if their file was deleted.

>>> segments = OpenSegments(Path("runs/a"), 0, {}, Sealer(), seal_bytes=2**24, seal_age_s=lambda: 600.0)
>>> segments.of_table("steps").write(message("steps", {"step": [0]}, rank=0))
>>> segments.seal_all()
"""

import contextlib
import errno
import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from amp_core.schema import TABLES
from amp_core.store.segment_writer import OpenSegment, Sealer

REMOVED = "the run's files were removed"

log = logging.getLogger("amp_core")


class OpenSegments:
    """Not thread-safe: the writer holds its lock."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        numbers: Mapping[str, int],
        sealer: Sealer,
        seal_bytes: int,
        seal_age_s: Callable[[], float],
        check_folder: Callable[[], None] = lambda: None,
    ) -> None:
        """`numbers` maps each table to the number of its next segment, 0 by default. `check_folder` is called before a
        file is created, and raises `OSError` if the folder no longer belongs to this run."""
        self._folder = folder
        self._suffix = f".r{rank}" if rank else ""
        self._numbers = dict(numbers)
        self._sealer = sealer
        self._limits = seal_bytes, seal_age_s
        self._check_folder = check_folder
        self._open: dict[str, OpenSegment] = {}
        self._removed: set[str] = set()  # tables whose open segment was deleted, to be written again at the next row

    def of_table(self, table: str) -> OpenSegment:
        """The segment that the next rows go into.

        If its file was deleted, raises `FileNotFoundError` once, so that the loss is reported, and writes the file
        again at the next call.
        """
        segment = self._open.get(table)
        due = segment is not None and self._is_due(segment)
        if segment is not None and segment.removed(at_once=due or table in self._removed):
            if table not in self._removed:
                self._removed.add(table)
                raise FileNotFoundError(errno.ENOENT, REMOVED, str(segment.path))
            if not self.write_again(table):
                log.warning("AMPscope: %s; what was in %s is lost", REMOVED, table)
                self.abandon(table)
        elif due:
            self._seal(table)
        if table not in self._open:
            self._check_folder()
            number = self._numbers.get(table, 0)
            self._numbers[table] = number + 1
            path = self._folder / table / f"{number:05d}{self._suffix}.arrows"
            self._open[table] = OpenSegment(path, TABLES[table].schema)
        return self._open[table]

    def removed(self) -> list[str]:
        """Tables whose open file was deleted."""
        return [table for table, segment in self._open.items() if segment.removed(at_once=True)]

    def write_again(self, table: str) -> bool:
        """Write the deleted segment of `table` again, with all its rows; False if they are lost."""
        self._check_folder()
        kept = self._open[table].write_again()
        self._removed.discard(table)
        return kept

    def abandon(self, table: str) -> None:
        """Forget the segment of `table`, whose rows are lost: its name may by now be a file of another run."""
        if table in self._open:
            self._open.pop(table).abandon()

    def seal_due(self) -> None:
        """Seal the segments that are due, also of tables without new rows."""
        for table in [table for table, segment in self._open.items() if self._is_due(segment)]:
            if not self._open[table].removed(at_once=True):  # else the next row, or the end, writes it again
                self._seal(table)

    def seal_all(self) -> None:
        """Seal all segments; raises the last error, after all others are closed."""
        with contextlib.ExitStack() as stack:
            for table in reversed(self._open):
                stack.callback(self._seal, table)

    def _is_due(self, segment: OpenSegment) -> bool:
        seal_bytes, seal_age_s = self._limits
        return segment.due(seal_bytes, seal_age_s())

    def _seal(self, table: str) -> None:
        segment = self._open.pop(table)
        try:
            segment.close()
        finally:
            self._sealer.put(segment.path)
