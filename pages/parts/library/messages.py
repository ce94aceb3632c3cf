"""The result of an upload or of an action on a run: kept by callbacks, shown at the top of Library.

with messages.refusals():
    trash.delete(entry)
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import streamlit as st

from amp_core import RunError
from pages.parts import words

MESSAGE_S = 10.0


@contextmanager
def refusals() -> Iterator[None]:
    """Keep the sentence of a `RunError` or `OSError` that the block raises: a callback cannot draw on the page."""
    try:
        yield
    except (RunError, OSError) as error:
        st.session_state["library.said"] = ("error", words.sentence(error))


def success(sentence: str) -> None:
    """Keep a sentence about what was done."""
    st.session_state["library.said"] = ("success", sentence)


def show() -> None:
    """Draw the last message, for `MESSAGE_S`: the page may run again by itself at once."""
    message = st.session_state.get("library.said")
    shown_message, since = st.session_state.get("library.told", (None, 0.0))
    if message is not None and message is not shown_message:
        since = time.monotonic()
        st.session_state["library.told"] = (message, since)
    if message is not None and time.monotonic() - since < MESSAGE_S:
        kind, sentence = message
        (st.success if kind == "success" else st.error)(words.escape(sentence))
