"""A single row is written on a faster path, with the same bytes that Arrow writes."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from amp_core.schema import TABLES, RunError
from amp_core.store.record_batch import message, record_batch

STEPS = {c.name: str(c.type) for c in TABLES["steps"].columns if c.name != "rank"}
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "int64": st.integers(-(2**63), 2**63 - 1),
    "double": st.floats() | st.integers(-(10**9), 10**9) | st.floats().map(np.float64),
    "bool": st.booleans() | st.booleans().map(np.bool_),
}
ROW = st.fixed_dictionaries(
    {"step": st.integers(0, 2**40)},
    optional={name: st.none() | VALUES[kind] for name, kind in STEPS.items() if name != "step"},
)


@given(ROW, st.integers(0, 9))
def test_a_row_of_numbers_has_the_bytes_that_arrow_writes(row: dict[str, Any], rank: int) -> None:
    columns = {name: [value] for name, value in row.items()}
    assert message("steps", columns, rank) == bytes(record_batch("steps", columns, rank).serialize())


def test_several_rows_and_strings_take_the_general_path() -> None:
    for table, columns in (
        ("steps", {"step": [1, 2], "loss": [0.5, math.nan]}),
        ("steps", {"step": np.array([1]), "loss": (0.5,)}),
        ("events", {"kind": ["skipped"], "step": [3]}),
    ):
        assert message(table, columns, 1) == bytes(record_batch(table, columns, 1).serialize())


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"step": [1], "skipped": ["yes"]}, "column 'skipped' of table 'steps' takes bool"),
        ({"step": [1.5]}, "column 'step' of table 'steps' takes int64"),
        ({"step": [1], "loss": ["much"]}, "column 'loss' of table 'steps' takes double"),
        ({"step": [2**70]}, "column 'step' of table 'steps' takes int64"),
        ({"step": [1], "los": [1.0]}, "has no column 'los'"),
        ({"step": []}, ""),
    ],
)
def test_a_value_that_does_not_fit_is_named_on_both_paths(columns: dict[str, Any], says: str) -> None:
    if not says:
        assert message("steps", columns, 0) == bytes(record_batch("steps", columns, 0).serialize())
        return
    with pytest.raises(RunError, match=says):
        message("steps", columns, 0)
