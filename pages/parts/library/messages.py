"""The results of uploads and of actions on runs: kept by callbacks, shown in Library.

with messages.refusals():
    trash.delete(entry)
    messages.success("a was deleted.")
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import streamlit as st

from amp_core import RunError
from pages.parts import callbacks, words

MESSAGE_S = 10.0
SEEN_S = 1.0
"""A message that was shown for less than this when the next one comes may not have been seen."""
KEPT = "library.said"


@dataclass
class _Message:
    good: bool
    sentence: str
    run: str | None = None
    if_chosen: str = ""
    drawn: bool = False
    shown_at: float | None = None
    """When the first pass ended that drew it: the browser may not get what a pass draws that is interrupted, and a
    pass takes seconds on a busy machine."""

    def text(self) -> str:
        chosen = self.run is not None and self.run == st.session_state.get("run")
        return words.escape(self.if_chosen if chosen else self.sentence)


@contextmanager
def refusals() -> Iterator[None]:
    """Keep the sentence of a `RunError` or `OSError` that the block raises."""
    try:
        yield
    except (RunError, OSError) as error:
        _keep(_Message(False, words.sentence(error)))


def success(sentence: str, run: str | None = None, if_chosen: str = "") -> None:
    """Keep a sentence about what was done; while the run with the key `run` is the chosen one, it reads `if_chosen`."""
    _keep(_Message(True, sentence, run, if_chosen))


def show() -> None:
    """Draw each message for `MESSAGE_S`: the page may run again by itself at once."""
    now = time.monotonic()
    kept: list[_Message] = st.session_state.get(KEPT, [])
    for message in kept:
        if message.shown_at is None or now - message.shown_at < MESSAGE_S:
            message.drawn = True
            (st.success if message.good else st.error)(message.text())


def shown() -> None:
    """After a pass that was not interrupted: the browser has what it drew."""
    for message in st.session_state.get(KEPT, ()):
        if message.drawn and message.shown_at is None:
            message.shown_at = time.monotonic()


@callbacks.uninterrupted
def _keep(message: _Message) -> None:
    now, kept = time.monotonic(), callbacks.get(KEPT, [])
    unseen = [other for other in kept if other.shown_at is None or now - other.shown_at < SEEN_S]
    callbacks.put(KEPT, [*unseen, message])
