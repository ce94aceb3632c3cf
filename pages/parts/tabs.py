"""Tabs of a long page: one subject each, the open one in the address.

number, sums = tabs.show("Number", "Sums and products", open_for={"sum": "Sums and products"})
with sums: ...
"""

from collections.abc import Mapping, Sequence

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

KEY = "section"
"""The name of the open tab in the address."""


def show(*names: str, open_for: Mapping[str, str] | None = None) -> Sequence[DeltaGenerator]:
    """A container for each tab. A link that has a parameter of `open_for` opens that tab, all others the first."""
    linked = (name for parameter, name in (open_for or {}).items() if parameter in st.query_params)
    return st.tabs(names, default=next(linked, None), key=KEY, bind="query-params")
