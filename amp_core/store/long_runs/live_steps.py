"""Table `steps` of a run of any length in bounded memory: sealed segments are read once each, then thinned.

    pool = Pool(most=20_000)
    pool.read(source, TABLES["steps"], named)      # only what is new; True where anything was
    pool.table()                                   # with the column `stands_for` once rows were left out

Of an open segment the rows are held until they are many; they are then thinned with the others, and the segment, once
it is sealed, is read again for what it has beyond them.
"""

import copy
from collections.abc import Callable, Collection
from dataclasses import replace

import pyarrow as pa

from amp_core.schema import Table
from amp_core.store.long_runs.step_sampling import STANDS_FOR, thinned
from amp_core.store.segment_reader import File, Segment
from amp_core.store.sources import Source


class LiveSteps:
    """What was read so far."""

    def __init__(self, most: int) -> None:
        self.most = most
        """Rows that are held; more are thinned. Those of open segments, a quarter as many for each, come on top."""
        self._forget()

    def _forget(self) -> None:
        self._taken: dict[str, File] = {}
        self._open: dict[str, Segment] = {}
        self._held: list[pa.Table] = []
        self._rows: dict[str, int] = {}
        """Rows of an open segment that are held already, and are not in its table any more."""
        self._shift = 0
        self._changed = False
        self._thinned = False

    def copy(self) -> "LiveSteps":
        """Another one with the same rows; what is read into the one does not change the other."""
        other = copy.copy(self)
        other._taken, other._open = dict(self._taken), dict(self._open)
        other._held, other._rows = list(self._held), dict(self._rows)
        return other

    def read(self, source: Source, table: Table, named: Callable[[], Collection[int]]) -> bool:
        """Read what was written since; True where anything was. `named` gives the steps that other tables speak of."""
        listed = source.segments(table.name)
        gone = self._open.keys() - listed.keys()
        if gone or any(listed.get(stem) != file for stem, file in self._taken.items()):  # another run's by now
            self._forget()
            self._changed = True
        number = ""
        for stem, file in sorted(listed.items()):
            if stem.partition(".")[0] != number:  # the segments of all ranks of one number were taken
                number = stem.partition(".")[0]
                self._thin(named)
            before = self._open.get(stem)
            if stem in self._taken or (before is not None and before.file == file):
                continue
            self._take(stem, source.read(file, table, before), before)
        self._thin(named)
        changed, self._changed = self._changed, False  # held until here: a file may vanish amid it, to be tried again
        return changed

    def table(self) -> pa.Table | None:
        """All rows that are held, those of open segments last; None where there are none."""
        rows = [*self._held, *(s.table for s in self._open.values() if s.table is not None)]
        if self._thinned:
            rows = [_counted(part) for part in rows]
        return pa.concat_tables(rows, promote_options="default") if rows else None

    def _take(self, stem: str, read: Segment, before: Segment | None) -> None:
        held, rows_before = self._rows.get(stem, 0), before.rows if before is not None else 0
        if not read.file.name.endswith(".parquet"):
            self._changed |= read.rows != rows_before
            if read.table is not None and read.rows > self.most // 4 and read.offset:  # it is read on from there
                self._held.append(read.table)
                self._rows[stem], read = held + read.rows, replace(read, table=None)
            self._open[stem] = read
            return
        if read.table is None or read.rows < held:  # another stream was sealed than the one that was read
            self._forget()
            raise FileNotFoundError(read.file.name)  # `retried` reads all of it once more
        rest = read.table.slice(held)  # the whole file was read where some of its rows are held
        self._changed |= rest.num_rows != rows_before
        self._held.append(rest)
        self._taken[stem] = read.file
        self._open.pop(stem, None)
        self._rows.pop(stem, None)

    def _thin(self, named: Callable[[], Collection[int]]) -> None:
        if sum(part.num_rows for part in self._held) <= self.most:
            return
        together = pa.concat_tables([_counted(part) for part in self._held], promote_options="default")
        ranks = {rank for s in self._open.values() if s.table is not None for rank in _lasts(s.table)}
        lasts = _lasts(together)
        if ranks <= lasts.keys():  # the rows of a step are thinned once those of all ranks are here
            kept, self._shift = thinned(together, self.most, named(), self._shift, min(lasts.values(), default=0))
            self._held, self._thinned = [kept], True


def _lasts(rows: pa.Table) -> dict[int, int]:
    """The last step of each rank."""
    found = rows.group_by("rank").aggregate([("step", "max")])
    lasts = dict(zip(found["rank"].to_pylist(), found["step_max"].to_pylist(), strict=True))
    return {rank: step for rank, step in lasts.items() if step is not None}


def _counted(rows: pa.Table) -> pa.Table:
    """The rows with `stands_for`, which a file has no say in."""
    if STANDS_FOR in rows.column_names:
        return rows
    return rows.append_column(STANDS_FOR, pa.repeat(pa.scalar(1, pa.int64()), rows.num_rows))
