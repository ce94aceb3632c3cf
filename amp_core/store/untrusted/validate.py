"""Validate a run: check every row against the schema.

    >>> load_run("upload.zip").validate(full=True)      # raises RunError with one sentence, or returns

A run that passes can be drawn: counts are counts, the five classes add up, histograms fit their range.
"""

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from amp_core.schema import KINDS, TABLES, DamageError

if TYPE_CHECKING:
    from amp_core.store.run import Run

MAX_TEXT = 100_000
"""Longest text in one cell: a traceback is a few thousand characters."""
MAX_BINS = 4096
"""Longest exponent histogram: float64 has 2,098 exponents."""
MAX_COUNT = 2**53
"""Largest count: up to there a float64 holds each."""
EXPONENTS = (-1100, 1100)
"""No format of torch has exponents beyond these."""

_COUNTS = ("zero", "subnormal", "normal", "inf", "nan")
_ANY_SIGN = frozenset(
    {"loss", "lr", "exp_min", "capped_min", "temperature_c", "time_s", "cosine", "value", "loss_change"}
)
"""Columns of numbers that may be negative; all others are counts, durations, magnitudes and shares. `value` of an event
may be any constant of a model: masks add -1e9."""
_ROUNDING = 1e-6


def validate(run: "Run", full: bool = False) -> None:
    """Raise `RunError` for the first error. Without `full` only types and columns are checked.

    Of a run that is `salvaged`, tables with errors are set aside; only `steps` raises.
    """
    for name in TABLES:
        table = run.table(name)
        if not full:
            continue
        try:
            _check_rows(name, table)
            if name == "tensors":
                _check_tensors(table)
        except DamageError as error:
            run.set_aside(name, error)


def _check_rows(name: str, table: pa.Table) -> None:
    for column in TABLES[name].columns:
        values = table.column(column.name)
        if column.required and values.null_count:
            raise DamageError(f"{name} has rows without {column.name!r}; every row needs it")
        if values.null_count == len(values):  # as most columns of most tables
            continue
        if pa.types.is_string(column.type):
            _check_text(name, column.name, values)
        elif column.type in (pa.int64(), pa.float64()) and column.name not in _ANY_SIGN:
            _check_number(name, column.name, values)


def _check_number(table: str, column: str, values: pa.ChunkedArray) -> None:
    lowest, highest = pc.min_max(values).as_py().values()  # NaN only if there is nothing else
    if lowest < 0:
        raise DamageError(f"{table} has a negative {column!r}; it counts from 0")
    if pa.types.is_integer(values.type) and highest > MAX_COUNT:
        raise DamageError(f"{table} has {column!r} above 2^53, beyond anything that training counts")
    if column.endswith("_frac") and highest > 1 + _ROUNDING:
        raise DamageError(f"{table} has {column!r} above 1; it is a fraction from 0 to 1")


def _check_text(table: str, column: str, values: pa.ChunkedArray) -> None:
    try:
        longest = pc.max(pc.utf8_length(values)).as_py()
    except pa.ArrowInvalid:
        raise DamageError(f"{table} has text in {column!r} that is not UTF-8") from None
    if longest is not None and longest > MAX_TEXT:
        raise DamageError(f"{table} has a text of {longest} characters in {column!r}; at most {MAX_TEXT} are read")


def _check_tensors(table: pa.Table) -> None:
    unknown = set(pc.unique(table.column("kind")).to_pylist()) - set(KINDS)
    if unknown:
        raise DamageError(
            f"tensors has kind={sorted(map(str, unknown))[0]!r:.80}; it must be one of {', '.join(KINDS)}"
        )
    if not table.num_rows:
        return
    counts = [table.column(c) for c in ("numel", *_COUNTS)]
    whole = pc.and_(pc.is_valid(counts[0]), pc.is_valid(counts[1]))
    for column in counts[2:]:
        whole = pc.and_(whole, pc.is_valid(column))
    some = table.filter(whole)
    numel, *classes = (some.column(c).to_numpy() for c in ("numel", *_COUNTS))
    wrong = np.flatnonzero(numel != sum(classes)) if len(numel) else np.array([])
    if len(wrong):
        row = some.slice(int(wrong[0]), 1).to_pylist()[0]
        raise DamageError(
            f"tensors row step={row['step']} name={row['name']!r:.80} has counts that add up to "
            f"{sum(row[c] for c in _COUNTS)} instead of numel={row['numel']}"
        )
    _check_histograms(table, "exp_min", "exp_counts")
    _check_histograms(table, "capped_min", "capped_counts")


def _check_histograms(table: pa.Table, first: str, column: str) -> None:
    low, high = pc.min(table.column(first)).as_py(), pc.max(table.column(first)).as_py()
    if low is not None and (low < EXPONENTS[0] or high > EXPONENTS[1]):
        raise DamageError(
            f"tensors has {first}={low if low < EXPONENTS[0] else high}; exponents run from -1100 to 1100"
        )
    histograms = table.column(column).combine_chunks()
    longest = pc.max(pc.list_value_length(histograms)).as_py()
    if longest is not None and longest > MAX_BINS:
        raise DamageError(f"tensors has an exponent histogram of {longest} bins; at most {MAX_BINS} are read")
    if pc.any(pc.less(pc.list_flatten(histograms), 0)).as_py():
        raise DamageError(f"tensors has a negative count in {column}; it counts from 0")
