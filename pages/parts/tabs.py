"""Tabs of a long page: one subject each, the open one in the address. Only that one is computed.

tabs.show({"Number": one_number, "Sums and products": sums.show}, open_for={"sum": "Sums and products"})
"""

from collections.abc import Callable, Mapping

import streamlit as st

KEY = "section"
"""The name of the open tab in the address."""


def show(subjects: Mapping[str, Callable[[], None]], open_for: Mapping[str, str] | None = None) -> None:
    """A tab for each subject; a function draws the open one. A link that has a parameter of `open_for` opens that tab,
    all others the first."""
    linked = (name for parameter, name in (open_for or {}).items() if parameter in st.query_params)
    tabs = st.tabs(list(subjects), default=next(linked, None), key=KEY, bind="query-params")
    for tab, draw in zip(tabs, subjects.values(), strict=True):
        if tab.open:
            with tab:
                draw()
