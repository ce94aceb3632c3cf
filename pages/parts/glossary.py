"""The glossary on the pages: as tooltips, and as a list with links to the page that shows each term on the chosen run.

st.metric("Skipped steps", "40", help=glossary.tip("skipped step"))
"""

import streamlit as st

from amp_core.text.glossary import TERMS, explained
from pages.parts.overview import findings

WIDTH = 340
"""Pixels of a card: three fit side by side on a laptop."""


def tip(name: str) -> str:
    """The term's text for a tooltip."""
    return explained(name)


def show() -> None:
    """All terms, each with a link to the page that shows it on the chosen run."""
    icon = ":material/query_stats:"
    with st.container(horizontal=True, gap="small", key="glossary"):
        for term in TERMS.values():
            with st.container(border=True, width=WIDTH, height="stretch"):
                st.markdown(f"**{term.name}.** {term.text}")
                file, page = findings.PAGES[term.page]
                run = st.session_state.get("run")
                query = {"run": run} if run else None
                st.page_link(file, label=f"{page} shows {term.shows}", icon=icon, query_params=query)
