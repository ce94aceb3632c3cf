"""Callbacks that end what they have begun.

    @callbacks.uninterrupted
    def delete_run(entry):
        callbacks.put("undo", trash.delete(entry))

When the browser asks for another pass, Streamlit ends the one under way at the next access to the session state and
when something is drawn; in a callback too, which is not called again. A deleted run would have no Undo, an upload no
answer. In an `uninterrupted` callback the next pass begins at the end of the callback. A `toast` is kept until a pass
that showed it has ended.
"""

import functools
import threading
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import streamlit as st
from streamlit.runtime.scriptrunner import RerunException

P = ParamSpec("P")
T = TypeVar("T")

TOASTS = "callbacks.toasts"


class _Held(threading.local):
    depth = 0
    interruption: RerunException | None = None


_held = _Held()


def uninterrupted(callback: Callable[P, None]) -> Callable[P, None]:
    """A callback that ends first; it uses Streamlit through `do` and `put` alone."""

    @functools.wraps(callback)
    def whole(*arguments: P.args, **options: P.kwargs) -> None:
        _held.depth += 1
        try:
            callback(*arguments, **options)
        finally:
            _held.depth -= 1
            interruption = _held.interruption
            if not _held.depth:
                _held.interruption = None
        if not _held.depth and interruption is not None:
            raise interruption

    return whole


def do(function: Callable[..., T], *arguments: Any, **options: Any) -> T:
    """Call a function of Streamlit's, again if it was interrupted: an interruption comes before its effect."""
    while True:
        try:
            return function(*arguments, **options)
        except RerunException as interruption:
            _held.interruption = interruption


def get(key: str, default: object = None) -> Any:
    """A value of the session state, `default` if it has none."""
    return do(st.session_state.get, key, default)


def put(key: str, value: object) -> None:
    """Set a value of the session state."""
    do(st.session_state.__setitem__, key, value)


def toast(text: str, icon: str) -> None:
    """Show a toast at the beginning of the next pass."""
    put(TOASTS, [*get(TOASTS, ()), (text, icon)])


def show_toasts() -> None:
    """Show the toasts of callbacks, at the beginning of a pass."""
    for text, icon in st.session_state.get(TOASTS, ()):
        st.toast(text, icon=icon)


def toasts_shown() -> None:
    """After a pass that was not interrupted: the browser has shown them."""
    st.session_state.pop(TOASTS, None)
