"""The view of a page, kept in its address: a copied link opens the same view.

address.take("format", "ranges.formats", address.several(LIMITS), ["fp16"])
...                                     # the widget with that key
address.keep("format", "ranges.formats", ",".join(formats))
"""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import streamlit as st

from pages.parts import words
from pages.parts.choice import one_of

T = TypeVar("T")

AGAIN_S = 3.0
"""For this long after a field was set, the browser may not have drawn it."""


def set_value(key: str, value: Any) -> None:
    """Before a widget: set session state `key` to `value` unless it has that value. Any assignment is sent to the
    browser, even of an equal value, and would undo a click that was made meanwhile."""
    if key not in st.session_state or st.session_state[key] != value:
        st.session_state[key] = value
        st.session_state[f"address.set.{key}"] = time.monotonic()
    else:
        _again(key)


def _again(key: str) -> None:
    """Repeat recent assignments: a rerun that follows at once, as after the first pass, replaces what that pass drew.
    The browser may not have seen it yet, and would answer with the widget's own default."""
    if time.monotonic() - st.session_state.get(f"address.set.{key}", -math.inf) < AGAIN_S:
        st.session_state[key] = st.session_state[key]


def take(name: str, key: str, parse: Callable[[str], Any], default: Any = None) -> None:
    """Before its widget: set session state `key` from `name` in the address, if that changed.

    `parse` returns None for invalid text. If no value is known, `default` is set unless it is None.
    """
    asked = st.query_params.get(name)
    if asked is not None and asked != st.session_state.get(f"address.{key}"):
        value = parse(asked[:2000])
        if value is not None:
            set_value(key, value)
        elif asked != st.session_state.get(f"address.wrote.{name}"):
            refuse(name, asked)
    if default is not None and st.session_state.get(key) is None:
        set_value(key, default)
    elif key in st.session_state:
        _again(key)


def keep(name: str, key: str, text: str) -> None:
    """After its widget: write `text` to the address; an empty text removes the name. Defaults stay out of the address:
    each change of it is one more step for the browser's Back button."""
    if text:
        st.query_params[name] = text
    elif name in st.query_params:
        del st.query_params[name]
    st.session_state[f"address.{key}"] = st.session_state[f"address.wrote.{name}"] = text or None


def choose(name: str, label: str, options: Sequence[T], default: T, key: str, **look: Any) -> T:
    """A segmented control whose choice is kept as `name`; `look` holds more of its arguments."""
    take(name, key, lambda text: next((option for option in options if str(option) == text), None), default)
    chosen = one_of(label, options, key, **look)
    keep(name, key, str(chosen) if chosen != default else "")
    return chosen


def refuse(name: str, text: str) -> None:
    """Note that the address asks for something that does not exist; `show_refused` shows it."""
    st.session_state["address.refused"][name] = (text, time.monotonic())


def begin(page: str) -> None:
    """Before a page: forget what was refused on another one."""
    if st.session_state.get("address.page") != page:
        st.session_state["address.page"] = page
        st.session_state["address.refused"] = {}


def show_refused() -> None:
    """Above the page, after it ran: what its address asks for and is not there; also in a rerun that follows at
    once."""
    refused: dict[str, tuple[str, float]] = st.session_state["address.refused"]
    texts = [f"{name}={text[:60]}" for name, (text, since) in refused.items() if time.monotonic() - since < AGAIN_S]
    if texts:
        st.warning(
            f"The address asks for {words.escape(' and '.join(texts))}, which does not exist here; "
            "the page shows the default.",
            icon=":material/link_off:",
        )


def choice(options: list[str]) -> Callable[[str], str | None]:
    """A parser for one of `options`."""
    return lambda text: text if text in options else None


def whole(options: list[int]) -> Callable[[str], int | None]:
    """A parser for one of `options`, which are integers."""
    return lambda text: int(text) if text.isdecimal() and int(text) in options else None


def several(options: list[str]) -> Callable[[str], list[str] | None]:
    """A parser for some of `options`, separated by commas."""
    return lambda text: [one for one in text.split(",") if one in options] or None


def steps(text: str) -> tuple[int, int] | None:
    """Parse `100-200` as the first and last step, in order."""
    first, _, last = text.partition("-")
    try:
        low, high = int(first), int(last or first)
    except ValueError:
        return None
    return (min(low, high), max(low, high)) if low >= 0 else None
