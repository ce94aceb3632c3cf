"""The logo above every page, and text on the primary colour that can be read in the dark theme too.

    look.begin()             # once a pass, before the page

Streamlit writes in white on the primary colour, whatever that is. In a dark theme the same colour is also that of text
on the dark background, and none is dark enough under white and light enough on nearly black (4.5 : 1 for both: WCAG
2.1, criterion 1.4.3). So where it is a background, its text is dark.
"""

from pathlib import Path

import streamlit as st

ON_PRIMARY = "#0B1214"
"""5.4 : 1 on the primary colour of the dark theme."""
WHERE = (
    'button[data-testid^="stBaseButton-primary"]:not([disabled])',
    '[data-testid="stMultiSelectTagsContainer"] [data-tag]',
)


def begin() -> None:
    """As the browser's theme needs it."""
    st.logo(Path(__file__).with_name("logo.svg"), size="large")
    if st.context.theme.type == "dark":
        inside = ", ".join(f"{one}, {one} *" for one in WHERE)
        st.html(f"<style>{inside} {{color: {ON_PRIMARY} !important}}</style>")
