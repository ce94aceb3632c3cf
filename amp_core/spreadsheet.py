"""Frames as CSV that a spreadsheet may open: names come from strangers' models, and it would compute what looks like a
formula.

    >>> as_csv(pd.DataFrame({"name": ["=1+1", "w"], "loss": [-0.5, None]}))
    b"name,loss\\n'=1+1,-0.5\\nw,\\n"

What begins as a formula does (OWASP, "CSV Injection") is given an apostrophe before it, which makes it text there.
"""

from typing import Any

import pandas as pd

BEGINNINGS = ("=", "+", "-", "@", "\t", "\r", "\n")


def as_csv(frame: pd.DataFrame) -> bytes:
    """UTF-8 with a header; what was not measured is an empty cell."""
    plain = pd.DataFrame(
        {i: frame.iloc[:, i].map(harmless) if _may_hold_text(frame.iloc[:, i]) else frame.iloc[:, i]
         for i in range(frame.shape[1])},
        index=frame.index,
    )  # fmt: skip
    plain.columns = pd.Index([harmless(str(name)) for name in frame.columns])
    return plain.to_csv(index=False).encode("utf-8", "replace")


def harmless(value: Any) -> Any:
    """Text that no spreadsheet takes for a formula; numbers, and text that is one, stay as they are."""
    if not isinstance(value, str) or not value.startswith(BEGINNINGS):
        return value
    try:
        float(value)
    except ValueError:
        return f"'{value}"
    return value


def _may_hold_text(column: pd.Series) -> bool:
    return not (pd.api.types.is_numeric_dtype(column) or pd.api.types.is_datetime64_any_dtype(column))
