"""Runs with any number of tensor statistics in bounded memory: an extract holds some sampled steps of `tensors`.

    >>> run = open_extract("runs/a")           # a `Run`; short ones are read whole
    >>> run.table("tensors").num_rows, run.sampled_steps
    (32000, 10000)
    >>> run.of_tensor("weight_grad", "head.weight", ["step", "absmax"]).num_rows
    10000

An extract keeps whole sampled steps of `tensors`: the first, the last, and some between them at equal distances. So
that no spike disappears, it also keeps the steps with the most infinities, NaNs, subnormal values and zeros, those with
the largest magnitude, and up to `MAX_BAD` steps with a non-finite value. The statistics in the files' footers locate
them; the rest is not read. A live run's new step costs the same however long the run is.

All other tables are whole: a million steps take 22 columns of eight bytes each.
"""

import copy
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from amp_core.store.long_runs.sealed_tensors import TENSORS, SealedTensors, refuse_null_steps
from amp_core.store.run import Run, load_run
from amp_core.store.segment_reader import File, Segment, is_ordered
from amp_core.store.sources import FolderSource, retried
from amp_core.store.untrusted.sandbox import Sandbox
from amp_core.store.urls import Address

if TYPE_CHECKING:
    import pandas as pd

MAX_ROWS = 40_000
"""Rows of `tensors` that an extract holds: a few sampled steps of the largest models, all of a short run."""

MAX_BAD = 16
"""Sampled steps with infinities or NaNs that an extract always holds, at most."""
PARALLEL_READS = 4
"""Segments that are read in parallel."""

EXTREMES = ("inf", "nan", "absmax", "subnormal", "zero")
"""Columns whose largest value is always among the rows."""


def open_extract(
    path: str | os.PathLike[str] | Address, most_rows: int = MAX_ROWS, sandbox: Sandbox | None = None
) -> Run:
    """Open a run folder in bounded memory; with `sandbox`, untrusted files cannot end this process either.

    Raises `RunError` as `load_run` does.
    """
    folder = not isinstance(path, Address) and Path(path).is_dir()
    run = Extract(Path(path), most_rows) if folder else load_run(path)
    if sandbox is not None:
        run.read_in_sandbox(sandbox)
    return run


class Extract(Run):
    """A run whose `tensors` are read in part where there are many."""

    def __init__(self, folder: Path, most_rows: int = MAX_ROWS) -> None:
        super().__init__(FolderSource(folder))
        self._folder = folder
        self._most = most_rows
        self._sealed: dict[str, SealedTensors] = {}
        self._open: dict[str, Segment] = {}
        self._steps_of: dict[str, np.ndarray] = {}
        self._kept: dict[str, tuple[set[int], pa.Table]] = {}
        self._extract: pa.Table | None = None
        self._lock = threading.RLock()
        self.sampled_steps: int | None = None
        """Number of sampled steps where `tensors` holds only some of them; None if it holds all."""

    def _table(self, name: str) -> pa.Table:
        with self._lock:
            if name != "tensors":
                return super()._table(name)
            if self._extract is None:
                self._extract = retried(self._extracted, self._folder / "tensors")
            return self._extract

    def _frame(self, name: str) -> "pd.DataFrame":
        with self._lock:
            return super()._frame(name)

    def _matching(self, name: str, where: pc.Expression) -> pa.Table:
        return self.table(name).filter(where)  # like all else here: the steps that the extract holds

    def thinned(self, steps: Sequence[int]) -> "Extract":
        """See `Run.thinned`."""
        few = super().thinned(steps)
        assert isinstance(few, Extract)  # a copy
        few._extract = few._tables["tensors"]
        return few

    def snapshot(self) -> "Extract":
        """A copy that shares the rows read so far; `refresh` of one does not change the other."""
        with self._lock:
            other = copy.copy(self)
            other._lock = threading.RLock()
            for name, value in vars(self).items():
                if isinstance(value, dict):
                    setattr(other, name, dict(value))
            return other

    def forget(self) -> None:
        """Free all rows; later requests read the files again."""
        with self._lock:
            for name, value in list(vars(self).items()):
                if isinstance(value, dict) and name != "_damaged":
                    setattr(self, name, {})
            self._extract = None

    def refresh(self) -> bool:
        with self._lock:
            return self._refresh()

    def _refresh(self) -> bool:
        before = self._extract
        files = {stem: s.file for stem, s in (self._sealed | self._open).items()}
        changed = super().refresh()
        if before is not None and retried(lambda: self._source.segments("tensors"), self._folder) != files:
            self._extract = None
            changed = changed or self.table("tensors") is not before
        return changed

    def of_tensor(self, kind: str, name: str, columns: Sequence[str]) -> pa.Table:
        """Rows of one tensor at every sampled step, these columns only, ordered by step.

        Histograms (`exp_counts`, `capped_counts`) take most of the time: leave them out where the run is large.
        """
        with self._lock:
            self.table("tensors")
            sealed, live = list(self._sealed.values()), list(self._open.values())
        chosen = (pc.field("kind") == kind) & (pc.field("name") == name)
        with ThreadPoolExecutor(PARALLEL_READS) as pool:  # decoding lets other threads run
            parts = list(pool.map(lambda s: s.of_tensor(kind, name, columns), sealed))
        parts += [s.table.filter(chosen).select(columns) for s in live if s.table is not None]
        rows = pa.concat_tables([TENSORS.schema.empty_table().select(columns), *parts], promote_options="default")
        return rows.sort_by("step") if "step" in columns else rows

    def _extracted(self) -> pa.Table:
        self._list_segments()
        rows = sum(s.rows for s in self._sealed.values()) + sum(s.rows for s in self._open.values())
        self.sampled_steps = None
        if rows <= self._most:
            return super()._table("tensors")
        for whole in (self._tables, self._frames, self._segments):
            whole.pop("tensors", None)
        steps = self._all_steps()
        self.sampled_steps = len(steps)
        table = pa.concat_tables(self._at(self._chosen(steps, rows)), promote_options="default")
        keys = list(TENSORS.order)
        return table if is_ordered(table, keys) else table.sort_by([(k, "ascending") for k in keys])

    def _list_segments(self) -> None:
        """Update the list of segments; free the rows of files that no longer exist."""
        listed = self._source.segments("tensors")
        for stem in [stem for stem in (*self._sealed, *self._open) if stem not in listed]:
            self._sealed.pop(stem, None)
            self._open.pop(stem, None)
        for stem, file in sorted(listed.items()):
            if file.name.endswith(".parquet"):
                self._take_sealed(stem, file)
            elif stem not in self._open or self._open[stem].file != file:
                read = self._source.read(file, TENSORS, self._open.get(stem))
                if read.file.name.endswith(".parquet"):  # sealed after it was listed
                    self._take_sealed(stem, read.file)
                else:
                    if read.table is not None:
                        refuse_null_steps(read.table)
                    self._open[stem] = read
        self._sealed = dict(sorted(self._sealed.items()))

    def _take_sealed(self, stem: str, file: File) -> None:
        known = self._sealed.get(stem)
        if known is None or known.file != file:
            path = self._source.content(file, TENSORS)
            assert isinstance(path, Path)  # an extract is read from a folder
            self._sealed[stem] = SealedTensors(path, file)
            self._open.pop(stem, None)
            self._kept.pop(stem, None)
            self._steps_of.pop(stem, None)

    def _all_steps(self) -> np.ndarray:
        for stem, sealed in self._sealed.items():
            if stem not in self._steps_of:
                parts = [sealed.steps(group) for group in sealed.groups]
                self._steps_of[stem] = np.concatenate([np.zeros(0), *parts])
        live = [pc.unique(s.table.column("step")).to_numpy() for s in self._open.values() if s.table is not None]
        every = np.concatenate([np.zeros(0), *(self._steps_of[stem] for stem in self._sealed), *live])
        return np.unique(every[np.isfinite(every)]).astype(np.int64)

    def _chosen(self, steps: np.ndarray, rows: int) -> np.ndarray:
        """The steps to keep. Their distance doubles as a run grows, so that most steps that were kept stay."""
        budget = max(4, self._most * len(steps) // rows)
        stride = 1 << max(0, int(np.ceil(np.log2(len(steps) / budget))))
        spaced = np.unique([int(steps[0]), int(steps[-1]), *steps[::stride].tolist()])
        firsts = np.array([g.first for s in self._sealed.values() for g in s.groups], dtype=np.int64)
        if len(firsts) >= budget:  # the first step of a group is read without the rest of it
            near = firsts[np.clip(np.searchsorted(firsts, spaced[1:-1], side="right") - 1, 0, len(firsts) - 1)]
            spaced = np.unique([spaced[0], *near.tolist(), spaced[-1]])
        return np.unique([*spaced.tolist(), *self._extreme()]).astype(np.int64)

    def _extreme(self) -> set[int]:
        """The steps at which the `EXTREMES` are largest, and up to `MAX_BAD` steps with non-finite values."""
        kept: set[int] = set()
        groups = [(s, g) for s in self._sealed.values() for g in s.groups]
        for column in EXTREMES:
            best = max(groups, key=lambda at: at[1].largest.get(column, 0.0), default=None)
            top = best[1].largest.get(column, 0.0) if best is not None else 0.0
            if best is not None and top > 0:
                steps, values = best[0].values(best[1], "step", column)
                kept.add(int(steps[np.nanargmax(values)]))
            for segment in self._open.values():
                if segment.table is not None and segment.rows:
                    values = pc.fill_null(pc.cast(segment.table.column(column), "float64", safe=False), 0.0).to_numpy()
                    if np.nanmax(values, initial=0.0) > top:
                        kept.add(int(segment.table.column("step")[int(np.nanargmax(values))].as_py()))
        nonfinite: set[int] = set()
        for column in ("inf", "nan"):
            for sealed, group in groups:
                if group.largest.get(column, 0.0) > 0 and len(nonfinite) < MAX_BAD:
                    steps, values = sealed.values(group, "step", column)
                    nonfinite.update(steps[values > 0].astype(int).tolist())
            for segment in self._open.values():
                if segment.table is not None:
                    nonfinite_rows = segment.table.filter(pc.field(column) > 0).column("step")
                    nonfinite.update(pc.unique(nonfinite_rows).to_pylist())
        every = sorted(nonfinite)
        kept.update(every[i] for i in np.linspace(0, len(every) - 1, min(MAX_BAD, len(every))).astype(int))
        return kept

    def _at(self, chosen: np.ndarray) -> list[pa.Table]:
        """The rows of the chosen steps; a sealed segment is read again only for steps that were not chosen before."""
        kept: dict[str, tuple[set[int], pa.Table]] = {}
        values = pa.array(chosen, pa.int64())
        tables = [TENSORS.schema.empty_table()]
        for stem, sealed in self._sealed.items():
            wanted = {int(s) for g in sealed.groups for s in chosen[(chosen >= g.first) & (chosen <= g.last)]}
            known, table = self._kept.get(stem, (set(), None))
            if table is None or not wanted <= known:
                known, table = wanted, sealed.at_steps(wanted)
            elif 2 * len(wanted) <= len(known):  # the distance has doubled since: free the other rows
                known, table = wanted, table.filter(pc.is_in(table.column("step"), values))
            kept[stem] = known, table
            # Usually only the last step has changed: most requests return the same rows.
            tables.append(table if known == wanted else table.filter(pc.is_in(table.column("step"), values)))
        self._kept = kept
        live = [s.table for s in self._open.values() if s.table is not None]
        return tables + [table.filter(pc.is_in(table.column("step"), values)) for table in live]
