"""The section of a page that sets the shown run beside the baseline of the bar."""

import streamlit as st

from amp_core import Run
from pages.parts import baseline


def pick(run: Run, key: str) -> Run | None:  # noqa: ARG001 - the bar has the picker since it holds for every page
    """The baseline of the bar, below a heading; None without one."""
    chosen = baseline.run()
    if chosen is not None:
        st.header("Beside the baseline", anchor=False)
    return chosen
