"""One sealed segment of `tensors`, read in parts: its statistics, single steps, single tensors.

>>> sealed = SealedTensors(path, file)
>>> sealed.rows, sealed.groups[0].first, sealed.groups[0].last        # from the footer alone
(45000, 0, 440)
>>> sealed.at_steps([0, 440]).num_rows
2000
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from amp_core.schema import TABLES, RunError
from amp_core.store.segment_reader import DamageAsRunError, File, conform

TENSORS = TABLES["tensors"]
_FIRST_BATCH_ROWS, _BATCH_ROWS = 2048, 16_384


@dataclass(frozen=True)
class Group:
    """A row group: its first and last step, and the largest value of each column that has statistics."""

    index: int
    first: int
    last: int
    largest: dict[str, float]


class SealedTensors:
    """A Parquet file of `tensors` whose footer was read. Raises `RunError` if it is damaged."""

    def __init__(self, path: Path, file: File) -> None:
        import pyarrow.dataset  # imported here: runs without a sealed segment save 40 ms
        from pyarrow.fs import LocalFileSystem

        self.file = file
        self._path = str(path)
        names = pyarrow.dataset.ParquetReadOptions(dictionary_columns={"name", "kind"})  # compared as numbers
        reading = pyarrow.dataset.ParquetFileFormat(read_options=names)
        self._fragment = reading.make_fragment(self._path, LocalFileSystem())
        with DamageAsRunError(file.name):
            self._metadata: pq.FileMetaData = self._fragment.metadata
            self._columns: list[str] = self._fragment.physical_schema.names
            if "step" not in self._columns:
                raise RunError(f"{file.name} has no column 'step'; each row of 'tensors' needs it")
            self.rows: int = self._metadata.num_rows
            self.groups = [self._group(i) for i in range(self._metadata.num_row_groups)]

    def steps(self, group: Group) -> np.ndarray:
        """The steps of a row group, each once, in order."""
        return np.unique(self.values(group, "step")[0])

    def values(self, group: Group, *columns: str) -> list[np.ndarray]:
        """Some columns of a row group, as float64; null values and missing columns are NaN."""
        there = [c for c in columns if c in self._columns]
        with DamageAsRunError(self.file.name):
            table = self._fragment.subset(row_group_ids=[group.index]).to_table(columns=there, use_threads=False)
        refuse_null_steps(table)
        empty = np.full(table.num_rows, np.nan)
        return [pc.cast(table.column(c), pa.float64(), safe=False).to_numpy() if c in there else empty for c in columns]

    def at_steps(self, steps: Collection[int]) -> pa.Table:
        """All rows of these steps, with the promised columns."""
        parts = [TENSORS.schema.empty_table()]
        for group in self.groups:
            wanted = [s for s in steps if group.first <= s <= group.last]
            if wanted:
                with DamageAsRunError(self.file.name):
                    parts.append(self._conformed(self._rows(group, wanted)))
        return pa.concat_tables(parts, promote_options="default").combine_chunks()

    def of_tensor(self, kind: str, name: str, columns: Sequence[str]) -> pa.Table:
        """The rows of one tensor, these columns only."""
        where = pc.scalar(True)
        for column, value in (("kind", kind), ("name", name)):
            if column in self._columns:
                where &= pc.field(column) == value
            elif value != next(c.default for c in TENSORS.columns if c.name == column):
                return TENSORS.schema.empty_table().select(columns)
        needed = [c for c in self._columns if c in {"step", "kind", "name", *columns}]
        with DamageAsRunError(self.file.name):
            rows = self._fragment.to_table(columns=needed, filter=where, use_threads=False)
            return self._conformed(rows).select(columns)

    def _rows(self, group: Group, wanted: list[int]) -> pa.Table:
        """Yield rows in small batches, so that a group of any size takes little memory."""
        file, chosen, parts = pq.ParquetFile(self._path, metadata=self._metadata), pa.array(wanted, pa.int64()), []
        first_only = wanted == [group.first] and group.first < group.last  # callers may stop reading after it
        size = _FIRST_BATCH_ROWS if first_only else _BATCH_ROWS
        for batch in file.iter_batches(size, row_groups=[group.index], use_threads=False):
            parts.append(batch.filter(pc.is_in(pc.cast(batch.column("step"), pa.int64()), chosen)))
            if first_only and pc.min(batch.column("step")).as_py() > group.first:
                break
        return pa.Table.from_batches(parts, file.schema_arrow)

    def _conformed(self, rows: pa.Table) -> pa.Table:
        rows.validate(full=True)  # text that is not UTF-8 would fail later, where it is shown
        return conform(rows, TENSORS, self.file.name)

    def _group(self, index: int) -> Group:
        meta = self._metadata.row_group(index)
        largest: dict[str, float] = {}
        ends = None
        for i in range(meta.num_columns):
            column = meta.column(i)
            statistics = column.statistics
            if statistics is None or not statistics.has_min_max or not isinstance(statistics.max, int | float):
                continue
            largest[column.path_in_schema] = float(statistics.max)
            if column.path_in_schema == "step":
                ends = int(statistics.min), int(statistics.max)
        if ends is None:  # another writer left the statistics out
            steps = self.values(Group(index, 0, 0, {}), "step")[0]
            ends = (int(steps.min()), int(steps.max())) if len(steps) else (0, 0)
        return Group(index, *ends, largest)


def refuse_null_steps(table: pa.Table) -> None:
    """Raise `RunError` if rows have no step number."""
    if "step" in table.column_names and table.column("step").null_count:
        raise RunError("tensors has rows without 'step'; every row needs it")
