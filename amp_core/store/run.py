"""`Run`: the input of every analysis, read from a folder, a zip, or a run that is still being written.

    >>> run = load_run("runs/a")
    >>> run.head.config["precision"], run.status
    ('fp16', 'finished')
    >>> run.steps[["step", "loss", "loss_scale", "skipped"]].tail()
    >>> run.tensors(kind="weight_grad", name="blocks.0.fc.weight", steps=(100, 200))
    >>> run.refresh()          # a live run: reads only what is new
    >>> run.salvaged().damage()                     # instead of raising for a damaged table
    {'tensors': 'tensors/00000.parquet is damaged: ...'}

Frames are pandas. To distinguish null (not measured) from NaN (measured, not a number), take `run.table("steps")`, the
same rows as an Arrow table.
"""

import copy
import functools
import operator
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from amp_core.schema import KINDS, TABLES, DamageError, RunError, Table
from amp_core.store.segment_reader import File, Segment, is_ordered
from amp_core.store.sources import FolderSource, Source, ZipSource, retried
from amp_core.store.untrusted.converted_source import ConvertedSource, written_here
from amp_core.store.untrusted.sandbox import Sandbox
from amp_core.store.urls import Address, located

if TYPE_CHECKING:
    import pandas as pd

T = TypeVar("T")


FEW_ROWS = 10_000
"""Tables of at most as many rows are converted on one thread: Arrow's others took twice the processor time."""


@dataclass(frozen=True)
class _Damage:
    """A table that cannot be read."""

    sentence: str
    files: dict[str, File]
    """Its segments at that time: it is read again once they differ."""
    instead: pa.Table
    """An empty table."""


SELECTIVE_READS = 4
"""Number of selective reads by `Run.tensors` before it reads and keeps the whole table."""


def load_run(path: str | os.PathLike[str]) -> "Run":
    """Open a run folder or a packed `.zip`: a local path, or an address that fsspec knows, such as
    `s3://bucket/runs/a`.

    Raises `RunError`, and nothing else, if it is not a readable run.
    """
    if not isinstance(path, str | os.PathLike):
        raise RunError(
            f"path={path!r:.80} is not a path; give a run folder or a packed run (.zip), as a string or a Path"
        )
    where = located(path)
    if isinstance(where, Address):
        from amp_core.store.remote import open_address

        return Run(open_address(where))
    try:
        if where.is_dir():
            return Run(FolderSource(where))
        if where.is_file():
            return Run(ZipSource(where))
    except OSError as error:
        raise RunError(f"path={str(path)!r} cannot be read: {error.strerror or error}") from None
    raise RunError(f"path={str(path)!r} does not exist; give a run folder or a packed run (.zip)")


def check_run(run: object, argument: str = "run") -> None:
    """Raise `RunError` if the argument is not an opened run, e.g. the path of one."""
    if not isinstance(run, Run):
        right = f"load_run({os.fspath(run)!r})" if isinstance(run, str | os.PathLike) else "what load_run returns"
        raise RunError(f"{argument}={run!r:.80} is not an opened run; give {right}")


class Run:
    """One run: its head and its tables. A table is read at its first use, and later only as far as it has grown."""

    def __init__(self, source: "Source") -> None:
        self._source = source
        self._segments: dict[str, dict[str, Segment]] = {}
        self._tables: dict[str, pa.Table] = {}
        self._frames: dict[str, pd.DataFrame] = {}
        self._selective_reads = 0
        self._made: dict[tuple[Any, ...], tuple[list[pa.Table], Any]] = {}
        self._damaged: dict[str, _Damage] | None = None
        self.head = source.head()
        self.called: str | None = None
        """A label's name, which replaces the recorded one."""

    def __repr__(self) -> str:
        return f"Run({self.head.name!r}, {self.status}, {str(self.path)!r})"

    @property
    def path(self) -> Path | Address:
        """The folder or zip that it is read from, or the address."""
        return self._source.path

    @property
    def name(self) -> str:
        """The run's name."""
        return self.called or self.head.name or self.path.stem

    @property
    def status(self) -> str:
        """`running`, `finished`, `stopped` or `failed`; `lost` if it is `running` but its process is gone."""
        if self.head.status != "running":
            return self.head.status
        alive = self._source.alive(self.head)
        return "running" if alive else "lost"

    @property
    def is_live(self) -> bool:
        """Whether more rows may follow."""
        return self.status == "running"

    @property
    def end_reason(self) -> str | None:
        """Why it ended, in words; for a lost run, what is known, with the last lines the process printed."""
        if self.status != "lost":
            return self.head.end_reason
        lines = [line for line in self.console(5) if line.strip()]
        ending = "its process is gone without recording an end: killed, out of memory, or the machine went down"
        return f"{ending}. Last output: {' / '.join(lines)}" if lines else ending

    @property
    def steps(self) -> "pd.DataFrame":
        """One row per optimizer step attempted."""
        return self._frame("steps")

    @property
    def events(self) -> "pd.DataFrame":
        """Events, in order."""
        return self._frame("events")

    @property
    def device(self) -> "pd.DataFrame":
        """Device samples."""
        return self._frame("device")

    @property
    def memory(self) -> "pd.DataFrame":
        """Memory by category at each moment of sampled steps."""
        return self._frame("memory")

    @property
    def kernels(self) -> "pd.DataFrame":
        """Kernels of profiled windows."""
        return self._frame("kernels")

    @property
    def windows(self) -> "pd.DataFrame":
        """One row per profiled window: busy, idle and waiting time."""
        return self._frame("windows")

    @property
    def collectives(self) -> "pd.DataFrame":
        """Communication kernels of profiled windows, one row each."""
        return self._frame("collectives")

    @property
    def timeline(self) -> "pd.DataFrame":
        """Kernels, copies and fills of one profiled step, in order."""
        return self._frame("timeline")

    @property
    def ops(self) -> "pd.DataFrame":
        """Operators of traced steps."""
        return self._frame("ops")

    @property
    def audits(self) -> "pd.DataFrame":
        """Gradient audits: measured underflow."""
        return self._audits_of("weight_grad")

    @property
    def forward_audits(self) -> "pd.DataFrame":
        """How far the outputs of modules are from those in FP32, in the order of the forward: `rec.audit(…,
        forward=True)`."""
        return self._audits_of("activation")

    @property
    def compiled_audits(self) -> "pd.DataFrame":
        """How far the outputs of modules in compiled code are from those in eager mode, in the order of the forward:
        `rec.audit(…, compiled=True)`."""
        return self._audits_of("compiled")

    @property
    def updates(self) -> "pd.DataFrame":
        """The update ledger: what rounding took from updates of weights and from weight decay."""
        return self._frame("updates")

    @property
    def averages(self) -> "pd.DataFrame":
        """What rounding took from averaged 16-bit copies of the weights."""
        return self._frame("averages")

    @property
    def blocks(self) -> "pd.DataFrame":
        """Operands of linear layers by distance below the largest values of their blocks; `watch(…, blocks=True)`."""
        return self._frame("blocks")

    @property
    def quantized(self) -> "pd.DataFrame":
        """The casts to 8 and 4 bits that the training made: scales, saturation, underflow and error by operand."""
        return self._frame("quantized")

    def tensors(
        self,
        kind: str | None = None,
        name: str | None = None,
        steps: tuple[int, int] | None = None,
    ) -> "pd.DataFrame":
        """Rows of `tensors`, of one kind, one name and the steps from `steps[0]` to `steps[1]`, both included.

        `exp_counts` holds a NumPy array of int64 per row. Raises `RunError` for an unknown kind, and for `steps` that
        are not a pair of numbers.
        """
        if kind is not None and kind not in KINDS:
            raise RunError(f"kind={kind!r} is unknown; choose one of {', '.join(KINDS)}")
        pair = isinstance(steps, Sequence) and len(steps) == 2 and all(isinstance(n, Real) for n in steps)
        if steps is not None and not pair:
            raise RunError(f"steps={steps!r} is not a pair of steps; steps=(100, 200) takes steps 100 to 200")
        conditions = [
            pc.field(column) == value for column, value in (("kind", kind), ("name", name)) if value is not None
        ]
        if steps is not None:
            first, last = steps
            conditions += [pc.field("step") >= first, pc.field("step") <= last]
        if not conditions:
            table = self.table("tensors")
        else:
            table = self._matching("tensors", functools.reduce(operator.and_, conditions))
        frame: pd.DataFrame = table.to_pandas()
        return frame

    def _matching(self, name: str, where: pc.Expression) -> pa.Table:
        """Rows of a table that match; read from the files if the table is not in memory.

        After `SELECTIVE_READS` such reads more are likely, so the whole table is read.
        """
        if name not in self._tables and self._selective_reads < SELECTIVE_READS and not self._damaged:
            self._selective_reads += 1
            try:
                return retried(lambda: self._read_matching(TABLES[name], where), self.path / name)
            except DamageError as error:
                self.set_aside(name, error)
        return self.table(name).filter(where)

    def _read_matching(self, table: Table, where: pc.Expression) -> pa.Table:
        known = self._segments.get(table.name, {})
        parts = []
        for stem, file in sorted(self._source.segments(table.name).items()):
            segment = known.get(stem)
            if segment is None or segment.file != file:
                segment = self._source.read(file, table, segment, where)
            if segment.table is not None:
                parts.append(segment.table.filter(where))
        return _ordered(parts, table)

    def table(self, name: str) -> pa.Table:
        """A whole table, in which null and NaN differ; empty, with all its columns, if the run has no such rows.

        Raises `RunError` if the table is damaged or not in the schema. Of a run that is `salvaged`, a damaged table is
        empty, except `steps`, which everything else is about.
        """
        if name not in TABLES:
            raise RunError(f"table={name!r} is unknown; choose one of {', '.join(TABLES)}")
        if not self._damaged or name not in self._damaged:
            try:
                return self._table(name)
            except DamageError as error:
                self.set_aside(name, error)
        assert self._damaged is not None
        return self._damaged[name].instead

    def salvaged(self) -> "Run":
        """The same run, of which damaged tables are empty instead of raising `RunError`; `damage` names them."""
        if self._damaged is not None:
            return self
        other = copy.copy(self)
        other._damaged = {}
        return other

    def damage(self) -> dict[str, str]:
        """The damaged tables of a run that is `salvaged`, and why each cannot be read. Reads every table."""
        reasons = {name: self.damaged(name) for name in TABLES}
        return {name: reason for name, reason in reasons.items() if reason}

    def damaged(self, name: str) -> str:
        """Why a table of a run that is `salvaged` cannot be read; empty if it can."""
        if self._damaged is None:
            return ""
        self.table(name)
        return self._damaged[name].sentence if name in self._damaged else ""

    def set_aside(self, name: str, error: DamageError | str) -> None:
        """Take a table of a salvaged run for damaged. Raises `error` if the run is not salvaged, and for `steps`."""
        damage = error if isinstance(error, DamageError) else DamageError(error)
        if self._damaged is None or name == "steps":
            raise damage
        files = retried(lambda: self._source.segments(name), self.path / name)
        self._damaged[name] = _Damage(str(damage), files, TABLES[name].schema.empty_table())
        self._frames.pop(name, None)

    def _table(self, name: str) -> pa.Table:
        if name not in self._tables:
            self._tables[name] = retried(lambda: self._read(TABLES[name]), self.path / name)
        return self._tables[name]

    def of_tensor(self, kind: str, name: str, columns: Sequence[str]) -> pa.Table:
        """Rows of one tensor at every sampled step, these columns only, ordered by step."""
        chosen = (pc.field("kind") == kind) & (pc.field("name") == name)
        return self.table("tensors").filter(chosen).select(columns)

    def thinned(self, steps: Sequence[int]) -> "Run":
        """The same run with only these sampled steps in `tensors`."""
        whole = self.table("tensors")
        few = copy.copy(self)
        few._frames = {}
        few._tables = self._tables | {
            "tensors": whole.filter(pc.is_in(whole.column("step"), pa.array(steps, pa.int64())))
        }
        return few

    def cached_frame(self, names: Sequence[str], make: "Callable[..., pd.DataFrame]", *args: Any) -> "pd.DataFrame":
        """The frame `make(run, *args)`, as with `cached`; each caller gets a frame of its own, as with `steps`."""
        return self.cached(names, make, *args).copy(deep=False)

    def cached(self, names: Sequence[str], make: Callable[..., T], *args: Any) -> T:
        """`make(run, *args)`, which depends on the tables `names` alone: made once, and again when one of them changes.

        Callers share it: do not modify it.
        """
        tables, key = [self.table(name) for name in names], (make, *args)
        known = self._made.get(key)
        if known is None or any(now is not then for now, then in zip(tables, known[0], strict=True)):
            known = self._made[key] = tables, make(self, *args)
        result: T = known[1]
        return result

    def console(self, lines: int = 20) -> list[str]:
        """The last lines that the process printed, if the app or a job started it."""
        return self._source.console(lines)

    def refresh(self) -> bool:
        """Read rows that were written since the last call; True if there were any. Unchanged segments are not read
        again."""
        head = self._source.head()
        changed = head != self.head
        self.head = head
        damaged = self._damaged or {}
        for name, damage in list(damaged.items()):
            if retried(functools.partial(self._source.segments, name), self.path / name) != damage.files:
                del damaged[name]
                self._frames.pop(name, None)
                changed = True
        for name in list(self._tables):
            try:
                grown = self._read_new(TABLES[name])
            except DamageError as error:
                self.set_aside(name, error)
                grown = True
            if grown:
                del self._tables[name]
                self._frames.pop(name, None)
                changed = True
        return changed

    def plot(self, name: str, dark: bool = False) -> Any:
        """One of the app's figures, by name: `loss`, `loss_scale`, `grad_norm`, `ranges`, …; see `amp_core.notebook`.

        Raises `RunError`, with the known names, for an unknown name, and if plotly is missing.
        """
        from amp_core.notebook import plot

        return plot(self, name, dark)

    def _repr_html_(self) -> str:
        """HTML for notebooks."""
        from amp_core.notebook import run_html

        return run_html(self)

    def validate(self, full: bool = False) -> None:
        """Raise `RunError` if the run violates the schema; see `amp_core.store.untrusted.validate`.

        Reads every table; with `full`, checks every row too, as untrusted files need.
        """
        from amp_core.store.untrusted.validate import validate

        validate(self, full=full)

    def fingerprint(self) -> tuple[tuple[str, int, int], ...]:
        """Names, sizes and modification times (ns) of its files: changes whenever the run does. A key for caches."""
        return retried(self._source.fingerprint, self.path)

    def read_in_sandbox(self, sandbox: Sandbox) -> None:
        """Decode everything read from now on in `sandbox`, unless the run was written on this machine."""
        if not written_here(self.head):
            self._source = ConvertedSource(self._source, sandbox)

    # inside

    def _audits_of(self, kind: str) -> "pd.DataFrame":
        frame = self._frame("audits")
        return frame[frame["kind"] == kind].reset_index(drop=True) if len(frame) else frame

    def _frame(self, name: str) -> "pd.DataFrame":
        table = self.table(name)
        if name not in self._frames:
            self._frames[name] = table.to_pandas(use_threads=table.num_rows > FEW_ROWS)
        frame: pd.DataFrame = self._frames[name].copy(deep=False)
        return frame

    def _read(self, table: Table) -> pa.Table:
        self._read_new(table)
        return _ordered(self._parts(table), table)

    def _parts(self, table: Table) -> list[pa.Table]:
        """The segments of a table as last read."""
        return [s.table for s in self._segments.get(table.name, {}).values() if s.table is not None]

    def _read_new(self, table: Table) -> bool:
        """Bring the segments of one table up to date; True if that changed anything."""
        return retried(lambda: self._try_read_new(table), self.path / table.name)

    def _try_read_new(self, table: Table) -> bool:
        known = self._segments.get(table.name, {})
        listed = self._source.segments(table.name)
        changed = not known.keys() <= listed.keys()
        fresh: dict[str, Segment] = {}
        for stem, file in sorted(listed.items()):
            before = known.get(stem)
            if before is not None and before.file == file:
                fresh[stem] = before
                continue
            fresh[stem] = self._source.read(file, table, before)
            rows_before = before.rows if before is not None else 0
            changed = changed or fresh[stem].rows != rows_before
        self._segments[table.name] = fresh
        return changed


def _ordered(parts: list[pa.Table], table: Table) -> pa.Table:
    """The parts as one, in the order that the schema gives the table."""
    whole = pa.concat_tables(parts, promote_options="default") if parts else table.schema.empty_table()
    keys = [k for k in table.order if k in whole.column_names]
    return whole if is_ordered(whole, keys) else whole.sort_by([(k, "ascending") for k in keys])
