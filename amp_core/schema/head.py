"""The records of a run, with their units: the run folder's contract as code.

    >>> from amp_core.schema import TABLES
    >>> TABLES["steps"].schema.field("step_ms").type
    DataType(double)

A run folder holds `run.json` (a `Head`) and one folder of Arrow or Parquet segments per table. `TABLES` says which
columns each table has, of which type, in which unit, and what a column that is missing from a file is taken to be.
Columns beyond these are kept as they are.
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from amp_core.schema.errors import RunError
from amp_core.schema.event_kinds import EVENT_KINDS
from amp_core.schema.tables import TABLES, Column, Table

__all__ = [
    "EVENT_KINDS",
    "KINDS",
    "SCHEMA",
    "STATUSES",
    "TABLES",
    "Column",
    "Head",
    "RunError",
    "Table",
]

SCHEMA = 1
"""The version of the run folder that this code writes. Older ones are read with defaults; newer ones are refused."""

STATUSES = ("running", "finished", "stopped", "failed")
"""Values of `status` in `run.json`. A fifth, `lost`, is never written: see `Run.status`."""

KINDS = ("weight_grad", "output_grad", "activation", "weight")
"""Kinds of tensors in `tensors`."""


@dataclass(frozen=True)
class Head:
    """The content of `run.json`."""

    run_id: str
    """Unique, made by the writer."""
    name: str
    """The run's name."""
    created_at: str
    """When it began: ISO 8601, UTC."""
    status: str = "running"
    """One of `STATUSES`."""
    end_reason: str | None = None
    """Why it ended, in words."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the training and of the recording."""
    environment: Mapping[str, Any] = field(default_factory=dict)
    """Versions, devices, flags; `slurm` has `id`, `array` and `nodes` of the Slurm job, and is null outside of one."""
    model: Mapping[str, Any] = field(default_factory=dict)
    """Class, number of parameters, their bytes and dtypes; `layers` (class of each module by name), `shapes` (of each
    parameter by name) and `tied` (further names of shared parameters): they determine what autocast rounds."""
    world_size: int = 1
    """Number of processes that train together."""
    process: Mapping[str, Any] = field(default_factory=dict)
    """The writing process: machine, pid and start time. Distinguishes a live run from a lost one."""
    results: Mapping[str, Any] = field(default_factory=dict)
    """Final metrics, e.g. `eval_loss`."""
    job: Mapping[str, Any] = field(default_factory=dict)
    """How a scheduler says that the job of a run ended: `backend`, `id`, `state` and `reason` (its own words), `cause`
    (`time limit`, `memory`, `preemption`, `node failure` or another; null if the job ended by itself), `node`,
    `requested`. Empty for a run on this machine, and until the job has ended."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Fields of other writers: kept, not interpreted."""
    schema: int = SCHEMA
    """Version of the run folder."""

    def to_json(self) -> str:
        """The text of `run.json`. Floats that JSON lacks become strings (`"inf"`), so every value can be written."""
        record = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "extra"}
        return json.dumps(_plain({"schema": self.schema} | record | dict(self.extra)), indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str | bytes, where: str) -> "Head":
        """Read `run.json`; `where` names it in errors. Raises `RunError` for what is not a head this code can read."""
        try:
            record = _plain(json.loads(text))  # reject nesting too deep to be written again
        except (ValueError, RecursionError):
            raise RunError(f"{where} is not a run head: it does not hold JSON") from None
        if not isinstance(record, dict):
            raise RunError(f"{where} is not a run head: it holds a JSON {type(record).__name__}, not an object")
        schema = record.get("schema")
        if isinstance(schema, bool) or not isinstance(schema, int) or schema < 1:
            raise RunError(f"{where} has schema={schema!r:.80}; a run head gives a whole number from 1 to {SCHEMA}")
        if schema > SCHEMA:
            raise RunError(
                f"{where} has schema={schema}, which is newer than this AMPscope reads (up to {SCHEMA}); "
                "update AMPscope to open it"
            )
        known = {f.name: f for f in dataclasses.fields(cls) if f.name != "extra"}
        values: dict[str, Any] = {}
        for name, value in record.items():
            if name in known and value is not None:
                values[name] = _checked(name, value, where)
        values["extra"] = {k: v for k, v in record.items() if k not in known}
        for name in ("run_id", "name", "created_at"):
            values.setdefault(name, "")
        return cls(**values)


_MAX_PROCESSES = 100_000
"""More than any training has; readers would look for the files of each rank."""

_HEAD_TYPES: dict[str, type] = {
    "schema": int,
    "run_id": str,
    "name": str,
    "created_at": str,
    "status": str,
    "end_reason": str,
    "config": dict,
    "environment": dict,
    "model": dict,
    "world_size": int,
    "process": dict,
    "results": dict,
    "job": dict,
}


def _checked(name: str, value: Any, where: str) -> Any:
    if not isinstance(value, _HEAD_TYPES[name]) or isinstance(value, bool):  # Python counts bool among the ints
        raise RunError(f"{where} has {name}={value!r:.80}; it must be of type {_HEAD_TYPES[name].__name__}")
    if name == "status" and value not in STATUSES:
        raise RunError(f"{where} has status={value!r:.80}; it must be one of {', '.join(STATUSES)}")
    if name == "world_size" and isinstance(value, int) and value < 1:
        raise RunError(f"{where} has world_size={value}; it must be 1 or more")
    if name == "world_size" and isinstance(value, int) and value > _MAX_PROCESSES:
        raise RunError(f"{where} has world_size={value!r:.80}; it must be {_MAX_PROCESSES:,} or less")
    return value


_MAX_DEPTH = 200
"""Levels of nesting. Python's own limit is not relied on: a compiler raises it for the whole process."""


def _plain(value: Any, levels_left: int = _MAX_DEPTH) -> Any:
    """`value` as a JSON value; anything without a JSON form becomes a string. Raises `RecursionError` for what is
    nested too deep."""
    if levels_left < 0:
        raise RecursionError
    if isinstance(value, Mapping):
        return {str(k): _plain(v, levels_left - 1) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(v, levels_left - 1) for v in value]
    if isinstance(value, bool | str) or value is None:
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    return str(value)
