"""One sealed segment of `tensors`, read in parts: what its statistics tell, single steps, single tensors.

>>> sealed = Sealed(run.path, file)
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
from amp_core.store.segment_reader import File, conform, first_line

TENSORS = TABLES["tensors"]
_BATCH, _BATCHES = 2048, 16_384


@dataclass(frozen=True)
class Group:
    """A row group: its first and last step, and the largest value of each column whose statistics tell it."""

    index: int
    first: int
    last: int
    largest: dict[str, float]
    same: dict[str, int | str]
    """Columns of whole numbers or text whose value is the same in all rows: nothing of them needs to be decoded."""


class SealedTensors:
    """A Parquet file of `tensors` whose footer was read. Raises `RunError` where it is damaged."""

    def __init__(self, folder: Path, file: File) -> None:
        self.file = file
        self._path = str(folder / file.name)
        with Reading(file):
            opened = pq.ParquetFile(self._path)
            self._metadata: pq.FileMetaData = opened.metadata
            self._columns: list[str] = opened.schema_arrow.names
            if "step" not in self._columns:
                raise RunError(f"{file.name} has no column 'step'; each row of 'tensors' needs it")
            self.rows: int = self._metadata.num_rows
            self.groups = [self._group(i) for i in range(self._metadata.num_row_groups)]

    def steps(self, group: Group) -> np.ndarray:
        """The steps of a row group, each once, in order."""
        return np.unique(self.values(group, "step")[0])

    def values(self, group: Group, *columns: str) -> list[np.ndarray]:
        """Some columns of a row group, as float64; null, and a column that is not there, as NaN."""
        there = [c for c in columns if c in self._columns]
        with Reading(self.file):
            found = self._opened().read_row_group(group.index, columns=there, use_threads=False)
        refuse_null_steps(found)
        empty = np.full(found.num_rows, np.nan)
        return [pc.cast(found.column(c), pa.float64(), safe=False).to_numpy() if c in there else empty for c in columns]

    def at_steps(self, steps: Collection[int]) -> pa.Table:
        """All rows of these steps, with the promised columns."""
        parts = [TENSORS.schema.empty_table()]
        for group in self.groups:
            wanted = [s for s in steps if group.first <= s <= group.last]
            if wanted:
                with Reading(self.file):
                    parts.append(self._conformed(self._rows(group, wanted)))
        return pa.concat_tables(parts, promote_options="default").combine_chunks()

    def of_tensor(self, kind: str, name: str, columns: Sequence[str]) -> pa.Table:
        """The rows of one tensor, these columns only."""
        asked = [c for c in self._columns if c in {"step", *columns} - {"name", "kind"}]
        told: list[str] = [c for c in ("name", "kind") if c in self._columns]
        parts = [TENSORS.schema.empty_table()]
        for group in self.groups:
            with Reading(self.file):
                file = self._opened(coded=told)
                keys = file.read_row_group(group.index, columns=told, use_threads=False)
                rows = np.flatnonzero(_equal(keys, "name", name) & _equal(keys, "kind", kind))
                if len(rows):
                    needed = [c for c in asked if c == "step" or c not in group.same]
                    found = file.read_row_group(group.index, columns=needed, use_threads=False).take(pa.array(rows))
                    known = {c: v for c, v in group.same.items() if c in asked and c not in needed}
                    for column, value in ({"name": name, "kind": kind} | known).items():
                        found = found.append_column(column, pa.repeat(value, len(rows)))
                    parts.append(self._conformed(found))
        return pa.concat_tables(parts, promote_options="default").select(columns)

    def _rows(self, group: Group, wanted: list[int]) -> pa.Table:
        """Some rows at a time, so that a group of any size takes little memory."""
        file, chosen, parts = self._opened(), pa.array(wanted, pa.int64()), []
        at_first = wanted == [group.first] and group.first < group.last  # reading may stop behind it
        size = _BATCH if at_first else _BATCHES
        for batch in file.iter_batches(size, row_groups=[group.index], use_threads=False):
            parts.append(batch.filter(pc.is_in(pc.cast(batch.column("step"), pa.int64()), chosen)))
            if at_first and pc.min(batch.column("step")).as_py() > group.first:
                break
        return pa.Table.from_batches(parts, file.schema_arrow)

    def _conformed(self, found: pa.Table) -> pa.Table:
        found.validate(full=True)  # text that is no UTF-8 would fail later, in whoever shows it
        return conform(found, TENSORS, self.file.name)

    def _group(self, index: int) -> Group:
        meta = self._metadata.row_group(index)
        largest: dict[str, float] = {}
        same: dict[str, int | str] = {}
        ends = None
        for i in range(meta.num_columns):
            column = meta.column(i)
            told = column.statistics
            if told is None or not told.has_min_max:
                continue
            name, low, high = column.path_in_schema, told.min, told.max
            if isinstance(high, int | float):
                largest[name] = float(high)
                if name == "step":
                    ends = int(low), int(high)
            if type(high) in (int, str) and low == high and told.has_null_count and told.null_count == 0:
                same[name] = high  # of floats they leave NaN out
        if ends is None:  # another writer left the statistics out
            steps = self._opened().read_row_group(index, columns=["step"]).column("step")
            ends = int(pc.min(steps).as_py() or 0), int(pc.max(steps).as_py() or 0)
        return Group(index, *ends, largest, same)

    def _opened(self, coded: list[str] | None = None) -> pq.ParquetFile:
        return pq.ParquetFile(self._path, metadata=self._metadata, read_dictionary=coded)


def refuse_null_steps(table: pa.Table) -> None:
    """Raise `RunError` where rows do not say of which step they are."""
    if "step" in table.column_names and table.column("step").null_count:
        raise RunError("tensors has rows without 'step'; every row needs it")


class Reading:
    """What reading a damaged file raises, as a `RunError`; that a file is gone passes through."""

    def __init__(self, file: File) -> None:
        self._file = file

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, FileNotFoundError | RunError):
            return
        if isinstance(error, pa.ArrowException | OSError | ValueError | TypeError):
            raise RunError(f"{self._file.name} is damaged: {first_line(error)}") from None


def _equal(keys: pa.Table, column: str, value: str) -> np.ndarray:
    """For each row whether `column`, read as a dictionary, is `value`; a column that is not there has its default."""
    if column not in keys.column_names:
        default = next(c.default for c in TENSORS.columns if c.name == column)
        return np.full(keys.num_rows, default == value)
    same = [
        pc.equal(chunk, value) if not pa.types.is_dictionary(chunk.type) else _coded_equal(chunk, value)
        for chunk in keys.column(column).chunks
    ]
    return np.concatenate([pc.fill_null(s, False).to_numpy(zero_copy_only=False) for s in same] or [np.zeros(0, bool)])


def _coded_equal(chunk: pa.DictionaryArray, value: str) -> pa.Array:
    code = pc.index(chunk.dictionary, value).as_py()
    return pc.equal(chunk.indices, code)
