"""The frame of every page: style, sign-in, the bar with run, baseline and steps, downloads."""

import streamlit as st
from streamlit.navigation.page import StreamlitPage
from streamlit.runtime.scriptrunner import RerunException

from amp_core import RunError
from pages.parts import address, bar, callbacks, charts, empty, picker, release_memory, signin, spellings, style, tables
from pages.parts.library import messages
from pages.parts.overview import report


def show(page: StreamlitPage) -> None:
    """Run the page in its frame."""
    style.begin()
    signin.require()
    at = spellings.address(page)
    address.begin(at)
    bar.show(page)
    tables.begin()
    charts.begin()
    callbacks.show_toasts()
    notes, interrupted = st.container(), False
    with notes:
        spellings.show_unknown(page)
        picker.show_missing(at)
    try:
        page.run()
        with st.container(horizontal=True):
            report.offer()
            tables.offer()
    except RunError as error:  # a run that cannot be read, wherever the page noticed it
        empty.unreadable(error)
    except RerunException:
        interrupted = True
        raise
    finally:  # a page may stop early
        with notes:
            address.show_refused()
        if not interrupted:
            callbacks.toasts_shown()
            messages.shown()
    release_memory.collect_soon()
