"""The run folder's contract as code: the head, the tables with their units, the kinds of events, `RunError`.

    >>> from amp_core.schema import TABLES
    >>> TABLES["steps"].schema.field("step_ms").type
    DataType(double)

A run folder holds `run.json` (a `Head`) and one folder of Arrow or Parquet segments per table. `TABLES` says which
columns each table has, of which type, in which unit, and what a missing column defaults to. Columns beyond these are
kept as they are. Everything above imports this package; it imports nothing of AMPscope.
"""

from amp_core.schema.errors import DamageError, RunError
from amp_core.schema.event_kinds import EVENT_KINDS
from amp_core.schema.head import KINDS, SCHEMA, STATUSES, Head
from amp_core.schema.tables import TABLES, Column, Table

__all__ = ["EVENT_KINDS", "KINDS", "SCHEMA", "STATUSES", "TABLES", "Column", "DamageError", "Head", "RunError", "Table"]
