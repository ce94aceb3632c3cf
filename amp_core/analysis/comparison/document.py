"""Comparisons as plain documents: `ampscope compare --json` and assistants give the same.

comparison_document(compare(runs))["answers"]     # {'bf16': '1.8 × as fast …'}
"""

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd

from amp_core.analysis.comparison.compare import Comparison
from amp_core.analysis.comparison.divergence import FirstDifference
from amp_core.analysis.comparison.trace_change import TraceChange
from amp_core.schema.documents import versioned


def comparison_document(comparison: Comparison) -> dict[str, Any]:
    """What `compare` found, as values that JSON can hold.

    Keys: schema, baseline (label of the first run), answers and parity (as in `Comparison`), recipes, runs and
    differences (rows of its tables, NaN as null and infinities as text), notes.
    """
    runs = rows(comparison.table)
    return versioned(
        {
            "baseline": runs[0]["run"],
            "answers": dict(comparison.answers),
            "parity": dict(comparison.parity),
            "recipes": rows(comparison.recipes),
            "runs": runs,
            "differences": rows(comparison.differences),
            "notes": list(comparison.notes),
        }
    )


def difference_document(where: FirstDifference) -> dict[str, Any]:
    """Where two runs part: schema, sentence, the fields of `FirstDifference`, and its table as `tensors`."""
    fields = {name: plain(value) for name, value in vars(where).items() if name != "table"}
    return versioned({"sentence": where.sentence, **fields, "tensors": rows(where.table)})


def trace_document(change: TraceChange, tables: Mapping[str, pd.DataFrame]) -> dict[str, Any]:
    """How two traces differ: schema, sentences, the fields of `TraceChange`, and `tables` by their names."""
    fields = {name: plain(value) for name, value in vars(change).items() if name not in ("parts", "notes")}
    parts = {"parts": rows(change.parts)} | {name: rows(table) for name, table in tables.items()}
    return versioned({"sentences": list(change.sentences), **fields, **parts, "notes": list(change.notes)})


def rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows of a table as plain values: missing ones as None, infinities as text."""
    known = frame.astype(object).where(frame.notna(), None)
    return [{str(key): plain(value) for key, value in row.items()} for row in known.to_dict("records")]


def plain(value: Any) -> Any:
    """A scalar as Python's own; NaN and infinities as text."""
    value = value.item() if hasattr(value, "item") else value
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
