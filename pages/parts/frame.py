"""What stands around every page: the look, who may see it, the run picker, what can be taken away."""

import streamlit as st
from streamlit.navigation.page import StreamlitPage

from amp_core import RunError
from pages.parts import address, empty, picker, release_memory, signin, style, tables
from pages.parts.overview import report


def show(page: StreamlitPage) -> None:
    """Run the page in its frame."""
    style.begin()
    signin.require()
    picker.show()
    tables.begin()
    address.begin(page.url_path)
    notes = st.container()
    with notes:
        picker.tell(page.url_path)
    try:
        page.run()
        with st.container(horizontal=True):
            report.offer()
            tables.offer()
    except RunError as error:  # a run that cannot be read, wherever on the page that came to light
        empty.unreadable(error)
    finally:  # a page may end before its last line
        with notes:
            address.show_refused()
    release_memory.soon()
