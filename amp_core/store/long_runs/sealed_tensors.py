"""One sealed segment of `tensors`, read in parts: its statistics, single steps, single tensors.

>>> sealed = SealedTensors(path, file)
>>> sealed.rows, sealed.groups[0].first, sealed.groups[0].last        # from the footer alone
(45000, 0, 440)
>>> sealed.at_steps([0, 440]).num_rows
2000
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from amp_core.schema import TABLES, DamageError
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
    constant: dict[str, int | str]
    """Columns of integers or text with one value in all rows: they need not be decoded."""


class SealedTensors:
    """A Parquet file of `tensors` whose footer was read. Raises `DamageError` if it is damaged."""

    def __init__(self, path: Path, file: File) -> None:
        self.file = file
        self._path = str(path)
        with DamageAsRunError(file.name), pq.ParquetFile(self._path) as opened:
            self._metadata: pq.FileMetaData = opened.metadata
            self._columns: list[str] = opened.schema_arrow.names
            if "step" not in self._columns:
                raise DamageError(f"{file.name} has no column 'step'; each row of 'tensors' needs it")
            self.rows: int = self._metadata.num_rows
            self.groups = [self._group(i) for i in range(self._metadata.num_row_groups)]

    def steps(self, group: Group) -> np.ndarray:
        """The steps of a row group, each once, in order."""
        return np.unique(self.values(group, "step")[0])

    def values(self, group: Group, *columns: str) -> list[np.ndarray]:
        """Some columns of a row group, as float64; null values and missing columns are NaN."""
        there = [c for c in columns if c in self._columns]
        with DamageAsRunError(self.file.name):
            file = pq.ParquetFile(self._path, metadata=self._metadata)
            table = file.read_row_group(group.index, columns=there, use_threads=False)
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
        keys = {"kind": kind, "name": name}
        defaults = {c.name: c.default for c in TENSORS.columns}
        parts = [TENSORS.schema.empty_table()]
        if all(c in self._columns or value == defaults[c] for c, value in keys.items()):
            with DamageAsRunError(self.file.name):
                parts += self._matching_rows({c: keys[c] for c in keys if c in self._columns}, {"step", *columns})
        return pa.concat_tables(parts, promote_options="default").select(columns)

    def _matching_rows(self, keys: dict[str, str], columns: set[str]) -> Iterator[pa.Table]:
        """For each group with such rows the rows in which text columns have these values, with some other columns."""
        file = pq.ParquetFile(self._path, metadata=self._metadata, read_dictionary=list(keys))
        others = [c for c in self._columns if c in columns and c not in keys]
        for group in self.groups:
            matches = np.full(self._metadata.row_group(group.index).num_rows, True)
            table = file.read_row_group(group.index, columns=list(keys), use_threads=False)
            for key, value in keys.items():
                matches &= np.concatenate([np.zeros(0, bool), *(_equal(c, value) for c in table.column(key).chunks)])
            rows = pa.array(np.flatnonzero(matches))
            if len(rows):
                needed = [c for c in others if c not in group.constant]
                table = file.read_row_group(group.index, columns=needed, use_threads=False).take(rows)
                for column, constant in (group.constant | keys).items():
                    if column in columns or column in keys:
                        table = table.append_column(column, pa.repeat(constant, len(rows)))
                yield self._conformed(table)

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
        constant: dict[str, int | str] = {}
        ends = None
        for i in range(meta.num_columns):
            column = meta.column(i)
            statistics = column.statistics
            if statistics is None or not statistics.has_min_max:
                continue
            name, low, high = column.path_in_schema, statistics.min, statistics.max
            if isinstance(high, int | float):
                largest[name] = float(high)
                if name == "step":
                    ends = int(low), int(high)
                    continue
            # Not of floating-point numbers: their statistics leave NaN out.
            if type(high) in (int, str) and low == high and statistics.has_null_count and not statistics.null_count:
                constant[name] = high
        if ends is None:  # another writer left the statistics out
            steps = self.values(Group(index, 0, 0, {}, {}), "step")[0]
            ends = (int(steps.min()), int(steps.max())) if len(steps) else (0, 0)
        return Group(index, *ends, largest, constant)


def _equal(chunk: pa.Array, value: str) -> np.ndarray:
    """For each row whether it is `value`, not if it is null; dictionaries are compared once per entry."""
    if isinstance(chunk, pa.DictionaryArray):
        equal = pc.equal(chunk.dictionary, value).take(chunk.indices)
    else:
        equal = pc.equal(chunk, value)
    return np.asarray(pc.fill_null(equal, False).to_numpy(zero_copy_only=False))


def refuse_null_steps(table: pa.Table) -> None:
    """Raise `DamageError` if rows have no step number."""
    if "step" in table.column_names and table.column("step").null_count:
        raise DamageError("tensors has rows without 'step'; every row needs it")
