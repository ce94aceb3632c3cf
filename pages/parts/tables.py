"""Tables on the pages, each to be had as CSV and as Parquet.

    tables.show(frame, column_config=COLUMNS, hide_index=True, alt="Memory by category.")

`show` is `st.dataframe` and remembers what it showed; at the end of a page `offer` puts one button below it with both
files for each table. A table is named by its text alternative.
"""

import io
import re
from typing import Any

import pandas as pd
import streamlit as st

_SHOWN = "tables.shown"


def begin() -> None:
    """Forget the tables of the page before."""
    st.session_state[_SHOWN] = {}


def show(frame: pd.DataFrame, *, alt: str, **options: Any) -> Any:
    """Show `frame` and remember it; `options` are those of `st.dataframe`, whose answer is given back."""
    st.session_state.setdefault(_SHOWN, {})[alt] = frame
    return st.dataframe(frame, alt=alt, **options)


def offer() -> None:
    """A button that opens the list of the page's tables, each with its two files; nothing where there is no table."""
    shown: dict[str, pd.DataFrame] = st.session_state.get(_SHOWN, {})
    if not shown:
        return
    with st.popover("Tables", icon=":material/table:", help="This page's tables as CSV and Parquet"):
        for alt, frame in shown.items():
            with st.container(horizontal=True, vertical_alignment="center"):
                st.markdown(alt.rstrip("."), width="stretch")
                for kind, make in (("CSV", as_csv), ("Parquet", as_parquet)):
                    st.download_button(
                        kind,
                        lambda make=make, frame=frame: make(frame),
                        f"{file_name(alt)}.{kind.lower()}",
                        key=f"tables.{kind}.{alt}",
                        on_click="ignore",
                    )


def file_name(alt: str) -> str:
    """A file's name from a table's text alternative."""
    return re.sub(r"[^a-z0-9]+", "-", alt.lower()).strip("-")[:60] or "table"


def as_csv(frame: pd.DataFrame) -> bytes:
    """UTF-8 with a header; what was not measured is an empty cell."""
    return frame.to_csv(index=False).encode()


def as_parquet(frame: pd.DataFrame) -> bytes:
    """The frame with its types; a column that mixes types becomes text."""
    plain = frame.reset_index(drop=True)
    plain.columns = [str(column) for column in plain.columns]
    mixed = [c for c in plain if plain[c].dtype == object and plain[c].dropna().map(type).nunique() > 1]
    out = io.BytesIO()
    plain.astype(dict.fromkeys(mixed, "str")).to_parquet(out, index=False)
    return out.getvalue()
